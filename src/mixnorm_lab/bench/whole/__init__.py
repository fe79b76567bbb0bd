"""Whole models, where the other benchmarks have one layer: their steps, and the time that a new process needs for them."""

"""Benchmarks: cases, measurements, one CSV, and tables and plots that are made from the CSV alone."""

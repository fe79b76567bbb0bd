"""Stateless mathematics: the reference, the faster paths beside it, and the one place that chooses between them."""

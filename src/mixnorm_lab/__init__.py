"""The laboratory: models, data, training runs, reports and benchmarks of mixture norm, and the command ``mixnorm``."""

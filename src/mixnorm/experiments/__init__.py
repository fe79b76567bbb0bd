"""Training runs: what is trained (config, catalog), how (train), and what was measured (records)."""

"""Training one run: from a configuration, a model and data to a record."""

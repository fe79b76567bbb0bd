"""The configuration of a run, presets for a comparison, and the experiments of the paper."""

"""What a run is: its configuration, presets for a comparison, and the experiments of the paper."""

"""The parts of a run's configuration that are configurations of their own, and how they are checked."""

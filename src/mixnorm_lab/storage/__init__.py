"""What is kept on a disk: records, checkpoints, measurements, and what keeps them whole."""

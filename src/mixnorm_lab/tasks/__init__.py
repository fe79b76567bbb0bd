"""What a run minimizes and is judged by: losses and metrics of batches of any kind, and which of them a project needs."""

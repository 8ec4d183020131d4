"""What is told of a run: the names of metrics, the run's folder, the terminal."""

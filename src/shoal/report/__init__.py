"""What is reported of a run: metrics, the run's folder and its groups, sinks, the terminal. Imports
no trainer."""

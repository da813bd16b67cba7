"""What is scored: tasks, their data and metrics."""

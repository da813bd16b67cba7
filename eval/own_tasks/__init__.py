"""Comparison of encoders on user-defined tasks, which a task file describes."""

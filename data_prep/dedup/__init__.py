"""Exact and near duplicates, and overlap with the tasks' texts."""

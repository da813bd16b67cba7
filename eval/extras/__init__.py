"""Beside the leaderboard: studies, sweeps, minimal pairs."""

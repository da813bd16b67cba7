"""The leaderboard, a page for every run, and what goes with it."""

"""Which of two recipes is better: pairs of runs, a sequential test with one error, and a log of all duels."""

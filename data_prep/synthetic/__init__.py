"""The embedded corpus: English-like documents about a small invented world, and eight GLUE-like tasks about it.

Everything is generated from a seed, so the suite runs from raw text to leaderboard without a download. The tasks need
what the corpus teaches: their dev and test sentences use words that fine-tuning never shows, and no sentence of a task
stands in the corpus. `lexicon` holds the words, `speaker` makes sentences of facts, `documents` and `tasks` make text.
"""

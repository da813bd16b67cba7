"""Research strategies that most runs never use: documented in docs/experimental.md, loaded by name, never imported."""

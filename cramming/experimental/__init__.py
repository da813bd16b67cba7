"""Research strategies that most runs never use: documented in docs/explanation/experimental.md, loaded by name, never imported."""

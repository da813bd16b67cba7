"""Research strategies that most runs never use, loaded by name (docs/explanation/experimental.md)."""

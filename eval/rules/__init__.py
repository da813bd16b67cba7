"""The numbered rules (docs/reference/rules.md) and their evidence."""

"""The numbered rules (docs/rules.md) and their evidence."""

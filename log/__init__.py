"""The append-only store of Delta Lake tables."""

"""The Delta Lake tables of a store: their logs, what is visible in them, their rows, and commits."""

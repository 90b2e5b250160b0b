"""The Delta Lake tables of a store: their logs, visible files, rows, and commits."""

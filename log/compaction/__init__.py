"""Many files of a table made one, which has the same rows, sorted by their keys."""

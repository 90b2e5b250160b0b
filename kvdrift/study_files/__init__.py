"""Documentation of study files: the reference of their keys, and new files with a comment to each key."""

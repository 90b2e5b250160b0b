"""The commands that estimate a stored study, decide on it and show it."""

"""Verify a store: read everything in it, and compare it with the log, with file names and with its sources."""

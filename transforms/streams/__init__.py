"""Beam transforms for streams of events: assemble replicates, derive them, and read and write a store."""

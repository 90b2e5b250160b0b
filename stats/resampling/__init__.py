"""Draws of documents, and the intervals of estimates that these draws give."""

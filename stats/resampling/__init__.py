"""Draws of documents, and the intervals that estimates get from them."""

"""Whole prompt caches that are computed or held in another way than the reference's."""

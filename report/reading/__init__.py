"""Readers of the views: facts, estimates, published values."""

"""Readers of the views: facts, estimates, quantities, published values."""

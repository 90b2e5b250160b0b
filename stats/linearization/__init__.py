"""Quantities linearized in pooled moments: derivatives, and the standard errors that follow from them."""

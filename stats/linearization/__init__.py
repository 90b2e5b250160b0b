"""Quantities linearized in pooled moments: their derivatives, and the standard errors that follow."""

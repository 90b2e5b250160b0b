"""Estimates with less variance, by control variates (definitions, "Martingale control variates")."""

"""Finite-state systems: distributions as tables, their exact quantities, and the systems as a study's model."""

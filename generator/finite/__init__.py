"""Finite-state systems: laws as tables, their exact quantities, and the systems as a study's model."""

"""Derived tables -> views: one view per .sql file in ``views``, its contract beside it in ``contracts``."""

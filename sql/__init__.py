"""Derived tables -> views: one view per .sql file in ``views``, with its contract in the .toml file beside it."""

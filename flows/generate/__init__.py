"""A study's stored material and units, and their generation in this process or in side processes."""

"""The missing events of a study, and their generation in this process or in side processes."""

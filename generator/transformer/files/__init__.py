"""A model's files: their places, their content and their fingerprints."""

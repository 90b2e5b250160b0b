"""A model's files: where they are, what they say, their fingerprints, and what was proven of them."""

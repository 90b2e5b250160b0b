"""A model's files: their places, their content, their fingerprints, and proofs about them."""

"""Moments of documents, stored: the SQL of their rows, the batches that compute them, and their commits."""

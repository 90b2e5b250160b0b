"""A small retrieval model with its own documents, so that every study can run without a download."""

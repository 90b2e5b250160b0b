"""A small retrieval model with its own documents, so that every study can be run without a download."""

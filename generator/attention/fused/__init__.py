"""Attention of decoding streams by two operations, each of which is one launch on CUDA."""

"""Attention of decoding streams by two operations that one launch each computes on CUDA."""

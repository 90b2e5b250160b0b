"""Prove, when a model is loaded, that decoding here gives the results of transformers' own forward pass."""

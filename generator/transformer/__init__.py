"""Transformers as models: loading, prefill, eviction, distributions, and memory."""

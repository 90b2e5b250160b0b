"""Transformers as models: loading, prefill, eviction, and what fits into memory."""

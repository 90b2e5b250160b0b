"""Transformers as models: loading, prefill, eviction, laws, and memory."""

"""Prefill prompts, evict entries, decode the reference and the compressed model, and record every step."""

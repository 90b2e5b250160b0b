"""Prompts in, coupled continuations out: prefill, evict, decode reference and compressed model, record every step."""

"""Servers as sides: llama-server, vLLM and SGLang with whole distributions; others with tokens at temperature 0."""

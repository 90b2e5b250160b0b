"""Servers as sides: llama-server, vLLM and SGLang give whole distributions; others, tokens at temperature 0."""

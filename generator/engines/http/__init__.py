"""Servers as sides: llama-server, vLLM and SGLang with whole laws; any other server with tokens at temperature 0."""

"""Servers as sides: llama-server, vLLM and SGLang give whole distributions, others only tokens at temperature 0."""

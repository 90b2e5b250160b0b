"""Prefill prompts, evict entries, decode the reference and the compressed model, and record every step."""

import os

# On CUDA torch would warn which library of matrix products it chooses; errors are still written.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# How often GNU's OpenMP, which computes for torch and for llama.cpp, checks whether other threads are ready before a
# thread sleeps. Its default is 300,000: on a busy machine threads then hold processors for nothing. With 100,000 an
# idle machine computes as fast (docs/costs.md, "Threads"). The library reads it when it is loaded, and child processes
# inherit it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")

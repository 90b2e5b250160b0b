"""Prefill prompts, evict entries, decode the reference and the compressed model, and record every step."""

import os

# On CUDA torch would write a warning about the library of products that is chosen; errors are still written.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

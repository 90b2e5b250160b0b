"""What every test needs: one torch thread per process, and no network behind a mistyped model id."""

from __future__ import annotations

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

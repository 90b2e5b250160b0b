"""The measured case of generation: a model's shape, its prompt, its actions."""

from __future__ import annotations

from dataclasses import dataclass

from generator.actions import Action
from generator.selectors import Recent, SnapKV
from generator.transformer.footprint import matrix_bytes
from generator.transformer.memory import ModelShape
from schema.retention import Retention


@dataclass(frozen=True)
class Case:
    """A model's shape, and the sizes of the generation."""

    layers: int = 8
    width: int = 512
    inner_width: int = 1408
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 32_000
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    entries: int = 1024
    replicates: int = 64
    horizon: int = 32

    def actions(self) -> list[Action]:
        """Return the three measured actions."""
        half = Retention.parse("1/2")
        return [
            Action("snapkv-half", "snapkv", SnapKV(), half),
            Action("recent-half", "recent", Recent(), half),
            Action("snapkv-512", "snapkv", SnapKV(), Retention(512)),
        ]

    def kept(self) -> list[int]:
        """Return how many prompt entries each action keeps."""
        return [action.retention.kept(self.entries) for action in self.actions()]


PRESETS = {
    "small": (Case(), (1024, 4096)),
    # The shape of Llama-3.1-8B.
    "llama-8b-32k": (Case(32, 4096, 14_336, 32, 8, 128_256, "bfloat16", horizon=128), (32_768,)),
}


def model_shape(case: Case) -> ModelShape:
    """Return the model's shape as the memory planner reads it."""
    size = case.width // case.heads
    return ModelShape(
        case.layers, case.width, case.inner_width, case.heads, case.kv_heads, size, case.vocabulary, case.dtype
    )


def weight_bytes(case: Case) -> int:
    """Return the bytes of all weights, with both embeddings."""
    return matrix_bytes(model_shape(case), tables=2)

"""A decoder-only transformer in memory, and the settings with which it computes distributions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvdrift.generator.attention.parts import UNKNOWN, LayerTraits
from kvdrift.generator.attention.row_invariance import RowInvariance, TriedSteps
from kvdrift.generator.attention.threads import at_most, torch_threads
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling

# With fewer parameters, handing a matrix product to a second thread takes longer than computing it, and on a busy
# machine many times longer.
ONE_THREAD_PARAMETERS = 20_000_000

# glibc keeps freed memory for later use, up to twice the size of the largest block below 32 MiB that was ever freed. So
# a block of nearly 32 MiB is freed once. Otherwise glibc would return freed memory to the system, which fills it with
# zeros before it hands it out again.
_KEPT_BYTES = 2**25 - 2**14

# CUDA's messages after which every call in the process fails: errors of kernels and of the hardware.
_DEVICE_LOST = re.compile(
    "CUDA error: .*(illegal memory access|illegal instruction|misaligned address|invalid program counter|"
    "operation not supported on global/shared address space|launch failure|launch timed out|device-side assert|"
    "hardware stack error|uncorrectable|unknown error)"
)


@dataclass(frozen=True)
class Decoder:
    """A causal language model that is ready to compute distributions."""

    id: str  # in the study file
    network: Any  # a transformers causal language model in evaluation mode
    device: str  # of tokens and distributions; with a device map, layers may be on other devices
    dtype: str  # of the weights
    eos_tokens: tuple[int, ...]  # which end a continuation; the first fills the positions after the end
    positions: int  # the most tokens, prompt and generated tokens, that the model was made for
    shape: ModelShape
    rows: RowInvariance  # the multiple of rows to decode with, and how exact that is
    threads: int | None = None  # the most on a CPU; all numbers give the same bits; None for torch's own number
    memory_share: float = 1.0  # of the available memory, that decoding may take
    logits_dtype: str | None = None  # "float32", or None for the dtype of the weights, to which logits are rounded
    sampling: Sampling = FULL_SOFTMAX  # applied to logits
    traits: LayerTraits = UNKNOWN  # of its layers, which selectors may need
    switch: int | None = None  # the number of positions beyond which RoPE has other frequencies, if there is one
    steps: TriedSteps = field(default_factory=TriedSteps)
    before_pass: Callable[[], None] = lambda: None  # called before every pass; an error that it raises ends the pass

    @property
    def row_multiple(self) -> int:
        """The multiple to which the number of rows is padded, found by a test (``RowInvariance.multiple``)."""
        return self.rows.multiple

    @property
    def batch_deviation(self) -> float:
        """The most that other rows of a batch change a row's results, relative to the largest result; 0 if exact."""
        return max(self.rows.deviation, self.steps.deviation)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let torch use up to ``threads`` threads in the block, fewer on a busy machine; apply ``whole_sums``."""
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        with torch_threads(None) if self.threads is None else at_most(self.most_threads), whole_sums(self.device):
            yield

    @property
    def most_threads(self) -> int:
        """The most threads that compute on a CPU; 1 if more gave other results, or if ``threads`` is None."""
        return 1 if self.steps.alone else self.threads or 1


def is_small(network: nn.Module) -> bool:
    """Return whether a network is so small that one thread computes its products as fast as several."""
    return sum(parameter.numel() for parameter in network.parameters()) < ONE_THREAD_PARAMETERS


@contextmanager
def whole_sums(device: str) -> Iterator[None]:
    """Forbid cuBLAS inside the block to split a product's sums, which would make a row depend on the number of rows.

    cuBLAS may otherwise sum parts of a product of 16-bit numbers separately. Inside the block torch multiplies by
    cuBLASLt, since its default library refuses products of 16-bit numbers under this setting. On other devices than
    CUDA nothing changes.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = [(getattr(settings, name), getattr(settings, f"{name}_split_k")) for name in names]
    library = torch.backends.cuda.preferred_blas_library()
    with warnings.catch_warnings(action="ignore"):  # torch warns that other libraries than the default are a trial
        torch.backends.cuda.preferred_blas_library("cublaslt")
    for name in names:
        setattr(settings, name, (False, False))
    try:
        yield
    finally:
        for name, values in zip(names, before, strict=True):
            setattr(settings, name, values)
        torch.backends.cuda.preferred_blas_library(library)


def is_device_lost(error: Exception) -> bool:
    """Return whether an error means that the GPU can compute nothing more in this process."""
    return _DEVICE_LOST.search(str(error)) is not None


def check_prompt(
    document: Document, horizon: int, positions: int | None, vocabulary: int | None, switch: int | None = None
) -> None:
    """Raise an error for a document that the model cannot read.

    ``positions`` and ``vocabulary``, the model's numbers of positions and tokens, are None if unknown. If RoPE has
    other frequencies beyond ``switch`` positions, prompt and continuation must be on one side of it.
    """
    if not document.tokens:
        raise InputError(f"document '{document.doc}': the tokenizer makes no token of its prompt")
    if positions is not None and document.prompt_tokens + horizon > positions:
        raise InputError(
            f"document '{document.doc}': a prompt of {document.prompt_tokens} tokens and a horizon of {horizon} exceed "
            f"the {positions} positions of the model (max_position_embeddings)"
        )
    if switch is not None and document.prompt_tokens <= switch < document.prompt_tokens + horizon:
        raise InputError(
            f"document '{document.doc}': the model's RoPE (longrope) has other frequencies after {switch} positions, "
            f"within the {horizon} tokens that follow a prompt of {document.prompt_tokens}; give prompts of at most "
            f"{switch - horizon} tokens, or of more than {switch}"
        )
    if vocabulary is not None and (beyond := max(document.tokens)) >= vocabulary:
        raise InputError(
            f"document '{document.doc}': its prompt has token {beyond}, beyond the model's {vocabulary} tokens "
            "(vocab_size); the folder's tokenizer belongs to another model"
        )

"""The kernel for CUDA on a machine without a GPU: it compiles for its targets, or the machine works without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.coupling.laws import BLOCK_TOKENS

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from generator.coupling import fused_draws, fused_sums


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_kernel_compiles(capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tables = {"laws": f"*{dtype}", "rows": "*i64", "sums": "*fp64"}
    numbers = dict.fromkeys(("law_stride", "row_stride", "size", "absorbed_token", "pairs", "blocks"), "i32")
    kernel: Any = fused_sums._sum_pairs
    source = ASTSource(kernel, tables | numbers | {"BLOCK": "constexpr"}, constexprs={"BLOCK": BLOCK_TOKENS})
    options = {"enable_fp_fusion": False}  # as it is launched
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]


def test_a_machine_that_cannot_build_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        message = "Failed to find C compiler. Please specify via CC environment variable."
        raise RuntimeError(message)

    monkeypatch.setattr(fused_sums, "pair_sums", broken)
    fused_draws.fused_fault.cache_clear()
    assert fused_draws.fused_fault(torch.device("cpu")) == (
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    )
    fused_draws.fused_fault.cache_clear()

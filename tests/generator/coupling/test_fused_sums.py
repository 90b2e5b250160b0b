"""The kernel for CUDA without a GPU: it compiles for what it is for, and its values are those of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.house import ROOT

from generator.coupling.laws import BLOCK_TOKENS

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from generator.coupling import fused_sums

_INTERPRETED = """
import json, sys
import torch
from generator.coupling.fused_sums import fault, pair_sums

cases = []
for dtype, size, block in ((torch.float32, 10_007, 512), (torch.float64, 1_000, 256), (torch.float32, 7, 512)):
    generator = torch.Generator().manual_seed(size)
    table = torch.rand(5, size, generator=generator, dtype=dtype).softmax(-1)
    table[1] = table[0]
    rows = torch.tensor([[0, 0, 2, -1, 3, -1, -2, -2], [1, 2, -1, 4, 3, -1, 2, -1]])
    apart, excess = pair_sums(table, rows, 3, block)
    point = torch.zeros(size, dtype=dtype)
    point[3] = 1
    laws = [*table, 0 * point, point]
    p, q = (torch.stack([laws[row] for row in some]) for some in rows.tolist())
    wanted = ((p - q).abs(), (q - p).clamp(min=0))
    cases.append([
        max(
            float((sums[:, i] - part.double().sum(-1)).abs().max())
            for sums, values in zip((apart, excess), wanted)
            for i, part in enumerate(values.split(block, -1))
        ),
        [float(sums[row].sum()) for sums in (apart, excess) for row in (0, 4, 5)],
    ])
print(json.dumps({"cases": cases, "fault": fault(torch.device("cpu"))}))
"""


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


def test_its_values_are_those_of_torch() -> None:
    """By Triton's interpreter, in a process of its own: the compiler does not come back from it."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, check=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["fault"] is None
    for deviation, equal in found["cases"]:
        assert deviation < 1e-6, "blocks are summed in another order, in the dtype of the laws"
        assert equal == [0.0] * 6, "equal laws are not apart at all"


def test_a_machine_that_cannot_build_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        message = "Failed to find C compiler. Please specify via CC environment variable."
        raise RuntimeError(message)

    monkeypatch.setattr(fused_sums, "pair_sums", broken)
    fused_sums.fault.cache_clear()
    assert fused_sums.fault(torch.device("cpu")) == (
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    )
    fused_sums.fault.cache_clear()

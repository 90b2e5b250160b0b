"""Every kernel for CUDA compiles on a machine without a GPU, as it is launched, and fits the GPUs that it is for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdrift.generator.attention import triton_kernels as attention
from kvdrift.generator.coupling import fused_sums
from kvdrift.generator.coupling.distributions import BLOCK_TOKENS
from kvdrift.generator.transformer.fused import triton_kernels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNFUSED = {"enable_fp_fusion": False}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, options: Mapping[str, Any],
    *, aligned: bool = False,
) -> Any:  # fmt: skip
    """Compile a kernel; arguments that are neither in ``types`` nor constants are int32, multiples of 16 if ``aligned``."""
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    multiples = [name for name, kind in signature.items() if aligned and kind not in ("constexpr", "fp32")]
    source = ASTSource(
        kernel, signature, constexprs={name: value for name, value in constants.items() if name in signature},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def tensors(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"*{kind}")


SHARED = {80: 163, 89: 99, 90: 227}  # KiB of shared memory that a program can have, by compute capability

ATTENTION = [
    (capability, dtype, size) for capability in SHARED for dtype in DTYPES for size in (16, 64, 96, 128, 256, 512)
]


@pytest.mark.parametrize(("capability", "dtype", "size"), ATTENTION)
@pytest.mark.parametrize("terms", [(None, None, False), (512, 50.0, True)], ids=["plain", "terms"])
@pytest.mark.by_default("terms-90-bf16-512")
def test_attention(capability: int, dtype: str, size: int, terms: tuple[int | None, float | None, bool]) -> None:
    """32 query heads on 8 KV heads; entries are copied 16 bytes at a time, unless they are copied in one stage."""
    types = tensors("query key value suffix_key suffix_value sinks result output chunk_output", dtype)
    types |= tensors("mass chunk_mass", "fp32") | tensors("caches packed tiles places length", "i64")
    types |= {"scale": "fp32", "cap": "fp32"}
    *own, sinks = terms
    prompt = attention.prompt_constants(32, 8, size, *own) | attention.prompt_shape(
        DTYPES[dtype], size, SHARED[capability] * 1024
    )
    suffix = attention.suffix_constants(32, 8, size, *own, sinks=sinks) | attention.suffix_shape(DTYPES[dtype], 4, size)
    for kernel, constants in ((attention._attend_chunk, prompt), (attention._attend_suffix, suffix)):
        launched = attention.OPTIONS | {name: constants[name] for name in ("num_warps", "num_stages")}
        made = compiled(kernel, types, constants, capability, launched, aligned=True)
        assert made.metadata.shared <= SHARED[capability] * 1024
        unstaged = size < 64 or launched["num_stages"] == 1
        assert unstaged or "cp.async.cg.shared.global" in made.asm["ptx"], "16 bytes"


_ADD_NORM = {"ADDS": True, "NORMS_ADDED": False, "NORMS": True, "STYLE": 0, "BLOCK": 4096}
_ROTATE = {"NORMED": True, "TURNS": True, "WIDE": False, "STYLE": 0, "HALF": 64, "REST": 0}
_PARTIAL = {"NORMED": True, "TURNS": True, "WIDE": True, "STYLE": 2, "HALF": 32, "REST": 64}
_NOT_TURNED = {"NORMED": True, "TURNS": False, "WIDE": False, "STYLE": 1, "HALF": 64, "REST": 0}


@pytest.mark.parametrize(("capability", "dtype"), [(80, "fp32"), (90, "bf16"), (80, "fp16")])
@pytest.mark.by_default("90-bf16")
def test_operations_of_layers(capability: int, dtype: str) -> None:
    added, heads = "residual added added_weight weight output", "projected cos sin query_weight key_weight"
    for kernel, names, constants, warps in (
        (triton_kernels._add_norm, added, _ADD_NORM, 8),
        (triton_kernels._add_norm, added, _ADD_NORM | {"NORMS_ADDED": True, "STYLE": 2}, 8),
        (triton_kernels._add_norm, added, _ADD_NORM | {"NORMS_ADDED": True, "NORMS": False, "STYLE": 1}, 8),
        (triton_kernels._norm_columns, "x weight", {"STYLE": 1, "BLOCK": 4096}, 8),
        (triton_kernels._rotate, heads, _ROTATE, 1),
        (triton_kernels._rotate, heads, _PARTIAL, 1),
        (triton_kernels._rotate, heads, _NOT_TURNED, 1),
        (triton_kernels._gated, "projected output", {"GELU": False, "BLOCK": triton_kernels._COLUMNS}, 4),
        (triton_kernels._gated, "projected output", {"GELU": True, "BLOCK": triton_kernels._COLUMNS}, 4),
    ):
        types = tensors(names, dtype) | {"epsilon": "fp32"}
        if constants.get("WIDE"):
            types |= tensors("cos sin", "fp32")
        assert compiled(kernel, types, constants, capability, UNFUSED | {"num_warps": warps}).asm["cubin"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.by_default("fp32-80", "fp64-90")
def test_sums_of_pairs(capability: int, dtype: str) -> None:
    types = {"distributions": f"*{dtype}", "rows": "*i64", "sums": "*fp64"}
    tiny = torch.finfo({"fp32": torch.float32, "fp64": torch.float64}[dtype]).tiny
    constants = {"BLOCK": BLOCK_TOKENS, "TINY": tiny}
    assert compiled(fused_sums._sum_pairs, types, constants, capability, UNFUSED).asm["cubin"]

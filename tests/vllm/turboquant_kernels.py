"""vLLM's TurboQuant kernels under Triton's interpreter, in vLLM's environment: layers in a file to arrays in another.

vLLM finds no GPU and no Triton for CPUs, and would leave Triton out. The interpreter needs neither, so the check of
vLLM's version is told that this is no build for CPUs; all else is vLLM's own.

    python turboquant_kernels.py LAYERS.npz READ.npz
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import vllm.platforms

vllm.platforms.vllm_version_matches_substr = lambda _: False

from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids  # noqa: E402
from vllm.model_executor.layers.quantization.turboquant.config import TQ_PRESETS, TurboQuantConfig  # noqa: E402
from vllm.v1.attention.backends.turboquant_attn import _build_hadamard  # noqa: E402
from vllm.v1.attention.ops.triton_turboquant_decode import (  # noqa: E402
    _tq_full_dequant_kv,
    triton_turboquant_decode_attention,
)
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store  # noqa: E402

_PAGE = 16  # entries of a page of the cache


def read(key: torch.Tensor, value: torch.Tensor, query: torch.Tensor, preset: str) -> dict[str, Any]:
    """Store keys and values, float16 [entries, KV heads, size], and read them as vLLM does.

    Args:
        key: The keys, or with keys of 8 bits numbers that are in e4m3 already.
        value: The values.
        query: Queries of one token, float32 [query heads, size].
        preset: A name of vLLM's.

    Returns:
        ``key`` and ``value``, float32 [entries, KV heads, size], which the kernel reads in float16, keys multiplied by
        the Hadamard matrix in float32; ``attention`` of the queries, in their shape; and vLLM's ``bytes`` of a key, of
        a value and of both.
    """
    entries, heads, size = key.shape
    config = TurboQuantConfig.from_cache_dtype(preset, size)
    matrix, centroids = _build_hadamard(size, "cpu"), get_centroids(size, config.centroid_bits)
    pages = -(-entries // _PAGE)
    cache = torch.zeros(pages, _PAGE, heads, config.slot_size_aligned, dtype=torch.uint8)
    triton_turboquant_store(
        key, value, cache, torch.arange(entries, dtype=torch.int32), matrix, (centroids[1:] + centroids[:-1]) / 2,
        config.key_mse_bits, config.key_packed_size, config.effective_value_quant_bits, key_fp8=config.key_fp8,
    )  # fmt: skip
    table = torch.arange(pages, dtype=torch.int32)[None]
    back = [torch.zeros(1, heads, entries, size, dtype=torch.float16) for _ in range(2)]
    _tq_full_dequant_kv[(entries, heads)](
        cache, table, centroids, *back, *back[0].stride()[:3], *back[1].stride()[:3], *cache.stride()[:3],
        table.stride(0), HEAD_DIM=size, BLOCK_SIZE=_PAGE, NUM_KV_HEADS=heads, MSE_BYTES=-(-size * config.mse_bits // 8),
        KPS=config.key_packed_size, VQB=config.effective_value_quant_bits,
        VAL_DATA_BYTES=-(-size * config.effective_value_quant_bits // 8), MSE_BITS=config.mse_bits,
        KEY_FP8=int(config.key_fp8), BLOCK_D=size, NORM_CORRECTION=int(config.norm_correction), num_warps=4,
    )  # fmt: skip
    keys, values = (part[0].transpose(0, 1).float() for part in back)
    attention = triton_turboquant_decode_attention(
        query[None], cache, table, torch.tensor([entries], dtype=torch.int32), matrix, centroids, size**-0.5,
        config.mse_bits, config.key_packed_size, config.effective_value_quant_bits, key_fp8=config.key_fp8,
        norm_correction=config.norm_correction, max_num_kv_splits=4,
    )  # fmt: skip
    return {
        "key": keys if config.key_fp8 else keys @ matrix, "value": values, "attention": attention[0],
        "bytes": np.array([config.key_packed_size, config.value_packed_size, config.slot_size]),
    }  # fmt: skip


def main(layers: str, output: str) -> None:
    """Read every layer of a file by every preset, and write the arrays, and centroids of N(0, 1/64)."""
    given, arrays = np.load(layers), dict[str, Any]()
    for name in sorted({part.partition("/")[0] for part in given}):
        for preset, parameters in TQ_PRESETS.items():
            keys = "key_in_e4m3" if parameters["key_quant_bits"] == 8 else "key"
            parts = [torch.from_numpy(given[f"{name}/{part}"]) for part in (keys, "value", "query")]
            arrays |= {f"{name}/{preset}/{part}": array for part, array in read(*parts, preset).items()}
    arrays |= {f"centroids/{bits}": get_centroids(64, bits) for bits in (2, 3, 4)}
    np.savez(output, presets=json.dumps(TQ_PRESETS), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

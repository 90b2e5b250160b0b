"""Draw tokens and compute distances of all pairs by few operations on the laws' device, without waiting for the host.

``kvdrift.generator.coupling.laws.LawTable`` draws the same tokens from copies of the laws, and chooses on the host
which laws to compute; on a CPU that is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdrift.generator.coupling.laws import BLOCK_TOKENS, block_sums, distance_of, draw_by_sums
from kvdrift.generator.coupling.streams import Savings
from kvdrift.schema.errors import tried_once

ABSORBED, NOTHING = -1, -2  # rows: the point mass of an ended side, and no mass at all
_BYTES = 2**28  # of laws that the plain form takes at once


def are_fused(savings: Savings, device: str) -> bool:
    """Tell whether pairs are coupled by these operations on a device."""
    if savings.fused is not None:
        return savings.fused
    return torch.device(device).type == "cuda" and fused_fault(torch.device(device)) is None


def fused_draws(laws: Tensor, rows: Tensor, u: Tensor, reference: Tensor, absorbed_token: int) -> Tensor:
    """Draw the references' tokens and the pairs' tokens, and compare laws.

    Args:
        laws: [streams, V].
        rows: Pairs of laws, p above q, int64 [2, R + 2P]: nothing and the law of each of R references, the two laws of
            each of P pairs, and for each pair two more laws to compare. If both are one row, their distance is 0.
        u: Uniforms [R + 2P]: for the references' tokens, the pairs' residual tokens, and acceptance.
        reference: The reference of each pair, int64 [P].
        absorbed_token: The token that an ended side emits.

    Returns:
        float64 [R + 3P]: the references' tokens, the pairs' tokens, TV of the pairs' laws, TV of the other two laws.
    """
    references, pairs = u.shape[0] - 2 * len(reference), len(reference)
    drawn = references + pairs
    apart, excess = pair_sums(laws, rows, absorbed_token)
    excess = excess[:drawn]
    left, right = rows[0, :drawn], rows[1, :drawn]

    def weights(token: Tensor) -> Tensor:
        p, q = (_probabilities(laws, row, token, absorbed_token) for row in (left, right))
        return (q - p).clamp_(min=0.0)

    token = draw_by_sums(excess, u[:drawn], laws.shape[-1], weights)
    x, residual = token[:references], token[references:]
    x_of_pair = x[reference]
    p, q = (
        _probabilities(laws, row[references:], x_of_pair[:, None], absorbed_token)[:, 0].double()
        for row in (left, right)
    )
    # As ``couple``: where rounding leaves no excess mass, the laws differ in the last bit only.
    keep = (u[drawn:] * p < q) | (excess[references:].sum(-1) <= 0.0)
    y = torch.where(keep, x_of_pair, residual)
    return torch.cat([x, y, distance_of(apart[references:])])


@torch.library.custom_op("kvdrift::pair_sums", mutates_args=())
def pair_sums(laws: Tensor, rows: Tensor, absorbed_token: int) -> Tensor:
    """Return the sums of |p - q| and of max(q - p, 0) over blocks of tokens; one launch on CUDA.

    Laws are [streams, V]; rows of p and of q are int64 [2, B], ``ABSORBED`` or ``NOTHING`` for a law that is no
    stream's. Both sums are float64 [2, B, blocks]; exactly 0 for bitwise equal laws.
    """
    parts = []
    for left, right in torch.split(rows, max(_BYTES // laws[:1].nbytes, 1), 1):
        difference = _taken(laws, right, absorbed_token) - _taken(laws, left, absorbed_token)
        parts.append(torch.stack([block_sums(difference.abs()), block_sums(difference.clamp(min=0.0))]))
    return torch.cat(parts, 1)


@pair_sums.register_kernel("cuda")
def _on_cuda(laws: Tensor, rows: Tensor, absorbed_token: int) -> Tensor:
    from kvdrift.generator.coupling import fused_sums  # noqa: PLC0415 - Triton comes with CUDA only

    return fused_sums.pair_sums(laws, rows, absorbed_token, BLOCK_TOKENS)


@tried_once
def fused_fault(device: torch.device) -> str | None:
    """Return why the kernel cannot be used on a device; None if it can. It is tried once, with two small laws.

    Triton builds a kernel at its first use, which needs a C compiler on this machine.
    """
    laws = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], device=device)
    apart, excess = _on_cuda(laws, torch.tensor([[0, -1, -2], [1, 1, 1]], device=device), 2)
    exact = apart.flatten().tolist() == [0.5, 1.5, 1.0] and excess.flatten().tolist() == [0.25, 0.75, 1.0]
    return None if exact else "the kernel's sums are wrong"


def _taken(laws: Tensor, rows: Tensor, absorbed_token: int) -> Tensor:
    tokens = torch.arange(laws.shape[1], device=laws.device)
    point = (tokens == absorbed_token) & (rows == ABSORBED)[:, None]
    return torch.where(rows[:, None] < 0, point.to(laws.dtype), laws[rows.clamp(min=0)])


def _probabilities(laws: Tensor, rows: Tensor, tokens: Tensor, absorbed_token: int) -> Tensor:
    """Return the probabilities of ``tokens`` [B, n] under the laws of ``rows`` [B]."""
    point = (tokens == absorbed_token) & (rows == ABSORBED)[:, None]
    return torch.where(rows[:, None] < 0, point.to(laws.dtype), laws[rows.clamp(min=0)[:, None], tokens])

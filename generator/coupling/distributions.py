"""The overlap-residual maximal coupling of two next-token distributions (paper, eq. "coupling-kernel").

Functions of distributions and uniforms return tokens; this module knows no models, histories or caches. Distributions
are float64, or float32 for a large vocabulary. Blocks of float32 distributions are summed in float32, and everything
else in float64.

``DistributionTable`` draws from copies of the distributions, and chooses on the host which distributions to compute; on
a CPU that is faster. ``fused_draws`` draws the same tokens of all pairs by few operations on the distributions' device,
without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.schema.errors import tried_once

BLOCK_TOKENS = 512  # tokens that are summed together: a draw chooses a block by the sums, and then one of its tokens
_CPU_BYTES, _OTHER_BYTES = 2**20, 2**28  # of distributions processed in one part, on a CPU and elsewhere
_LONG_BYTES = 2**15  # of a distribution; longer distributions are subtracted one by one, without a copy


def softmax(logits: Tensor, out: Tensor) -> None:
    """Write the softmax of logits [..., V] into ``out``, float32 or float64 [..., V].

    A CPU adds up the exponentials of a row one by one. In float32, with a large V, the rounded sum is off by up to
    1e-5, so the probabilities are divided by their sum over blocks.
    """
    torch.softmax(logits, -1, dtype=out.dtype, out=out)
    if out.dtype == torch.float32 and out.device.type == "cpu":
        out.div_(block_sums(out).sum(-1, keepdim=True).float())


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Return TV(p, q) of distributions [..., V], float64 [...], in [0, 1]; exactly 0 for bitwise equal distributions.

    TV is computed as half the sum of absolute differences, since one minus the overlap could be rounded to a number
    above 0 for equal distributions.
    """
    return distance_of(block_sums((p - q).abs_()))


def distance_of(apart: Tensor) -> Tensor:
    """Return TV, float64 [...], from the sums of |p - q| over blocks, float64 [..., blocks]."""
    return (0.5 * _row_sums(apart)).clamp_(max=1.0)


def entropy_terms(p: Tensor, q: Tensor, difference: Tensor, apart: Tensor, out: Tensor | None = None) -> Tensor:
    """Return p log(p/q) - p + q of each token, in nats, in the shape and dtype of distributions ``p`` and ``q``.

    Kullback and Leibler (1951), On information and sufficiency; ``docs/quantities.md``. The terms add up to the
    divergence, since distributions have equal sums. Unlike the terms p log(p/q), none is negative, so nothing cancels
    in their sum. They are computed from ``difference``, q - p, and not from two logarithms: a small difference is
    exact, so a small divergence is not lost in rounding. ``apart`` is |q - p|; ``out`` may be given memory of this
    shape.

    Terms are exactly 0 where p = q. They are finite: in the logarithm, a probability below the least normal number of
    the dtype counts as this number, and ``unsupported`` marks the tokens whose term is infinite.
    """
    least = torch.minimum(p, q, out=out).clamp_(min=torch.finfo(p.dtype).tiny)
    logarithm = torch.div(apart, least, out=least).log1p_()  # |log(p/q)|
    return torch.addcmul(difference, p, logarithm.copysign_(difference), value=-1, out=logarithm)


def unsupported(p: Tensor, q: Tensor) -> Tensor:
    """Mark the tokens that p can draw and q cannot, bool in the shape of ``p`` and ``q``.

    A p below the least normal number of its dtype is rounding, and counts as 0.
    """
    return (q == 0) & (p >= torch.finfo(p.dtype).tiny)


def divergence_of(terms: Tensor) -> Tensor:
    """Return KL, float64 [...], from the sums of ``entropy_terms`` over blocks, float64 [..., blocks]."""
    return _row_sums(terms).clamp_(min=0.0)


def most_probable(distributions: Tensor) -> Tensor:
    """Return the most probable token of each distribution [..., V], int64 [...]; of equals the lowest id.

    On a CPU numpy finds it, faster than torch. On other devices, where argmax need not take the first of equals, a
    block is chosen by its largest probability, and then one of its tokens.
    """
    if distributions.device.type == "cpu":
        return torch.from_numpy(distributions.numpy().argmax(-1))
    size = distributions.shape[-1]
    if size <= BLOCK_TOKENS:
        return _first_largest(distributions)
    blocks, rest = torch.split(distributions, [size // BLOCK_TOKENS * BLOCK_TOKENS, size % BLOCK_TOKENS], -1)
    largest = blocks.reshape(*blocks.shape[:-1], -1, BLOCK_TOKENS).amax(-1)
    largest = torch.cat([largest, rest.amax(-1, keepdim=True)], -1) if rest.shape[-1] else largest
    block = _first_largest(largest)[..., None] * BLOCK_TOKENS
    token = block + torch.arange(BLOCK_TOKENS, device=distributions.device)
    inside = distributions.gather(-1, token.clamp(max=size - 1)).masked_fill_(token >= size, -1.0)
    return block.squeeze(-1) + _first_largest(inside)


def _first_largest(values: Tensor) -> Tensor:
    """Return the first place of the largest of ``values`` [..., n], int64 [...]."""
    places = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == values.amax(-1, keepdim=True), places, values.shape[-1] - 1).amin(-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row, int64 [B], by the inverse distribution function.

    Weights are [B, V], not negative, with a positive sum in each row; uniforms are [B] in [0, 1). A token of weight 0
    is never drawn: the result is the first token whose cumulative weight exceeds u times the total. If rounding
    makes this product equal to the total, it is lowered to the next smaller number.
    """
    return draw_by_sums(block_sums(weights), u, weights.shape[-1], lambda token: weights.gather(-1, token))


def draw_by_sums(sums: Tensor, u: Tensor, size: int, weights_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw as ``draw`` does, int64 [B], from the block sums of weights [B, ``size``], float64 [B, blocks].

    ``weights_of`` is given tokens, int64 [B, n], and returns their weights in the same shape.
    """
    cumulative = _cumulative(sums)
    block, target = _first_above(cumulative, u * cumulative[:, -1])
    before = (cumulative - sums).gather(-1, block).squeeze(-1)
    token = block * BLOCK_TOKENS + torch.arange(min(BLOCK_TOKENS, size), device=sums.device)
    inside = weights_of(token.clamp(max=size - 1)) * (token < size)
    place, _ = _first_above(_cumulative(inside.double()), (target - before).clamp_(min=0.0))
    return token.gather(-1, place).squeeze(-1)


def block_sums(weights: Tensor) -> Tensor:
    """Return the sums of weights [..., V] over blocks of tokens, float64 [..., blocks]; no row affects another."""
    whole = weights.shape[-1] // BLOCK_TOKENS * BLOCK_TOKENS
    if not whole:
        return _row_sums(weights)[..., None].double()
    blocks = weights[..., :whole].reshape(*weights.shape[:-1], whole // BLOCK_TOKENS, BLOCK_TOKENS)
    sums = _row_sums(blocks).double()
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, _row_sums(weights[..., whole:])[..., None].double()], dim=-1)


def _row_sums(numbers: Tensor) -> Tensor:
    """Return the sum of each row of ``numbers``: [..., n] -> [...].

    On a GPU the halves of a row are added until one number is left: torch's own sum of a row depends on the row's place
    and on the number of rows.
    """
    if numbers.device.type == "cpu":
        return numbers.sum(-1)
    size = numbers.shape[-1]
    numbers = pad(numbers, (0, (1 << (size - 1).bit_length()) - size)) if size & (size - 1) else numbers
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, -1)
        numbers = first + second
    return numbers.squeeze(-1)


def _cumulative(weights: Tensor) -> Tensor:
    cumulative = weights.cumsum(-1)
    # A parallel scan may round a later sum below an earlier one; the search needs them in order.
    return cumulative.cummax(-1).values if cumulative.is_cuda else cumulative


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place whose cumulative weight is above ``target``, [B, 1], and the target used, [B].

    A target that is not below the total is lowered to the number next below the total.
    """
    total = cumulative[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, target[:, None], right=True)
    return place.clamp_(max=cumulative.shape[-1] - 1), target


def couple(p: Tensor, q: Tensor, x: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """Draw the compressed side's token given the reference's, so that (x, y) has the coupling's distribution.

    Distributions p and q are [B, V]; x, drawn from p, and y are int64 [B]; uniforms are [B] in [0, 1). y = x with
    probability min(1, q(x)/p(x)); otherwise y is drawn from (q - min(p, q))/e. A mismatch has probability e = TV(p, q).
    x is kept if accept * p(x) < q(x): strictly, so that equal distributions never diverge and no x with q(x) = 0 stays.
    """
    p_x, q_x = (distribution.gather(-1, x[:, None]).squeeze(-1) for distribution in (p, q))
    return couple_by_excess(p_x, q_x, x, accept, residual, lambda rows: (q[rows] - p[rows]).clamp_(min=0.0))


def couple_by_excess(
    p: Tensor, q: Tensor, x: Tensor, accept: Tensor, residual: Tensor, excess_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Couple as ``couple`` does, from x's probabilities ``p`` and ``q`` under both distributions, [B] each.

    ``excess_of`` is given the numbers of some rows, int64 [rows], and returns max(q - p, 0) of all tokens, [rows, V].
    """
    keep = accept * p.double() < q.double()
    y = x.clone()
    rows = (~keep).nonzero().squeeze(-1)
    if len(rows):
        excess = excess_of(rows)
        # If rounding leaves no excess mass, the distributions differ in the last bit only: keep x.
        y[rows] = torch.where(excess.sum(-1) > 0.0, draw(excess, residual[rows]), x[rows])
    return y


def pairs_at_once(distributions: Tensor) -> int:
    """Return how many pairs of distributions [rows, V] are computed at once, so that results fit into memory."""
    room = _CPU_BYTES if distributions.device.type == "cpu" else _OTHER_BYTES
    return max(room // max(distributions.shape[-1] * distributions.itemsize, 1), 1)


class DistributionTable:
    """A table of distributions, [rows, V], from which pairs take theirs; row -1 is the point mass of an ended side.

    Pairs are processed some at a time, so that intermediate results fit a processor's cache, or the memory that an
    accelerator has besides the distributions. An ended side emits ``absorbed_token``.
    """

    def __init__(self, distributions: Tensor, absorbed_token: int) -> None:
        self._distributions, self._absorbed_token = distributions, absorbed_token
        self._at_once = pairs_at_once(distributions)
        self._room: list[Tensor] = []

    def draw(self, rows: Tensor, u: Tensor) -> Tensor:
        """Draw one token from each of ``rows``, int64 [B] on the CPU, by uniforms ``u`` [B]: int64 [B]."""
        return torch.cat([draw(self._take(rows[part]), u[part]) for part in self._parts(len(rows))])

    def compare(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return TV and KL(p || q) of pairs of distributions, float64 [B] each.

        ``left`` are rows of distributions p, ``right`` of distributions q, int64 [B] on the CPU. Pairs of the same rows
        are compared once.
        """
        rows = len(self._distributions) + 1  # -1 among them
        pairs, pair = torch.unique((left + 1) * rows + right + 1, return_inverse=True)
        left, right = pairs // rows - 1, pairs % rows - 1
        parts = [self._compare(left[part], right[part]) for part in self._parts(len(pairs))]
        distances, divergences = (torch.cat(some) for some in zip(*parts, strict=True))
        pair = pair.to(distances.device)
        return distances[pair], divergences[pair]

    def most_probable(self) -> Tensor:
        """Return the most probable token of each row, int64 [rows] on the CPU."""
        return most_probable(self._distributions).cpu()

    def couple(self, left: Tensor, right: Tensor, x: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
        """Draw the compressed side's tokens, int64 [B], given the reference's, x.

        ``left`` are rows of the reference's distributions, ``right`` of the compressed side's, int64 [B] on the CPU;
        uniforms of acceptance and of the residual token are [B].
        """
        tokens = []
        p, q = (
            _probabilities(self._distributions, rows.to(x.device), x[:, None], self._absorbed_token)[:, 0]
            for rows in (left, right)
        )
        for part in self._parts(len(left)):
            excess_of = partial(self._excess, left[part], right[part])
            tokens.append(couple_by_excess(p[part], q[part], x[part], accept[part], residual[part], excess_of))
        return torch.cat(tokens)

    def _compare(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        if self._by_row(left, right):
            apart, terms = (self._memory(number)[: len(left)] for number in (1, 2))
            for place, difference in enumerate(self._apart(right, left)):
                p, q = self._distributions[left[place]], self._distributions[right[place]]
                entropy_terms(p, q, difference, torch.abs(difference, out=apart[place]), out=terms[place])
        else:
            p, q = self._take(left), self._take(right)
            difference = q - p
            apart = difference.abs()
            terms = entropy_terms(p, q, difference, apart)
        divergence = divergence_of(block_sums(terms))
        truncated = ((right < 0) | self._has_zeros[right]).nonzero().squeeze(-1)
        if len(truncated):
            infinite = unsupported(self._take(left[truncated]), self._take(right[truncated])).any(-1)
            divergence[truncated.to(divergence.device)[infinite]] = torch.inf
        return distance_of(block_sums(apart)), divergence

    def _excess(self, left: Tensor, right: Tensor, some: Tensor) -> Tensor:
        """Return max(q - p, 0) of the pairs numbered ``some``, [pairs, V]; p and q are rows ``left`` and ``right``."""
        some = some.cpu()
        return self._apart(right[some], left[some]).clamp_(min=0.0)

    def _apart(self, left: Tensor, right: Tensor) -> Tensor:
        """Return distributions ``left`` less distributions ``right``, [pairs, V]; valid until the next call."""
        if not self._by_row(left, right):
            return self._take(left).sub_(self._take(right))
        room = self._memory(0)[: len(left)]
        for row, p, q in zip(room, left.tolist(), right.tolist(), strict=True):
            torch.sub(self._distributions[p], self._distributions[q], out=row)
        return room

    def _by_row(self, left: Tensor, right: Tensor) -> bool:
        """Return whether distributions are read where they are: long distributions on a CPU, of sides that go on."""
        distributions = self._distributions
        long = distributions.device.type == "cpu" and distributions.shape[-1] * distributions.itemsize >= _LONG_BYTES
        return long and not bool((left < 0).any() | (right < 0).any())

    def _memory(self, number: int) -> Tensor:
        """Return one of three pieces of memory for as many distributions as are processed at once."""
        while len(self._room) <= number:
            self._room.append(self._distributions.new_empty((self._at_once, self._distributions.shape[-1])))
        return self._room[number]

    @cached_property
    def _has_zeros(self) -> Tensor:
        """Whether the distribution of each row has a token of probability 0, bool [rows] on the CPU."""
        return (self._distributions.amin(-1) == 0).cpu()

    def _parts(self, entries: int) -> list[slice]:
        return [slice(first, first + self._at_once) for first in range(0, max(entries, 1), self._at_once)]

    def _take(self, rows: Tensor) -> Tensor:
        distributions = self._distributions.index_select(0, rows.clamp(min=0).to(self._distributions.device))
        absorbed = (rows < 0).nonzero().squeeze(-1).to(distributions.device)
        if len(absorbed):
            distributions[absorbed] = 0.0
            distributions[absorbed, self._absorbed_token] = 1.0
        return distributions


ABSORBED, NOTHING = -1, -2  # rows: the point mass of an ended side, and no mass at all
_FUSED_BYTES = 2**28  # of distributions that ``pair_sums`` processes in one part where no kernel computes them


def are_fused(sharing: SharingOptions, device: str) -> bool:
    """Return whether ``fused_draws`` couples pairs on a device.

    ``sharing.fused`` decides; if that is None, the answer is yes on CUDA devices on which the kernel works.
    """
    if sharing.fused is not None:
        return sharing.fused
    return torch.device(device).type == "cuda" and fused_fault(torch.device(device)) is None


def fused_draws(distributions: Tensor, rows: Tensor, u: Tensor, reference: Tensor, absorbed_token: int) -> Tensor:
    """Draw the references' tokens and the pairs' tokens, and compare distributions.

    Args:
        distributions: [streams, V].
        rows: The rows of distributions p and q, int64 [2, R + 2P]. First come those of R references, with ``NOTHING``
            for p; then the two distributions of each of P pairs; then, for each pair, two more distributions to
            compare. If p and q are one row, their distance is 0.
        u: Uniforms [R + 2P]: for the references' tokens, the pairs' residual tokens, and acceptance.
        reference: The reference of each pair, int64 [P].
        absorbed_token: The token that an ended side emits.

    Returns:
        float64 [R + 6P]: the references' tokens; the pairs' tokens; TV of the pairs' distributions, and of the other
        two distributions; KL of both likewise; whether the most probable tokens of the other two distributions, or of
        the pairs' distributions if the others are ``ABSORBED``, are equal.
    """
    references, pairs = u.shape[0] - 2 * len(reference), len(reference)
    drawn = references + pairs
    apart, excess, terms = pair_sums(distributions, rows, absorbed_token)
    excess = excess[:drawn]
    left, right = rows[0, :drawn], rows[1, :drawn]

    def weights(token: Tensor) -> Tensor:
        p, q = (_probabilities(distributions, row, token, absorbed_token) for row in (left, right))
        return (q - p).clamp_(min=0.0)

    token = draw_by_sums(excess, u[:drawn], distributions.shape[-1], weights)
    x, residual = token[:references], token[references:]
    x_of_pair = x[reference]
    p, q = (
        _probabilities(distributions, row[references:], x_of_pair[:, None], absorbed_token)[:, 0].double()
        for row in (left, right)
    )
    # As ``couple``: where rounding leaves no excess mass, the distributions differ in the last bit only.
    keep = (u[drawn:] * p < q) | (excess[references:].sum(-1) <= 0.0)
    y = torch.where(keep, x_of_pair, residual)
    top = most_probable(distributions)
    other = rows[1, drawn:]
    along = torch.where(other == ABSORBED, right[references:], other)
    agree = top[left[references:].clamp(min=0)] == top[along.clamp(min=0)]
    return torch.cat([x, y, distance_of(apart[references:]), divergence_of(terms[references:]), agree.double()])


@torch.library.custom_op("kvdrift::pair_sums", mutates_args=())
def pair_sums(distributions: Tensor, rows: Tensor, absorbed_token: int) -> Tensor:
    """Return sums over blocks of tokens: of |p - q|, of max(q - p, 0), and of the terms of KL; one launch on CUDA.

    Distributions are [streams, V]; rows of p and of q are int64 [2, B], ``ABSORBED`` or ``NOTHING`` for a distribution
    that is no stream's. The result is float64 [3, B, blocks]. Sums are exactly 0 for bitwise equal distributions; a
    token that p can draw and q cannot makes its block's sum of terms infinite.
    """
    parts = []
    for left, right in torch.split(rows, max(_FUSED_BYTES // distributions[:1].nbytes, 1), 1):
        p, q = (_taken(distributions, some, absorbed_token) for some in (left, right))
        difference = q - p
        apart = difference.abs()
        terms = entropy_terms(p, q, difference, apart).masked_fill_(unsupported(p, q), torch.inf)
        parts.append(torch.stack([block_sums(some) for some in (apart, difference.clamp(min=0.0), terms)]))
    return torch.cat(parts, 1)


@pair_sums.register_kernel("cuda")
def _on_cuda(distributions: Tensor, rows: Tensor, absorbed_token: int) -> Tensor:
    from kvdrift.generator.coupling import fused_sums  # noqa: PLC0415 - Triton comes with CUDA only

    return fused_sums.pair_sums(distributions, rows, absorbed_token, BLOCK_TOKENS)


@tried_once
def fused_fault(device: torch.device) -> str | None:
    """Return why the kernel cannot be used on a device; None if it can. It is tried once, with two small distributions.

    Triton builds a kernel at its first use, which needs a C compiler on this machine.
    """
    distributions = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], device=device)
    apart, excess, terms = _on_cuda(distributions, torch.tensor([[0, -1, -2], [1, 1, 1]], device=device), 2)
    exact = apart.flatten().tolist() == [0.5, 1.5, 1.0] and excess.flatten().tolist() == [0.25, 0.75, 1.0]
    near = torch.allclose(
        terms.flatten().cpu(), torch.tensor([0.25 * math.log(2), math.log(4), 1.0]).double(), atol=1e-6
    )
    return None if exact and near else "a trial of the Triton kernel gave wrong sums"


def _taken(distributions: Tensor, rows: Tensor, absorbed_token: int) -> Tensor:
    tokens = torch.arange(distributions.shape[1], device=distributions.device)
    point = (tokens == absorbed_token) & (rows == ABSORBED)[:, None]
    return torch.where(rows[:, None] < 0, point.to(distributions.dtype), distributions[rows.clamp(min=0)])


def _probabilities(distributions: Tensor, rows: Tensor, tokens: Tensor, absorbed_token: int) -> Tensor:
    """Return the probabilities of ``tokens`` [B, n] under the distributions of ``rows`` [B]."""
    point = (tokens == absorbed_token) & (rows == ABSORBED)[:, None]
    return torch.where(
        rows[:, None] < 0, point.to(distributions.dtype), distributions[rows.clamp(min=0)[:, None], tokens]
    )

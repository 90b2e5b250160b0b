"""The generator by the definitions, without any sharing of work.

It shares the uniforms with the fast path and nothing else: attention is transformers' own eager one, evicted prompts
are expanded into one copy per replicate in a ``DynamicCache``, every action has three streams of its own (reference on
X, compressed on Y, compressed on X), each fed one token per position whether it is still needed or not, and the
coupling is a loop over replicates and tokens in numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from oracles.plain_distributions import plain_distribution
from scipy.special import rel_entr
from transformers import AutoModelForCausalLM, DynamicCache

from kvdrift.generator.coupling.rollout import uniform_table
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling

# One layer's attention over the prompt [heads, n, n] and the number of KV heads -> kept positions [KV heads, m].
Chooser = Callable[[NDArray[np.float64], int], NDArray[np.int64]]
Advance = Callable[[NDArray[np.int32]], NDArray[np.float64]]  # the tokens of replicates -> their next distributions


@dataclass(frozen=True)
class PlainSteps:
    """One action's steps, [replicates, H] each, with the kept positions, per layer [KV heads, m]."""

    x_token: NDArray[np.int32]
    y_token: NDArray[np.int32]
    delta: NDArray[np.float64]
    f: NDArray[np.float64]
    x_eos: NDArray[np.bool_]
    y_eos: NDArray[np.bool_]
    kl: NDArray[np.float64]  # NaN after X's end, as kl_own
    kl_own: NDArray[np.float64]
    top1: NDArray[np.bool_]
    kept: list[NDArray[np.int64]]


def load_eager(folder: Path) -> Any:
    """Load a folder's model with transformers' eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def share_of(entries: int, share: Fraction) -> int:
    """Return the largest m with m / n <= share, by counting."""
    kept = 0
    while Fraction(kept + 1, entries) <= share:
        kept += 1
    return kept


def keep_all() -> Chooser:
    """Keep every position."""
    return lambda attention, kv_heads: np.tile(np.arange(attention.shape[-1]), (kv_heads, 1))


def keep_recent(kept: int, sinks: int = 4) -> Chooser:
    """Keep the sinks and the latest positions."""

    def choose(attention: NDArray[np.float64], kv_heads: int) -> NDArray[np.int64]:
        positions = set(range(sinks))
        latest = attention.shape[-1] - 1
        while len(positions) < kept:
            positions.add(latest)
            latest -= 1
        return np.tile(sorted(positions), (kv_heads, 1))

    return choose


def keep_snapkv(kept: int, window: int = 64, kernel: int = 5) -> Chooser:
    """Keep the window, and the positions before it that have the highest pooled attention from it."""

    def choose(attention: NDArray[np.float64], kv_heads: int) -> NDArray[np.int64]:
        heads, entries, _ = attention.shape
        before = entries - window
        per_head = heads // kv_heads
        chosen = []
        for kv_head in range(kv_heads):
            received = attention[kv_head * per_head : (kv_head + 1) * per_head, before:, :before].mean(axis=(0, 1))
            padded = np.concatenate([np.zeros(kernel // 2), received, np.zeros(kernel // 2)])
            pooled = [sum(padded[place : place + kernel]) / kernel for place in range(before)]
            best = sorted(range(before), key=lambda place, pooled=pooled: (-pooled[place], place))
            chosen.append(sorted(best[: kept - window]) + list(range(before, entries)))
        return np.array(chosen)

    return choose


def plain_rollout(
    network: Any,
    tokens: Sequence[int],
    chooser: Chooser,
    *,
    seed: int,
    document: str,
    action: str,
    replicates: Sequence[int],
    horizon: int,
    eos_tokens: Sequence[int],
    hold: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    sampling: Sampling = FULL_SOFTMAX,
    other: Any = None,
) -> PlainSteps:
    """Generate one action's coupled rollout of one document; the compressed side holds keys and values by ``hold``.

    With ``other``, the compressed side is this network, which reads the prompt by itself.
    """
    count = len(replicates)
    prompt, logits, everything = _prefill(network, tokens, keep_all())
    network_y = network if other is None else other
    prompt_y, logits_y, kept = _prefill(network_y, tokens, chooser)

    def side(network: Any, cache: Any) -> Advance:
        positions = itertools.count(len(tokens))  # the token emitted at t stands at n + t - 1
        return lambda fed: _advance(network, cache, fed, next(positions), sampling)

    return coupled_steps(
        distribution_of(logits, sampling),
        None if other is None else distribution_of(logits_y, sampling),
        side(network, _expanded(prompt, everything, count)),
        side(network_y, _expanded(prompt_y, kept, count, hold)),
        side(network_y, _expanded(prompt_y, kept, count, hold)),
        uniforms=(
            uniform_table(seed, document, None, replicates, horizon, 1),
            uniform_table(seed, document, action, replicates, horizon, 2),
        ),
        eos_tokens=eos_tokens,
        kept=kept,
    )


def coupled_steps(
    first_distribution: NDArray[np.float64],
    first_distribution_y: NDArray[np.float64] | None,
    reference: Advance,
    compressed_on_y: Advance,
    compressed_on_x: Advance,
    *,
    uniforms: tuple[NDArray[np.float64], NDArray[np.float64]],
    eos_tokens: Sequence[int],
    kept: Sequence[NDArray[np.int64]] = (),
) -> PlainSteps:
    """Couple three streams of each replicate, which are fed even after their EOS.

    Without ``first_distribution_y`` both sides have one distribution at position 1. ``uniforms`` are those of X, [replicates, H, 1], and
    of Y, [replicates, H, 2].
    """
    u_x, u_y = uniforms
    count, horizon, _ = u_x.shape
    x, y = np.zeros((2, count, horizon), dtype=np.int32)
    delta, f = np.zeros((2, count, horizon))
    x_eos, y_eos, top1 = np.zeros((3, count, horizon), dtype=bool)
    kl, kl_own = np.full((2, count, horizon), np.nan)
    for k in range(count):
        along_x = first_distribution if first_distribution_y is None else first_distribution_y
        kl[k, 0] = kl_own[k, 0] = rel_entr(first_distribution, along_x).sum()
        top1[k, 0] = first_distribution.argmax() == along_x.argmax()
        if first_distribution_y is None:
            x[k, 0] = y[k, 0] = inverse_cdf(first_distribution, u_x[k, 0, 0])
        else:
            delta[k, 0] = f[k, 0] = 1.0 - np.minimum(first_distribution, first_distribution_y).sum()
            x[k, 0], y[k, 0] = coupled_pair(first_distribution, first_distribution_y, u_x[k, 0, 0], *u_y[k, 0])
        x_eos[k, 0], y_eos[k, 0] = x[k, 0] in eos_tokens, y[k, 0] in eos_tokens

    end = np.zeros(len(first_distribution))
    end[eos_tokens[0]] = 1.0
    for column in range(1, horizon):
        p_distributions, forced_distributions = reference(x[:, column - 1]), compressed_on_x(x[:, column - 1])
        q_distributions = compressed_on_y(y[:, column - 1])
        for k in range(count):
            x_over, y_over = x_eos[k, column - 1], y_eos[k, column - 1]
            p = end if x_over else p_distributions[k]
            q = end if y_over else q_distributions[k]
            forced = end if x_over else forced_distributions[k]
            delta[k, column] = 1.0 - np.minimum(p, q).sum()
            f[k, column] = 1.0 - np.minimum(p, forced).sum()
            if not x_over:
                kl[k, column], kl_own[k, column] = rel_entr(p, forced).sum(), rel_entr(p, q).sum()
                top1[k, column] = p.argmax() == forced.argmax()
            x[k, column], y[k, column] = coupled_pair(p, q, u_x[k, column, 0], *u_y[k, column])
            x_eos[k, column] = x_over or x[k, column] in eos_tokens
            y_eos[k, column] = y_over or y[k, column] in eos_tokens
    return PlainSteps(x, y, delta, f, x_eos, y_eos, kl, kl_own, top1, list(kept))


class Stream(Protocol):
    """One cache followed along one history."""

    first_distribution: NDArray[np.float64]

    def advance(self, token: int) -> NDArray[np.float64]:
        """Feed a token and return the next distribution."""


def plain_streams_rollout(
    whole: Callable[[], Stream], smaller: Callable[[], Stream], *, seed: int, document: str, action: str,
    replicates: Sequence[int], horizon: int, eos_tokens: Sequence[int],
) -> PlainSteps:  # fmt: skip
    """Generate one action's coupled rollout, with a stream of the whole cache and two of the smaller one for each pair."""
    sides = [[made() for _ in replicates] for made in (whole, smaller, smaller)]

    def side(streams: Sequence[Stream]) -> Advance:
        return lambda fed: np.stack([one.advance(int(token)) for one, token in zip(streams, fed, strict=True)])

    uniforms = (
        uniform_table(seed, document, None, replicates, horizon, 1),
        uniform_table(seed, document, action, replicates, horizon, 2),
    )
    return coupled_steps(
        sides[0][0].first_distribution, None, *map(side, sides), uniforms=uniforms, eos_tokens=eos_tokens
    )


def coupled_pair(
    p: NDArray[np.float64], q: NDArray[np.float64], u_x: float, accept: float, residual: float
) -> tuple[int, int]:
    """Draw X from p; Y = X with probability min(1, q(X)/p(X)), otherwise Y from the part of q above p."""
    x = inverse_cdf(p, u_x)
    if accept < q[x] / p[x]:
        return x, x
    return x, inverse_cdf(np.array([max(b - a, 0.0) for a, b in zip(p, q, strict=True)]), residual)


def inverse_cdf(weights: NDArray[np.float64], u: float) -> int:
    """Return the first token at which the running sum of weights exceeds u times their sum."""
    target, running, last = u * weights.sum(), 0.0, -1
    for token, weight in enumerate(weights):
        if weight > 0.0:
            last = token
            running += weight
            if running > target:
                return token
    return last  # rounding of the running sum alone


def greedy_tokens(network: Any, tokens: Sequence[int], chooser: Chooser, horizon: int) -> list[int]:
    """Return the tokens that transformers' ``generate`` takes after the prompt with its kept entries.

    The first token is that of the whole prompt, and positions continue from its true length.
    """
    prompt, logits, kept = _prefill(network, tokens, chooser)
    entries, first = kept[0].shape[1], int(logits.argmax())
    ids = torch.tensor([[*tokens[:entries], first]])  # of which generate feeds what the cache does not have
    with _positions_from(network.model, len(tokens) - entries):
        made = network.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=_expanded(prompt, kept, 1), do_sample=False,
            max_new_tokens=horizon - 1, temperature=None, top_p=None,
        )  # fmt: skip
    return [first, *made[0, ids.shape[1] :].tolist()]


@contextmanager
def _positions_from(decoder: Any, missing: int) -> Iterator[None]:
    """Number fed tokens as if the cache had ``entries`` more entries."""

    def shift(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        past, fed = named["past_key_values"].get_seq_length(), named["input_ids"].shape[1]
        return given, named | {"position_ids": torch.arange(past, past + fed)[None] + missing}

    hook = decoder.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _prefill(network: Any, tokens: Sequence[int], chooser: Chooser) -> tuple[Any, torch.Tensor, list[Any]]:
    cache = DynamicCache()
    with torch.no_grad():
        output = network(torch.tensor([list(tokens)]), past_key_values=cache, output_attentions=True)
    kept = [
        chooser(attention[0].double().numpy(), layer.keys.shape[1])
        for attention, layer in zip(output.attentions, cache.layers, strict=True)
    ]
    return cache, output.logits[0, -1], kept


def _expanded(
    prompt: Any, kept: list[NDArray[np.int64]], count: int,
    hold: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
) -> Any:  # fmt: skip
    """Make a cache with one copy of the kept entries for each replicate."""
    cache = DynamicCache()
    for number, (layer, choice) in enumerate(zip(prompt.layers, kept, strict=True)):
        keys = torch.stack([layer.keys[0, head, rows] for head, rows in enumerate(choice)])
        values = torch.stack([layer.values[0, head, rows] for head, rows in enumerate(choice)])
        keys, values = hold(keys), hold(values)
        cache.update(keys.expand(count, -1, -1, -1).clone(), values.expand(count, -1, -1, -1).clone(), number)
    return cache


def _advance(
    network: Any, cache: Any, tokens: NDArray[np.int32], position: int, sampling: Sampling
) -> NDArray[np.float64]:
    ids = torch.tensor(tokens[:, None].astype(np.int64))
    with torch.no_grad():
        output = network(ids, past_key_values=cache, position_ids=torch.full_like(ids, position))
    return np.stack([distribution_of(row, sampling) for row in output.logits[:, -1]])


def distribution_of(logits: torch.Tensor, sampling: Sampling) -> NDArray[np.float64]:
    """Return the distribution that tokens are drawn by, in float64."""
    return softmax(logits) if sampling == FULL_SOFTMAX else plain_distribution(logits.tolist(), sampling)


def softmax(logits: torch.Tensor) -> NDArray[np.float64]:
    """Return the distribution at temperature 1, in float64."""
    values = logits.double().numpy()
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())

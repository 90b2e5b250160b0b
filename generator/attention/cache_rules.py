"""Rules of a cache: how decode-time policies and codecs change its entries while its streams are decoded.

Without a rule, ``shared_prefix`` attends to all prompt entries of the cache and to the whole suffix of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvdrift.generator.attention.layer_terms import PLAIN, LayerTerms


@dataclass(frozen=True)
class StreamEntries:
    """The entries to which R streams of one cache can attend in one layer, and the streams' queries.

    R is a multiple of the rows that the model computes; copies of a stream fill it up.

    Attributes:
        layer: The number of the layer among layers without a window, from 0.
        query: The new token's queries, [R, KV heads, query heads of it, size], rotated.
        prompt_key: Keys of the cache's prompt entries, shared by all rows, [KV heads, entries, size].
        prompt_value: Values of the same entries, [KV heads, entries, size].
        suffix_key: [R, KV heads, L, size]; the last key is the new token's.
        suffix_value: [R, KV heads, L, size].
        scaling: The factor of products of queries and keys.
        streams: The number of first rows that are streams; the other rows are copies.
        terms: The layer's soft cap and sinks, if any. Rules are not asked about layers with windows.
    """

    layer: int
    query: Tensor
    prompt_key: Tensor
    prompt_value: Tensor
    suffix_key: Tensor
    suffix_value: Tensor
    scaling: float
    streams: int = 1
    terms: LayerTerms = PLAIN


class CacheRule:
    """Changes the entries of one cache while its streams are decoded; by default nothing changes.

    All open streams of a cache have suffixes of one length. In a step that feeds the L-th token, ``SharedPrefix`` calls

    1. ``before_step``, after streams were moved, forked or continued from their parked state, and before the token is
    fed; the suffixes then have entries 0 .. L - 2. Changes of the suffixes stay with their streams.
    2. ``attend`` in every layer, for some rows at a time, once the new token's key and value have joined the suffixes,
    unless ``passes`` says that there is nothing to do. It may return attention in place of the usual one.

    L can become smaller: streams go back to the end of the prompt, and parked streams continue at the L at which they
    were parked, or before it if ``cuts_back``.

    Attributes:
        scores: The number of prompt entries with a score in every stream; entries of suffixes have a score, too. 0 if
            the rule keeps no scores.
        cuts_back: Whether a stream's state at L determines its earlier states by dropping the last entries.
    """

    scores: int = 0
    cuts_back: bool = True

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """Return a rule of the same kind over ``entries`` other prompt entries, which attends from the first step on.

        Whole steps are tried with this rule before documents are decoded.
        """
        raise NotImplementedError

    def first_scores(self, layer: int) -> Tensor:
        """Scores of a layer's prompt entries at the end of the prompt, float32 [KV heads, ``scores``]."""
        raise NotImplementedError

    def before_step(
        self, prompt: Sequence[Sequence[Tensor]], suffixes: Sequence[Sequence[Tensor]], slots: Sequence[Tensor],
        length: int,
    ) -> None:  # fmt: skip
        """Change entries in place before a token is fed.

        ``prompt`` has for each layer the keys and values of the cache's prompt entries, [KV heads, entries, size] each,
        which attention reads themselves; ``suffixes`` those of all slots, [slots, KV heads, H, size] each; ``slots``
        the slots of the cache's streams on the layer's device, int64 [streams]. ``length`` is L, including the token
        about to be fed.
        """

    def passes(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Tell whether ``attend`` has nothing to do at L = ``length``."""
        return True

    def replaces(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Tell whether ``attend`` returns attention of its own at L = ``length``."""
        return False

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:  # noqa: ARG002 - others need it
        """Return which prompt entries streams still have after a step, from the arguments and the scores of ``attend``.

        The answer is bool [R, KV heads, entries of the prompt]; None if the rule does not say. By default an entry with
        a negative score is gone.
        """
        return scores[..., : self.scores] >= 0 if self.scores else None

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend from one new token per row, and return attention, if ``replaces``, and the scores after the step.

        Scores are of prompt entries, then of the suffix, float32 [R, KV heads, ``scores`` + L]; the new entry's score
        is 0. They are empty if the rule has none. Attention is [R, KV heads, query heads of it, size], in the queries'
        dtype.
        """
        raise NotImplementedError

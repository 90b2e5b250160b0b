"""What one cache does with its entries while its streams are decoded: the seam of decode-time policies and codecs.

A cache without a rule is read as ``shared_prefix`` says: all of its prompt entries, and the whole suffix of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from generator.attention.layer_terms import PLAIN, LayerTerms


@dataclass(frozen=True)
class StreamEntries:
    """What R streams of one cache can attend to in one layer, and their queries.

    R is a multiple of the rows that the model computes: copies of a stream fill it up.

    Attributes:
        layer: The number of the layer among those without a window, from 0.
        query: The new token's, [R, KV heads, query heads of it, size], rotated.
        prompt_key: The cache's prompt entries, shared by all rows, [KV heads, entries, size].
        prompt_value: Likewise.
        suffix_key: [R, KV heads, L, size]; the new token's is the last one.
        suffix_value: Likewise.
        scaling: What products of queries and keys are multiplied by.
        streams: How many rows are streams, the first ones; the others are copies.
        terms: The layer's soft cap and sinks, if it has any. Rules are not asked about layers with windows.
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
    """What happens to the entries of one cache while its streams are decoded; by default nothing.

    All open streams of a cache have suffixes of one length. In a step that feeds the L-th token, ``SharedPrefix`` calls

    1. ``before_step``, after streams were moved, forked or taken back from where they were parked, and before the token
       is fed: entries 0 .. L - 2 of the suffixes are there. What it writes into the suffixes follows the streams.
    2. in every layer, once the new token's key and value have joined the suffixes, ``attend`` for some rows at a time,
       unless ``passes`` says that nothing is to be done. It may return attention in place of the usual one.

    A rule may be asked for a smaller L than before: streams go back to the end of the prompt, and parked ones come back
    at the L at which they were parked, or before that if ``cuts_back``.

    Attributes:
        scores: How many prompt entries have a score in every stream; the entries of suffixes have one, too. 0 where
            the rule keeps nothing of a stream.
        cuts_back: Whether what a stream has become at L says what it was before, but for its last entries.
    """

    scores: int = 0
    cuts_back: bool = True

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """A rule of the same kind over so many other prompt entries, that attends from the first step on.

        Whole steps are tried with it before documents are decoded.
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

        Args:
            prompt: Of each layer, keys and values of the cache's prompt entries, [KV heads, entries, size] each;
                attention reads them where they lie.
            suffixes: Of each layer, keys and values of all slots, [slots, KV heads, H, size] each.
            slots: Of each layer, the slots of the cache's streams on the layer's device, int64 [streams].
            length: L, with the token about to be fed.
        """

    def passes(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Whether ``attend`` has nothing to do at L = ``length``."""
        return True

    def replaces(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Whether ``attend`` returns attention of its own at L = ``length``."""
        return False

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:  # noqa: ARG002 - others need it
        """Which prompt entries streams still have after a step, given what ``attend`` took and the scores it returned.

        Returns:
            bool [R, KV heads, entries of the prompt]; None if the rule does not say. By default an entry with a
            negative score is gone.
        """
        return scores[..., : self.scores] >= 0 if self.scores else None

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend from one new token per row.

        Args:
            entries: The rows.
            scores: Of prompt entries, then of the suffix, float32 [R, KV heads, ``scores`` + L]; the new entry's is 0.
                Empty where the rule has none.

        Returns:
            Attention of the rows, [R, KV heads, query heads of it, size], in the queries' dtype, if ``replaces``; and
            the scores as they are after the step.
        """
        raise NotImplementedError

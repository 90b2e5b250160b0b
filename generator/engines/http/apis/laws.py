"""Build a whole law from a server's answer, which must have the logarithms of all tokens' probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schema.errors import InputError, OperationError


def whole_law(tokens: Sequence[Any], logarithms: Sequence[Any], vocabulary: int, where: str) -> NDArray[np.float32]:
    """Return logarithms of probabilities by token, float32 [V].

    Args:
        tokens: Token ids, in any order.
        logarithms: The logarithm of each token's probability.
        vocabulary: V.
        where: The name of the server for an error line.
    """
    try:
        ids = np.array(tokens, dtype=np.int64)
        values = np.array(logarithms, dtype=np.float64)
    except (TypeError, ValueError):
        raise OperationError(f"{where}: the server's log-probabilities are no numbers") from None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InputError(
            f"{where}: the server has token {int(ids.max())}, and the vocabulary has {vocabulary:,}: a side's settings "
            "say how many there are by vocabulary"
        )
    law = np.full(vocabulary, np.nan)
    law[ids] = values
    if missing := int(np.isnan(law).sum()):
        raise InputError(
            f"{where}: the server returned {vocabulary - missing:,} of {vocabulary:,} log-probabilities; a law needs "
            "all of them: vLLM has them with --max-logprobs -1, and a server that cannot return them all can be "
            'compared at temperature 0, with api = "openai"'
        )
    largest = float(values.max())
    total = float(np.exp(law - largest).sum()) * float(np.exp(largest))
    if not abs(total - 1) < 1e-2:
        raise OperationError(f"{where}: the server's probabilities sum to {total:.4g}: they are not those of a law")
    return law.astype(np.float32)

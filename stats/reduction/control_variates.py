"""Control variates of a coupled pair, and the reduction of moments by them.

Given the histories up to t - 1 the tokens at t differ with probability delta_t. So D = sum_t a_t (I_t - delta_t) has
mean 0 if a_t depends on these histories alone, for any model, document and action. Five weights are used:

    1/H over block 1, over block 2 and over block 3;  1{t > tau}/H;  1{tau >= t} (H - t)/H.

Every other weight of the definitions is a combination of these five: 1/H is the sum of the three blocks' weights, and
1{tau >= t} is H times the difference of 1/H and 1{t > tau}/H. Each D is a difference of two moments, so means of
documents give it.

For any functional g of a replicate and any fixed beta, M(g - beta . D) has the expectation of M(g). Only functionals of
I_t are reduced; moments of total variation stay as they are. delta_t is stored in 32 bits, which moves the mean of a D
by less than 1e-7 of the sum of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from kvdrift.schema.windows import Windows
from kvdrift.stats.linearization.gradients import features_read
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.registry import Quantity

CONTROLS: Final = ("block 1", "block 2", "block 3", "after divergence", "exposure")

REDUCED: Final = (
    "mismatch", "diverged", "entry", "exposure", "occupation", "cohort", "long_agreement", "mismatch_after_agreement",
    "block_1_mismatch", "block_2_mismatch", "block_3_mismatch", "prefix_mismatch", "prefix_diverged",
)  # fmt: skip
"""The moments that are reduced: functionals of where the tokens differ."""

NO_COEFFICIENTS: Final[Mapping[str, Float]] = MappingProxyType({})
"""Of no action."""


def control_variates(scalars: Mapping[str, Float], windows: Windows) -> Float:
    """Compute the control variates of replicates, or their means over a document's replicates.

    Of moments float64 [...] they are float64 [..., 5] in the order of ``CONTROLS``. NaN without a replicate; 0 for a
    block without positions.
    """
    found = []
    for block, (first, last) in enumerate(windows.blocks, start=1):
        share = max(last - first + 1, 0) / windows.horizon
        difference = scalars[f"block_{block}_mismatch"] - scalars[f"block_{block}_delta"]
        found.append(difference * share if share else np.zeros_like(difference))
    found.append(scalars["occupation"] - scalars["occupation_compensator"])
    found.append(scalars["exposure"] - scalars["exposure_compensator"])
    return np.stack(found, axis=-1)


def reduced_scalars(scalars: Mapping[str, Float], controls: Float, coefficients: Float) -> dict[str, Float]:
    """Subtract beta . D from the reduced moments: D is [..., 5], beta [..., 5, 13]."""
    part = np.einsum("...c,...cm->...m", controls, coefficients)
    return {**scalars, **{name: scalars[name] - part[..., place] for place, name in enumerate(REDUCED)}}


def reduced_documents(moments: DocumentMoments, coefficients: Mapping[str, Float]) -> DocumentMoments | None:
    """Reduce the moments of documents on which the coefficients, beta by action, were not fitted.

    The result has the actions with coefficients, without profiles; None if no action has any.
    """
    actions = [action for action in moments.actions if action in coefficients]
    if not actions:
        return None
    own = replace(moments, positions={}, lags={}).of_actions(actions)
    beta = np.stack([coefficients[action] for action in own.actions])
    scalars = reduced_scalars(own.scalars, control_variates(own.scalars, own.windows), beta)
    return replace(own, scalars=scalars)


def is_reduced(quantity: Quantity, moments: DocumentMoments) -> bool:
    """Tell whether a quantity is a function of reduced moments alone."""
    if quantity.profile:
        return False
    return all(feature.kind == "scalar" and feature.name in REDUCED for _, feature in features_read(quantity, moments))

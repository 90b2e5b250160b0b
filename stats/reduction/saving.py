"""Say how many replicates and documents variance-reduced estimates save in a plan."""

from __future__ import annotations

from typing import Any

PLAIN_VARIANCE, REDUCED_VARIANCE = "plain", "reduced"
"""The two variances from which a plan can choose K replicates and N documents: of plain or of reduced estimates."""


def saving(plan: dict[str, Any]) -> str:
    """Return a line that compares the sample sizes a plan needs with reduced and with plain estimates.

    It is a line such as "9 replicates instead of 14"; empty if both sizes are equal, or for older plans without
    ``sizes``.
    """
    sizes = plan.get("sizes", {})
    if not sizes:
        return ""
    kinds = (("replicates", "replicates"), ("documents_per_stratum", "documents per stratum"))
    counts = [(sizes[REDUCED_VARIANCE][name], sizes[PLAIN_VARIANCE][name], words) for name, words in kinds]
    changed = [f"{less} {words} instead of {more}" for less, more, words in counts if less != more]
    if not changed:
        return ""
    seconds = [sizes[name]["seconds"] for name in (REDUCED_VARIANCE, PLAIN_VARIANCE)]
    if seconds[1] > 0:
        changed.append(f"{100 * seconds[0] / seconds[1]:.0f}% of the time")
    text = ", ".join(changed)
    return text if plan["variance"] == REDUCED_VARIANCE else f'with variance = "reduced" {text}'

"""The saving of an evaluation by the reduced variance, read from a plan."""

from __future__ import annotations

from typing import Any

PLAIN_VARIANCE, REDUCED_VARIANCE = "plain", "reduced"
"""What a plan chooses K and N by."""


def saving(plan: dict[str, Any]) -> str:
    """Say how many replicates and documents of a plan reduced estimates save, or would save.

    Args:
        plan: the plan's content with the measured variances, which older plans lack.

    Returns:
        A line such as "9 replicates instead of 14"; empty if nothing is saved.

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

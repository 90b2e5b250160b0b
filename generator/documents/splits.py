"""The split of a study's clusters: named by rows, kept from the store, or by hash, so that each side has enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from schema.document import SPLITS, hash_position, split_of


def divided(sizes: Mapping[str, int], wanted: Mapping[str, int], fixed: Mapping[str, str]) -> dict[str, str]:
    """Return the split of each cluster: that of its hash, unless a side would have too few documents.

    The side that has too few takes whole clusters from the other while that one has enough: development takes the
    smallest hashes of evaluation, and evaluation the largest of development.

    Args:
        sizes: the number of documents of each cluster.
        wanted: the number of documents that each split needs.
        fixed: the split of clusters that stay where they are.
    """
    splits = {cluster: fixed.get(cluster) or split_of(cluster) for cluster in sizes}
    there = Counter[str]()
    for cluster, split in splits.items():
        there[split] += sizes[cluster]
    by_hash = sorted((cluster for cluster in sizes if cluster not in fixed), key=hash_position)
    development, evaluation = SPLITS
    for short, other, order in ((development, evaluation, by_hash), (evaluation, development, by_hash[::-1])):
        for cluster in order:
            if there[short] >= wanted[short]:
                break
            if splits[cluster] == other and there[other] - sizes[cluster] >= wanted[other]:
                splits[cluster] = short
                there[short] += sizes[cluster]
                there[other] -= sizes[cluster]
    return splits

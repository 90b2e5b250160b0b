"""The split of a study's clusters: named by rows, kept from the store, or by hash, so that each side has enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvdrift.schema.document import SPLITS, hash_position, split_of


def divided(sizes: Mapping[str, int], wanted: Mapping[str, int], fixed: Mapping[str, str]) -> dict[str, str]:
    """Return the split of each cluster: that of its hash, unless a side would have too few documents.

    The side that has too few takes clusters of the other, which keeps enough: development the smallest hashes of
    evaluation, and evaluation the largest of development, as far as whole clusters give both what they need. If they
    cannot, the hashes decide.

    Args:
        sizes: the number of documents of each cluster.
        wanted: the number of documents that each split needs.
        fixed: the split of clusters that stay where they are.
    """
    splits = {cluster: fixed.get(cluster) or split_of(cluster) for cluster in sizes}
    free = sorted((cluster for cluster in sizes if cluster not in fixed), key=hash_position)

    def documents(split: str, clusters: Iterable[str]) -> int:
        return sum(sizes[cluster] for cluster in clusters if splits[cluster] == split)

    development, evaluation = SPLITS
    for short, other, order in ((development, evaluation, free[::-1]), (evaluation, development, free)):
        if not free or documents(short, sizes) >= wanted[short]:
            continue
        # Free clusters give the short side from ``least`` to ``most`` documents. Sums are bits of an integer.
        staying = [cluster for cluster in sizes if cluster in fixed]
        least = wanted[short] - documents(short, staying)
        most = sum(sizes[cluster] for cluster in free) - (wanted[other] - documents(other, staying))
        most = min(most, least + max(sizes[cluster] for cluster in free) - 1)  # of more, a cluster could go
        within = (1 << max(most + 1, 0)) - 1
        sums = [1]  # of the last clusters of the order: none, one, two …
        for cluster in reversed(order):
            sums.append((sums[-1] | sums[-1] << sizes[cluster]) & within)
        if not sums.pop() >> least:
            continue
        taken = 0
        for cluster in order:
            left, here = sums.pop(), splits[cluster] == short
            for taking in (here, not here):
                after = taken + taking * sizes[cluster]
                if (left << after & within) >> least:
                    splits[cluster], taken = short if taking else other, after
                    break
    return splits

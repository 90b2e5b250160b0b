"""The number of documents that a worker gets at once: few of slow documents, few near the end, and never none."""

from __future__ import annotations

from typing import Any

import pytest

from kvdrift.flows.cluster.worker import LOCAL, REMOTE, Groups, Pace

FAST, SLOW = 0.01, 100.0  # seconds of a document


def groups_of(documents: int, seconds: float, location: str = "/store") -> Groups:
    """Documents that wait, of which one is known to take some seconds; numbers stand for them."""
    part: Any = list(range(documents))
    groups = Groups(part, location)
    groups.generated(1, seconds, 0.0)
    return groups


def sizes(groups: Groups, workers: int, count: int = 1) -> list[int]:
    return [len(group.part) for group in groups.take(count, workers)]


def test_each_document_is_taken_once_and_in_order() -> None:
    groups = groups_of(100, FAST)
    taken = [one for group in groups.take(1_000, 3) for one in group.part]
    assert taken == list(range(100))
    assert list(groups.take(1, 3)) == []


def test_groups_shrink_to_single_documents() -> None:
    found = sizes(groups_of(1_000, FAST), 4, 1_000)
    assert found[0] == 125  # an eighth of what waits
    assert found == sorted(found, reverse=True)
    assert found[-4:] == [1] * 4


def test_a_group_is_of_documents_for_the_seconds_between_commits() -> None:
    assert sizes(groups_of(10_000, SLOW), 4) == [1]
    assert sizes(groups_of(10_000, LOCAL.least / 7.5), 1) == [7]
    assert sizes(groups_of(10_000, REMOTE.least / 7.5, "s3://bucket/store"), 1) == [7]


def test_seconds_are_learned() -> None:
    groups = groups_of(10_000, 1.0)
    groups.generated(1, 3.0, 0.0)
    (group,) = groups.take(1, 100)
    assert len(group.part) == LOCAL.seconds(100) / 2.0


def test_workers_commit_less_often_if_commits_take_long() -> None:
    """Once commits are fast again, workers commit as often as before."""
    groups = groups_of(10_000, SLOW)
    for commit, mean in ((0.2, LOCAL.least), (60.0, 600.0), (0.2, LOCAL.least)):
        for _ in range(40):
            groups.generated(1, SLOW, commit)
        seconds = [group.seconds for group in groups.take(100, 1)]
        assert sum(seconds) / len(seconds) == pytest.approx(mean, rel=0.2)  # seven standard errors


def test_what_a_worker_left_comes_first() -> None:
    groups = groups_of(10, SLOW)
    (first,) = groups.take(1, 1)
    groups.give_back(first.part)
    assert [group.part for group in groups.take(2, 1)] == [[0], [1]]


@pytest.mark.parametrize("pace", [LOCAL, REMOTE])
@pytest.mark.parametrize("workers", [1, 10, 200, 1_000])
def test_commits_a_second_have_a_bound(pace: Pace, workers: int) -> None:
    assert workers / pace.seconds(workers) <= pace.rate
    assert pace.seconds(workers) >= pace.least


def test_workers_that_begin_together_do_not_commit_together() -> None:
    """Their seconds differ by as much as the average itself, which they have as one."""
    seconds = [group.seconds for group in groups_of(4_000, FAST).take(1_000, 1_000)]
    mean = LOCAL.seconds(1_000)
    assert min(seconds) < 0.6 * mean < 1.4 * mean < max(seconds)  # failing by chance once in 10^45 times
    assert sum(seconds) / len(seconds) == pytest.approx(mean, rel=0.1)  # 11 standard errors

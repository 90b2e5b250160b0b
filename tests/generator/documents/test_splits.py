"""Which documents are for development and which for evaluation: named by rows, or by hash so that each side has enough."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fixtures.refusals import refused

from kvdrift.generator.documents.registry import choose_candidates, divided
from kvdrift.generator.documents.source import Candidate, HeldDocument, HeldDocuments
from kvdrift.schema.document import SPLITS, hash_position, split_of
from kvdrift.schema.study import DocumentsSection

Rows = list[dict[str, Any]]


def rows_of(count: int, **fields: Any) -> Rows:
    return [{"id": f"p{number}", "prompt": "word"} | fields for number in range(count)]


def written(folder: Path, rows: Iterable[dict[str, Any]], name: str = "mine.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def section(path: str, development: int, evaluation: int, **keys: Any) -> DocumentsSection:
    counts = {"development": development, "evaluation": evaluation}
    return DocumentsSection(**({"source": "jsonl", "path": path, "length": 9, "stratum": "s", **counts} | keys))


def names(chosen: dict[str, list[Candidate]]) -> dict[str, list[str]]:
    return {split: [item.doc for item in items] for split, items in chosen.items()}


def choose(*sections: DocumentsSection, held: HeldDocuments | None = None) -> list[dict[str, list[str]]]:
    return [names(chosen) for chosen in choose_candidates(sections, 0, held or HeldDocuments())]


def test_twelve_rows_are_enough_for_twelve_documents(tmp_path: Path) -> None:
    """By hash alone, one of them is for development."""
    by_side = {split: [f"p{n}" for n in range(40) if split_of(f"p{n}") == split] for split in SPLITS}
    ids = [*by_side["evaluation"][:6], by_side["development"][0], *by_side["evaluation"][6:11]]
    path = written(tmp_path, [{"id": name, "prompt": "word"} for name in ids])
    by_hash = sorted(ids, key=hash_position)
    for development in range(2, 11):
        (chosen,) = choose(section(path, development, 12 - development))
        assert set(chosen["development"]) == set(by_hash[:development]), "the smallest hashes"
        assert set(chosen["evaluation"]) == set(by_hash[development:])
        assert all(own == sorted(own, key=ids.index) for own in chosen.values())


def test_a_source_whose_hashes_suffice_keeps_them(tmp_path: Path) -> None:
    rows = rows_of(60)
    path = written(tmp_path, rows)
    by_hash = {split: [row["id"] for row in rows if split_of(row["id"]) == split] for split in SPLITS}
    most = {split: len(own) for split, own in by_hash.items()}
    for development, evaluation in ((2, 3), (most["development"], most["evaluation"])):
        (chosen,) = choose(section(path, development, evaluation))
        assert chosen == {
            "development": by_hash["development"][:development], "evaluation": by_hash["evaluation"][:evaluation]
        }  # fmt: skip
    (more,) = choose(section(path, most["development"] + 1, most["evaluation"] - 1))
    moved = set(more["development"]) - set(by_hash["development"])
    assert moved == {min(by_hash["evaluation"], key=hash_position)}
    (other,) = choose(section(path, most["development"] - 1, most["evaluation"] + 1))
    assert set(other["evaluation"]) - set(by_hash["evaluation"]) == {max(by_hash["development"], key=hash_position)}


def test_whole_clusters_give_both_sides_enough_if_they_can_and_nothing_moves_in_vain() -> None:
    draws = random.Random(3)  # noqa: S311 - a test's numbers
    for _ in range(300):
        sizes = {f"c{draws.randrange(10**6)}": draws.choice((1, 2, 3, 5)) for _ in range(draws.randrange(1, 12))}
        fixed = {cluster: draws.choice(SPLITS) for cluster in sizes if draws.random() < 0.2}
        wanted = {"development": draws.randrange(6), "evaluation": draws.randrange(12)}
        splits = divided(sizes, wanted, fixed)
        assert splits.keys() == sizes.keys()
        assert splits | fixed == splits
        there = {split: sum(size for name, size in sizes.items() if splits[name] == split) for split in SPLITS}
        for short, other in (SPLITS, SPLITS[::-1]):
            from_other = [name for name in sizes if splits[name] == short != split_of(name) and name not in fixed]
            if from_other:
                assert there[short] - max(sizes[name] for name in from_other) < wanted[short]
                assert there[other] >= wanted[other]
        possible = {sum(size for name, size in sizes.items() if fixed.get(name) == "development")}
        for name in sizes.keys() - fixed.keys():
            possible |= {documents + sizes[name] for documents in possible}
        most = sum(sizes.values()) - wanted["evaluation"]
        enough = any(wanted["development"] <= documents <= most for documents in possible)
        assert enough == all(there[split] >= wanted[split] for split in SPLITS)
        if not enough:
            assert splits == {name: fixed.get(name) or split_of(name) for name in sizes}


def test_rows_name_the_split_of_their_cluster(tmp_path: Path) -> None:
    rows = rows_of(20)
    for number in (3, 4, 17):
        rows[number]["split"] = "development"
    rows[5] |= {"cluster": "p4"}  # of the cluster of row 4, in its split
    rows[6] |= {"split": "evaluation", "cluster": "pair"}
    rows[7] |= {"split": None, "cluster": "pair"}
    (chosen,) = choose(section(written(tmp_path, rows), 4, 16))
    assert chosen["development"] == ["p3", "p4", "p5", "p17"]
    line = refused(choose, section(written(tmp_path, [row | {"split": "evaluation"} for row in rows[8:]]), 2, 2))
    assert re.search("= 2 .* = 2, .* 12 .* 12 .* 0 for development .* 12 for evaluation", line)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"split": "dev"}}, "mine.jsonl, line 2: field 'split': 'dev' "),
        ({1: {"split": "Evaluation"}}, "mine.jsonl, line 2: field 'split': 'Evaluation' "),
        ({1: {"split": 1}}, "mine.jsonl, line 2: field 'split': expected text, not 1"),
        (
            {1: {"split": "evaluation", "cluster": "c"}, 3: {"split": "development", "cluster": "c"}},
            "mine.jsonl, line 4: field 'split': 'development', but line 2 of .*mine.jsonl, .* 'c', .*'evaluation'",
        ),
        (
            {1: {"split": "evaluation"}, 3: {"split": "development", "cluster": "p1", "stratum": "other"}},
            "mine.jsonl, line 4: field 'split': 'development', but line 2 of .* 'p1', .*'evaluation'",
        ),
    ],
)  # fmt: skip
def test_wrong_and_contradicting_splits_are_one_line(
    tmp_path: Path, changes: dict[int, dict[str, Any]], message: str
) -> None:
    rows = rows_of(40)
    for number, change in changes.items():
        rows[number] |= change
    assert re.search(message, refused(choose, section(written(tmp_path, rows), 2, 2)))


def test_splits_of_two_files_must_agree(tmp_path: Path) -> None:
    first = written(tmp_path, rows_of(20, split="evaluation", stratum="s"), "one.jsonl")
    second = written(
        tmp_path, [row | {"cluster": row["id"], "id": f"q{row['id']}"} for row in rows_of(20)], "two.jsonl"
    )
    sections = section(first, 2, 5), section(second, 2, 2, stratum="t")
    line = refused(choose, *sections)
    assert re.search("= 2 .* = 5, .* 20 .* 20 ", line)
    written(tmp_path, [{"id": "q1", "cluster": "p1", "prompt": "word", "split": "development"}], "two.jsonl")
    assert re.search("two.jsonl, line 1: .*line 2 of .*one.jsonl, .* 'p1'", refused(choose, *sections))


def test_strata_that_share_clusters_split_them_alike(tmp_path: Path) -> None:
    """Twelve questions at two lengths; the second stratum asks for more development documents than hashes give."""
    rows = [
        {"id": f"{length}-{n}", "cluster": f"p{n}", "prompt": "word", "stratum": length}
        for length in ("short", "long") for n in range(12)
    ]  # fmt: skip
    path = written(tmp_path, rows)
    short, long = section(path, 2, 4, stratum="short"), section(path, 5, 7, stratum="long")
    for sections in ((short, long), (long, short)):
        splits: dict[str, set[str]] = {}
        for chosen, part in zip(choose(*sections), sections, strict=True):
            for split, own in chosen.items():
                assert len(own) == getattr(part, split)
                for name in own:
                    splits.setdefault(name.partition("-")[2], set()).add(split)
        assert all(len(own) == 1 for own in splits.values())


def test_clusters_that_cannot_be_split_are_told(tmp_path: Path) -> None:
    rows = [row | {"cluster": f"c{number // 5}"} for number, row in enumerate(rows_of(10))]
    line = refused(choose, section(written(tmp_path, rows), 4, 6))
    assert re.search(r" 10 document.* 2 cluster.* \d+ for development .* \d+ for evaluation", line)
    (chosen,) = choose(section(written(tmp_path, rows), 5, 5))
    assert Counter({split: len(own) for split, own in chosen.items()}) == {"development": 5, "evaluation": 5}


def test_stored_documents_keep_their_split(tmp_path: Path) -> None:
    """More rows, in another order, and more documents of each split move none of those that a study has."""
    (before,) = choose(section(written(tmp_path, rows_of(12)), 5, 7))
    held = HeldDocuments(tuple(
        HeldDocument(doc, split, "s", "prompt", doc, place)
        for split, own in before.items() for place, doc in enumerate(own)
    ))  # fmt: skip
    for count in (12, 40):
        path = written(tmp_path, rows_of(count)[::-1])
        (same,) = choose(section(path, 5, 7), held=held)
        assert same == before
    (more,) = choose(section(path, 8, 20), held=held)
    assert {split: own[: len(before[split])] for split, own in more.items()} == before
    assert all(split_of(name) == split for split, own in more.items() for name in own[len(before[split]) :])
    (few,) = choose(section(written(tmp_path, rows_of(14)), 6, 8), held=held)
    assert {split: own[: len(before[split])] for split, own in few.items()} == before


def test_a_row_cannot_move_a_stored_document(tmp_path: Path) -> None:
    held = HeldDocuments((HeldDocument("p1", "evaluation", "s", "prompt", "p1", 0),))
    rows = rows_of(20)
    rows[1]["split"] = "development"
    line = refused(choose, section(written(tmp_path, rows), 2, 2), held=held)
    assert re.search("document 'p1' .* evaluation .* 'development'", line)
    rows[1]["split"] = "evaluation"
    assert choose(section(written(tmp_path, rows), 2, 2), held=held)[0]["evaluation"][0] == "p1"


def test_a_cluster_follows_the_stored_documents_of_other_strata(tmp_path: Path) -> None:
    name = next(f"p{number}" for number in range(40) if split_of(f"p{number}") == "evaluation")
    held = HeldDocuments((HeldDocument("x", "development", "t", "prompt", name, 0),))
    (chosen,) = choose(section(written(tmp_path, rows_of(40)), 3, 9), held=held)
    assert name in chosen["development"]

"""Several stores side by side: which documents match, their differences, the leaderboard, and the command."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.event_logs import make_log, write
from fixtures.report_views import check

from kvdrift.command import main
from kvdrift.flows.pages.reports import report_folder
from kvdrift.flows.pages.side_by_side import comparison_folder, pairings, read_entries
from kvdrift.log.store import Store
from kvdrift.report.side_by_side import (
    Comparison,
    Entry,
    build_comparison,
    by_temperature,
    leaderboard,
    obstacles,
    temperature_of,
    temperatures_table,
)
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.windows import Windows
from kvdrift.stats.moments import DocumentMoments

Measured = tuple[Entry, DocumentMoments]

EVALUATED = tuple(f"d{number}" for number in range(12))


def ingested(
    folder: Path,
    docs: Sequence[str] = EVALUATED,
    replicates: Sequence[int] = range(4),
    other_strata: Sequence[str] = (),
    *,
    hashed: bool = True,
) -> Path:
    """Return a store of another generator's events, derived, with evaluation documents of two strata.

    With ``hashed`` the documents file has the hash of each prompt.
    """
    folder.mkdir()
    log = make_log(docs, ("half", "third"), replicates)
    lines = [
        f"{doc},S{int(doc[1:]) % 2 + 5 * (doc in other_strata)},evaluation,{sha256(doc.encode()).hexdigest() if hashed else ''}"
        for doc in docs
    ]
    (folder / "documents.csv").write_text("\n".join(["doc,stratum,split,prompt_sha256", *lines]) + "\n")
    written = write(folder / "log.parquet", log)
    for arguments in (
        ("ingest", written, "--store", folder / "store", "--documents", folder / "documents.csv"),
        ("derive", folder / "store"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert not stop.value.code
    return folder / "store"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stores: the second lacks three documents, has one in another stratum, and other replicates."""
    base = tmp_path_factory.mktemp("stores")
    return {
        "first": ingested(base / "first"),
        "fewer": ingested(base / "fewer", EVALUATED[3:], range(2, 6), ["d11"]),
    }


@pytest.fixture(scope="module")
def measured(stores: dict[str, Path]) -> list[Measured]:
    """Both, read once."""
    return read_entries([str(location) for location in stores.values()])


def changed(measured: Measured, *, names: tuple[str, ...] = (), horizon: int = 0, model: str = "") -> Measured:
    """The same study under other actions, with another horizon, or of another model."""
    entry, moments = measured
    content = entry.content
    facts = replace(
        content.facts,
        actions=[row | {"action": name} for row, name in zip(content.facts.actions, names, strict=False)]
        or content.facts.actions,
        windows=Windows.of(horizon) if horizon else content.windows,
        model=model or content.facts.model,
    )
    content = replace(content, facts=facts, actions=list(names) or content.actions)
    return replace(entry, content=content), replace(moments, actions=names or moments.actions)


def mean_mismatch(location: Path, action: str, docs: set[str]) -> float:
    """R of an action over some documents, by hand: tokens of events, means over replicates, documents and strata."""
    store = Store.open(location)
    strata = {row["doc"]: row["stratum"] for row in store.read("documents").to_pylist()}
    unlike: dict[str, dict[str, list[float]]] = {}
    for row in store.read("events").to_pylist():
        if row["action"] == action and row["doc"] in docs:
            of = unlike.setdefault(strata[row["doc"]], {}).setdefault(row["doc"], [])
            of.append(float(row["x_token"] != row["y_token"]))
    means = [[sum(values) / len(values) for values in own.values()] for own in unlike.values()]
    return sum(sum(own) / len(own) for own in means) / len(means)


def test_differences_are_over_the_documents_that_both_have(stores: dict[str, Path], measured: list[Measured]) -> None:
    """The stores differ in three documents, one document's stratum, and the number of replicates."""
    (found,) = pairings(measured)
    shared = set(EVALUATED[3:11])
    assert (found.documents, found.by_name, found.obstacle) == (len(shared), False, None)
    assert [(one.first_action, one.other_action, one.same) for one in found.differences] == [
        ("half", "half", False), ("third", "third", False),
    ]  # fmt: skip
    for one in found.differences:
        expected = [mean_mismatch(stores[name], one.first_action, shared) for name in ("fewer", "first")]
        gap = one.estimates["gap"]
        assert gap.estimate == pytest.approx(expected[0] - expected[1], abs=1e-12)
        assert gap.low < gap.estimate < gap.high
        assert (gap.documents, gap.status, gap.level) == (len(shared), "exploratory", 0.95)


def test_a_store_does_not_differ_from_its_copy(finished: Path, tmp_path: Path) -> None:
    """Every difference is exactly 0, the origins are equal, and intervals include 0: the six documents are alike."""
    ((entry, moments),) = read_entries([str(finished)])
    (found,) = pairings([(entry, moments), (replace(entry, location=str(tmp_path / "copy")), moments)])
    assert found.documents == 6
    assert {one.same for one in found.differences} == {True}
    for one in found.differences:
        assert {row.estimate for row in one.estimates.values()} == {0.0}
        assert all(row.low <= 0 <= row.high for row in one.estimates.values() if row.low is not None)


def test_what_cannot_be_subtracted_says_why(measured: list[Measured]) -> None:
    first, _ = measured
    empty = replace(first[0], documents={}), first[1]
    cases = {
        "their horizons are 12 and 16 tokens": changed(first, horizon=16),
        "no document is the same in both": empty,
        "no action of one study has the name": changed(first, names=("a", "b")),
    }
    for reason, other in cases.items():
        (found,) = pairings([first, other])
        assert reason in str(found.obstacle)
        assert not found.differences
        assert reason in obstacles(Comparison((found.first, found.other), (found,)))[0]


@pytest.mark.slow
def test_documents_without_prompt_hashes_are_not_taken_for_the_same(
    measured: list[Measured], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two unknown prompts are not equal: their names alone say nothing."""
    unknown = [ingested(tmp_path / name, hashed=False) for name in ("one", "two")]
    read = read_entries([str(location) for location in unknown])
    for pair, lacking in ((read, "{0} and {1}"), ([measured[0], read[1]], "{1}"), ([read[0], measured[0]], "{0}")):
        (found,) = pairings(pair)
        names = [entry.name for entry, _ in pair]
        assert (found.documents, found.by_name, found.differences) == (0, False, ())
        (said,) = obstacles(Comparison((found.first, found.other), (found,)))
        assert said.startswith(f"{names[0]} and {names[1]} are not subtracted: ")
        assert f"no prompt_sha256 in {lacking.format(*names)}, " in said
    some = {doc: row | {"prompt_sha256": None} for doc, row in list(measured[0][0].documents.items())[:4]}
    (found,) = pairings(
        [measured[0], (replace(measured[0][0], documents=measured[0][0].documents | some), measured[0][1])]
    )
    assert (found.documents, found.obstacle) == (8, None), "those whose prompts are known are subtracted"
    code, _, _ = call(capsys, "report", *unknown, "-o", tmp_path / "page")
    assert code == 0
    assert "are not subtracted: " in (tmp_path / "page" / "index.html").read_text()


def test_actions_of_other_names_that_keep_as_much_are_subtracted(measured: list[Measured]) -> None:
    first, _ = measured
    entry, moments = changed(first, names=("a", "b"))
    keeps = {"half": "1/2", "a": "1/2", "third": "1/3", "b": "1/4"}

    def declared(one: Entry) -> Entry:
        rows = [row | {"keep": keeps[row["action"]], "selector": "own"} for row in one.content.facts.actions]
        return replace(one, content=replace(one.content, facts=replace(one.content.facts, actions=rows)))

    (found,) = pairings([(declared(first[0]), first[1]), (declared(entry), moments)])
    assert [(one.first_action, one.other_action) for one in found.differences] == [("half", "a")]
    assert found.differences[0].estimates["gap"].estimate == 0  # both are one action's events


def test_documents_of_unlike_models_are_matched_by_name_and_the_page_says_so(measured: list[Measured]) -> None:
    first, _ = measured
    (found,) = pairings([first, changed(first, model="org/n")])
    assert (found.documents, found.by_name) == (12, True)
    (said,) = obstacles(Comparison((found.first, found.other), (found,)))
    assert "matched by name" in said


def test_studies_that_differ_in_temperature_alone_are_found(measured: list[Measured]) -> None:
    """The lowest first. A greedy law goes with any truncation; other documents and other truncations stand apart.

    One may have fewer of the documents: plans of several laws may take more or fewer.
    """
    (first, _), (fewer, _) = measured

    def under(entry: Entry, sampling: Sampling) -> Entry:
        return replace(entry, content=replace(entry.content, facts=replace(entry.content.facts, sampling=sampling)))

    laws = [Sampling(), Sampling(0.0), Sampling(0.5), Sampling(0.7, 0.9)]
    assert by_temperature(Comparison((first, fewer), ())) == [], "their laws are not recorded"
    entries = [under(first, law) for law in laws]
    other = under(first, Sampling(0.6))
    unlike = {doc: row | {"prompt_sha256": "0" * 64} for doc, row in first.documents.items()}
    whole, truncated = by_temperature(Comparison((*entries, replace(other, documents=unlike)), ()))
    assert [temperature_of(entry) for entry in whole.entries] == [0.0, 0.5, 1.0]
    assert [temperature_of(entry) for entry in truncated.entries] == [0.0, 0.7]
    assert whole.actions == ["half", "third"]
    table = temperatures_table(whole, "by_temperature_1")
    assert [row.cells[0].text for row in table.rows] == ["0", "0.5", "1"] * 2
    (some,) = by_temperature(Comparison((entries[0], under(fewer, laws[2])), ()))
    assert [len(entry.documents) for entry in some.entries] == [len(fewer.documents), len(first.documents)]
    assert len(fewer.documents) < len(first.documents)


def test_the_leaderboard_has_the_least_r_first(stores: dict[str, Path], measured: list[Measured]) -> None:
    places = leaderboard(Comparison(tuple(entry for entry, _ in measured), ()))
    by_hand = sorted(
        (mean_mismatch(stores[name], action, set(docs)), name, action)
        for name, docs in (("first", EVALUATED), ("fewer", EVALUATED[3:]))
        for action in ("half", "third")
    )
    assert [place.estimate("mismatch").estimate for place in places] == pytest.approx([one[0] for one in by_hand])
    assert [(place.entry.location.split("/")[-2], place.action) for place in places] == [one[1:] for one in by_hand]


def test_a_seed_of_zero_is_a_seed(measured: list[Measured], tmp_path: Path) -> None:
    """Another generator's events have none."""
    entries = [entry for entry, _ in measured]
    content = entries[1].content
    entries[1] = replace(entries[1], content=replace(content, facts=replace(content.facts, seed=0)))
    build_comparison(Comparison(tuple(entries), ()), tmp_path)
    with (tmp_path / "tables" / "entries.csv").open() as file:
        assert [line["seed"] for line in csv.DictReader(file)] == ["not recorded", "0"]


def test_models_of_a_study_have_folders_of_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folders = [report_folder(store, "s", model) for model in ("a/b", "a-b", "-a-b", "a b", "../b")]
    assert len(set(folders)) == len(folders)
    assert {folder.parent for folder in folders} == {tmp_path / "report" / "s"}
    assert folders[1].name == "a-b", "an id that is the name of a folder keeps it"
    assert folders[0].name.startswith("a-b-")


def test_the_folder_of_a_comparison_needs_no_quotes() -> None:
    assert comparison_folder(["stores/my-study", "../tutorial"]) == Path("reports/my-study-and-tutorial")


@pytest.fixture(scope="module", autouse=True)
def unwritten_figures() -> None:
    """The figures of a comparison are written."""


def test_the_command_writes_one_page(
    stores: dict[str, Path],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With figures and tables as files, and the same when it is built again."""
    capsys.readouterr()
    folder, built = tmp_path / "page", list[Comparison]()

    def build(comparison: Comparison, where: Path) -> Path:
        built.append(comparison)
        return build_comparison(comparison, where)

    monkeypatch.setattr("kvdrift.flows.pages.side_by_side.build_comparison", build)
    code, out, err = call(capsys, "report", *stores.values(), finished, "-o", folder)
    assert (code, out) == (0, f"report: {folder / 'index.html'}\n"), err
    page = (folder / "index.html").read_text(encoding="utf-8")
    (comparison,) = built
    again = build_comparison(comparison, tmp_path / "again")
    assert again.read_text(encoding="utf-8") == page
    own = [link for link in check(page).links if link.endswith(".html")]
    assert [(folder / link).resolve() for link in own] == [finished / "report" / "small" / "index.html"]
    with (folder / "tables" / "leaderboard.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["mismatch"]) for line in lines] == sorted(float(line["mismatch"]) for line in lines)
    assert len(lines) == 6
    with (folder / "tables" / "differences.csv").open() as file:
        differences = list(csv.DictReader(file))
    assert {(line["first_action"], line["quantity"]) for line in differences} >= {("half", "gap"), ("third", "gap")}
    assert "first/store and fewer/store share 8 documents, of 12 and 9" in page
    assert "no document is the same in both" in page
    for name in ("figures/leaderboard.svg", "figures/leaderboard.pdf"):
        assert (folder / name).is_file()


def test_mistakes_are_one_line(stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, fewer = stores.values()
    assert "is named twice" in mistake(capsys, "report", first, first)
    assert str(tmp_path / "nothing") in mistake(capsys, "report", first, tmp_path / "nothing")
    assert "no study 'exp'" in mistake(capsys, "report", first, fewer, "--study", "exp")
    assert "--format latex" in mistake(capsys, "report", first, fewer, "--format", "latex")

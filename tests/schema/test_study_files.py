"""Study files: stable hashes, paths relative to the file's folder, and error lines that say what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.finite_study import write_finite_study
from fixtures.house import ROOT
from fixtures.refusals import refused
from fixtures.small_study import TEXT, write_study
from fixtures.study_files import load_study

from kvdrift.schema.study import load_studies

SHA256 = {
    "finite_state": ["250b2b34409379b18b57d48ed1c901ed29e82ddbc6fb77cf8a42da35b2270685"],
    "paper_first": [
        "55c0e2d7ba021a43fa7973653bd484285667a1d7043aa87e499e64a17517c42c",
        "2cbb28432aeedbe5e24f296565cb1851cd5387c9991512b59184e4eb7b152037",
    ],
    "quickstart": ["2148036d1576f7d9d2d192028bc000597bccacfb148d66cf125bd48b0757cdb2"],
}
TABLES = ('family = "mixture"\nalphabet = 2', 'tables = "laws/systems.json"')


@pytest.mark.parametrize("name", SHA256)
def test_hashes_of_studies_stay(name: str) -> None:
    """Stores have them: another one makes a store refuse its own study file."""
    assert [study.sha256 for study in load_studies(ROOT / "studies" / f"{name}.toml")] == SHA256[name]


def test_a_file_of_systems_that_moved_is_known_by_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is part of the hash of a study."""
    monkeypatch.chdir(tmp_path)
    moved = load_study(ROOT / "studies" / "sharp_interval.toml")
    text = (ROOT / "studies" / "sharp_interval.toml").read_text()
    path = tmp_path / "before.toml"
    path.write_text(text.replace('"sharp_interval.json"', '"studies/sharp_interval.json"'))
    before = load_study(path)
    assert moved.sha256 != before.sha256
    assert moved.agrees_with(before.settings)
    assert not moved.agrees_with(before.settings.replace('"horizon": 6', '"horizon": 7'))
    assert not moved.agrees_with(None)


@pytest.mark.parametrize("working", [".", "studies", ".."])
def test_paths_begin_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working: str) -> None:
    folder = tmp_path / "here" / "studies"
    (folder / "laws").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / working)
    study = load_study(write_finite_study(folder, TABLES))
    assert study.model.tables_file == folder / "laws" / "systems.json"
    assert study.model.tables == "laws/systems.json"
    changes = (
        'source = "embedded"\ntasks = ["needle"]',
        'source = "jsonl"\npath = "../data/x.jsonl"\nexclude = "seen.json"',
    )
    part = load_study(write_study(folder, changes)).documents[0]
    assert (part.path, part.exclude) == (f"{tmp_path}/here/data/x.jsonl", f"{folder}/seen.json")
    changes = (changes[0], changes[1].replace("../data", "~").replace("seen.json", "/seen.json"))
    part = load_study(write_study(folder, changes)).documents[0]
    assert (part.path, part.exclude) == (str(Path("~/x.jsonl").expanduser()), "/seen.json")


def test_a_path_that_only_the_working_folder_has_is_refused_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "studies").mkdir()
    (tmp_path / "x.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    path = write_study(
        tmp_path / "studies", ('source = "embedded"\ntasks = ["needle"]', 'source = "jsonl"\npath = "x.jsonl"')
    )
    line = refused(load_studies, path)
    assert line.startswith(f"{path}: documents[0].path = 'x.jsonl': ")
    assert line.endswith(f", {tmp_path}/studies; write '../x.jsonl'")
    (tmp_path / "laws").mkdir()
    (tmp_path / "laws" / "systems.json").touch()
    assert "model.tables = 'laws/systems.json': paths begin" in refused(
        load_studies, write_finite_study(tmp_path / "studies", TABLES)
    )


def test_the_baseline_is_an_action_of_the_study(tmp_path: Path) -> None:
    """A study's only action is its baseline; of several actions, the line about a missing baseline names the first."""
    without = ('baseline = "snapkv-half"\n', "")
    path = write_study(tmp_path, without, ('name = "snapkv-half"', 'name = "mine"'))
    assert 'baseline = "mine"' in refused(load_studies, path)
    one = TEXT.index('[[actions]]\nname = "recent-half"'), TEXT.index("[plan]")
    path = write_study(tmp_path, without, (TEXT[slice(*one)], ""))
    assert load_study(path).plan.baseline == "snapkv-half"


def _several(many: int, section: str) -> str:
    """Return a section of a study file, repeated."""
    return "".join(section.format(number) for number in range(many))


STRATUM = """
[[documents]]
source = "embedded"
tasks = ["needle"]
length = 384
stratum = "s{}"
development = 2
evaluation = 50000
"""
ACTION = '[[actions]]\nname = "a{}"\nselector = "recent"\nkeep = "1/2"\n'
KEPT = 'selector = "snapkv"\nkeep = "1/2"'
REFUSED = [  # a change of the study file, with the place that the line begins with and other parts of the line
    # what is missing
    ("length = 384\n", "", ("documents[0].length: missing; ", "length = 768")),
    ('name = "small"\n', "", ("study.name: missing; ", 'name = "my-study"')),
    ('keep = "1/2"\n', "", ("actions[0].keep: missing; ", 'keep = "1/2"')),
    ('[model]\nid = "kvdrift/tiny"\n', "", ("model: missing; ", "[model]")),
    ('baseline = "snapkv-half"\n', "", ("plan.baseline: missing; ", 'baseline = "snapkv-half"')),
    # a policy alone decides what is kept
    (KEPT, 'policy = "sliding"', ("actions[0].keep: missing", 'keep = "1/2"')),
    (KEPT, 'policy = "sliding"\nkeep = "all"', ('actions[0].keep = "all"', "a share")),
    (KEPT, 'policy = "sliding"\nkeep = 9\nselector = "snapkv"', ("actions[0].selector: ", "no selector")),
    (KEPT, 'policy = "sliding"\nkeep = 9\ncodec = "int8"', ("actions[0].codec: ", "no codec")),
    (KEPT, 'policy = "sliding"\nkeep = 9\nsinks = 8', ("actions[0].sinks: unknown key", 'policy = { name = "sliding", sinks = ... }')),
    (KEPT, "policy = { sinks = 8 }\nkeep = 9", ("actions[0].policy: has no name", 'policy = { name = "sliding", sinks = 8 }')),
    (KEPT, "policy = 3\nkeep = 9", ("actions[0].policy = 3",)),
    # values
    ('name = "small"', 'name = "a b"', ("study.name = 'a b'", "letters, digits, . _ and -, of which the first is a letter or digit")),
    ('name = "small"', f'name = "{"x" * 81}"', ("study.name = 'xxx", "at most 80 characters")),
    ('tasks = ["needle"]', 'part = "0/1"', ("documents[0].part = '0/1'", 'as in "1/2", up to 999')),
    ('primary = ["gap", "mismatch"]', "primary = []", ("plan.primary = []", "at least 1 item")),
    ("replicates = 5", "replicates_between = [1, 2, 3]", ("plan.replicates_between", "at most 2 items")),
    ("replicates = 5", "replicates = 0", ("plan.replicates = 0", "'auto' or greater than or equal to 1")),
    ("[plan]", '[plan]\nstopping = "sequential"\nresolve = "equivalence"\nmargin = inf', ("plan.margin = inf", "a finite number")),
    # counts that no study has
    ("evaluation = 3", "evaluation = 1000000000", ("documents[0].evaluation", "1000000000", "100000")),
    ("[[actions]]", _several(2, STRATUM) + "[[actions]]", ("documents", "100,014", "100,000")),
    ("replicates = 5", "replicates = 16000000", ("plan.replicates", "16,000,000", "192,000,000", "16,777,216")),
    ("replicates = 5", 'replicates = "auto"\nreplicates_between = [2, 9000000]', ("plan.replicates_between", "9,000,000")),
    ("development_replicates = 4", "development_replicates = 9000000", ("plan.development_replicates", "9,000,000")),
    ("seed = 3", f"seed = 3\ntemperature = {[place / 1000 for place in range(1, 5001)]}", ("study.temperature", "5,000", "256")),
    ('[model]\nid = "kvdrift/tiny"\n', _several(300, '[[model]]\nid = "m{}"\n'), ("model", "300", "256")),
    ("[plan]", _several(300, ACTION) + "[plan]", ("actions", "256")),
    ("[plan]", '[plan]\nstopping = "sequential"\nlooks = ["1e999999999"]', ("plan.looks", "1e999999999")),
    ('keep = "1/2"', 'keep = "1e999999999%"', ("action 'snapkv-half'", "1e999999999%")),
    ("[plan]", "[plan]\nfamily_size = 1000000000000000", ("plan.family_size", "1000000000000000", "100000")),
    ("[plan]", "[plan]\nalpha = 1e-300", ("plan.alpha", "1e-300", "0.00001")),
    ("documents = 3", "documents = 500", ("plan.documents = 500", "only 3", "write 3")),
    ("documents = 3", "documents_at_least = 500", ("plan.documents_at_least = 500", "only 3", "write 3")),
    # sections of another kind
    *((TEXT, text, ("",)) for text in ("documents = 3", "documents = [3]", 'documents = "x"', "[documents]\npath = 3")),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "parts"), REFUSED)
def test_what_no_study_has_is_refused_before_anything_is_made(
    tmp_path: Path, old: str, new: str, parts: tuple[str, ...]
) -> None:
    line = refused(load_studies, write_study(tmp_path, (old, new)))
    assert line.startswith(f"{tmp_path / 'small.toml'}: {parts[0]}"), line[:300]
    assert all(part in line for part in parts), line[:300]
    assert len(line) < 2_100

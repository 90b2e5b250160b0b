"""A study whose actions have weights of their own: two temperatures, gone on with, its page, bytes and refused changes."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree

import pytest
from fixtures.command import call, mistake
from fixtures.families import save_for_study
from fixtures.finished_studies import draw_bytes
from fixtures.own_selectors import LOOKING
from fixtures.small_study import TEXT, run_of, write_study
from fixtures.study_files import load_study

import kvdrift
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.run import stages
from kvdrift.flows.run.checks import check_study
from kvdrift.flows.run.study import run_file
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDERS
from kvdrift.generator.transformer.other_weights.model import ModelWithOthers, load_transformer
from kvdrift.log.store import Store
from kvdrift.schema.progress import SILENT
from kvdrift.schema.study import load_studies
from kvdrift.verification.whole_store import verify

# Weights alone, and with a selector, a codec and a policy.
ACTIONS = (
    ('selector = "recent"\nkeep = "1/2"', 'weights = "int4"'),
    ('selector = "snapkv"\nkeep = "1/2"', 'weights = "int4"\nselector = "snapkv"\nkeep = "1/2"'),
    (
        "[plan]\nbaseline",
        """[[actions]]
name = "coded"
weights = "int4"
codec = "int8"

[[actions]]
name = "sliding"
weights = "int4"
policy = "sliding"
keep = 192

[plan]
baseline""",
    ),
)
SMALLER = (
    ("horizon = 12", "horizon = 8\ntemperature = [0.0, 1.0]"),
    (TEXT[TEXT.rindex("[[documents]]") : TEXT.index("[[actions]]")], ""),
    ("replicates = 5", "replicates = 3"),
    ("development_replicates = 4", "development_replicates = 2"),
    ("draws = 200", "draws = 100"),
    ("evaluation = 3", "evaluation = 2"),
    ("documents = 3", "documents = 2"),
)


def study_in(folder: Path, *changes: tuple[str, str]) -> Path:
    """The small study with the embedded model's rounded weights, in a folder beside the study file."""
    folder.mkdir(exist_ok=True)
    copytree(EMBEDDED_FOLDERS["kvdrift/tiny-int4"], folder / "int4", dirs_exist_ok=True)
    return write_study(folder, *ACTIONS, *changes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two temperatures, evaluated at both, with the page of the second and its figure of bytes."""
    folder, local = tmp_path_factory.mktemp("weights"), LocalGenerator()
    studies = load_studies(study_in(folder, *SMALLER))
    runs = [StudyRun(study, str(folder / "store"), storing(local)) for study in studies]
    for run in runs:
        stages.prepare(run)
    stages.develop(*runs)
    stages.derive(runs[0])
    for run in runs:
        stages.plan(run)
    stages.evaluate(*runs)
    stages.derive(runs[0])
    stages.analyze(runs[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvdrift.report.page.draw_figures", draw_bytes)
        stages.report(runs[1])
    return folder


def test_a_pair_may_part_at_the_first_token_and_controls_are_zero(measured: Path) -> None:
    with kvdrift.open(measured / "store") as views:
        first = views.sql(
            "select study, action, min(delta), max(abs(delta - f)) from events where t = 1 group by all order by all"
        ).fetchall()
        diverged = views.sql("select count(*) from trajectories where tau = 1 and action = 'recent-half'").fetchall()
        moved = views.sql("select sum(pairs), sum(moved_pairs) from controls").fetchall()
    assert all(apart == 0 for *_, apart in first)
    assert all(low > 0 for study, action, low, _ in first if study.endswith("t1") and action != "full")
    assert all(low == 0 for _, action, low, _ in first if action == "full")
    assert diverged[0][0] > 0
    assert moved[0][0] > 0
    assert moved[0][1] == 0
    assert not [check for check in verify(Store.open(measured / "store")) if check.faults]


def test_bytes_of_weights_stand_beside_those_of_the_cache(measured: Path) -> None:
    with kvdrift.open(measured / "store") as views:
        rows = views.sql(
            "select distinct action, weight_bytes, cache_share from frontier where stratum = 'pooled' order by action"
        ).fetchall()
        actions = dict(views.sql("select distinct action, weights from actions").fetchall())
    sizes = {name: (folder / "model.safetensors").stat().st_size for name, folder in EMBEDDED_FOLDERS.items()}
    own = ("coded", "recent-half", "sliding", "snapkv-half")
    assert {(action, size) for action, size, _ in rows} == {
        ("full", sizes["kvdrift/tiny"]), *((action, sizes["kvdrift/tiny-int4"]) for action in own)
    }  # fmt: skip
    shares = {action: share for action, _, share in rows}
    assert shares["full"] == shares["recent-half"] == 1.0
    assert 0.5 < shares["snapkv-half"] < 0.52  # with its index
    assert 0.49 < shares["coded"] < 0.53  # a quarter of all but the last 128 entries, with scales
    assert 0.48 < shares["sliding"] < 0.52
    assert actions == {"full": None} | dict.fromkeys(own, "int4")


def test_the_page_says_whose_weights_and_nothing_untrue(measured: Path) -> None:
    (page,) = (measured / "store" / "report").glob("small-t*/index.html")
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style|svg)[\s\S]*?</\1>", "", page.read_text("utf-8")))
    for word in ("compressed model", "prompt is prefilled once", "The line joins"):
        assert word not in text, word
    for words in ("weights int4, then snapkv, half of the entries", "The first token is drawn from two distributions",
                  "100% of the reference", "the full cache, as a control"):  # fmt: skip
        assert words in text, words


@pytest.mark.slow
def test_changed_weights_are_refused_until_they_are_redone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_in(tmp_path / "study", ("draws = 200", "draws = 14_000"))  # with fewer a run says so in a line
    store = tmp_path / "store"
    run_file(load_studies(study), store, None, SILENT, 1)
    copytree(EMBEDDED_FOLDERS["kvdrift/tiny-int8"], study.parent / "int4", dirs_exist_ok=True)
    line = mistake(capsys, "run", study, "--store", store)
    assert "weights 'int4'" in line
    assert "--redo" in line
    names = ("recent-half", "snapkv-half", "coded", "sliding")
    redone = (option for name in names for option in ("--redo", name))
    code, out, _ = call(capsys, "run", study, "--store", store, "--dry-run", *redone)
    assert code == 0, out


def test_a_dry_run_counts_models_as_they_are_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their places, whatever an action writes for them; also the reference's. The lines have the folders' names."""
    path = study_in(tmp_path, ('id = "kvdrift/tiny"', 'id = "tiny"'), ("horizon = 12", "horizon = 6"))
    copytree(EMBEDDED_FOLDERS["kvdrift/tiny"], path.parent / "tiny")
    text = path.read_text()
    for written in ("./int4/", path.parent / "int4", "./tiny"):
        text = text.replace('weights = "int4"', f'weights = "{written}"', 1)
    path.write_text(text)
    loaded = load_transformer(load_studies(path)[0])
    assert isinstance(loaded, ModelWithOthers)
    assert len(loaded.models) == 2
    code, out, err = call(capsys, "run", path, "--store", tmp_path / "store", "--dry-run")
    assert code == 0, err
    assert "action recent-half: weights int4: 392 to 396 prompt entries, 0.6 MiB of prompt cache" in out
    assert "memory of generation: 3.6 MiB of weights of 2 models and " in out


def test_a_folder_has_no_revisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_in(tmp_path, ('id = "kvdrift/tiny"', 'id = "./int4"\nrevision = "nonsense"'))
    line = mistake(capsys, "run", study, "--store", tmp_path / "store", "--dry-run")
    assert "model.revision = 'nonsense': " in line
    assert "'./int4'" in line


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('weights = "int4"', 'weights = "gone"'), "action 'sliding': weights = 'gone': "),
        (('weights = "int4"', 'weights = "int4"\nurl = "http://a"'), "actions[3].url: "),
    ],
)
def test_what_cannot_be_is_refused_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], line: str
) -> None:
    study = study_in(tmp_path)
    text = study.read_text()
    place = text.rindex(change[0])
    study.write_text(text[:place] + text[place:].replace(*change))
    assert line in mistake(capsys, "run", study, "--store", tmp_path / "store", "--dry-run")


def test_a_selector_needs_what_the_layers_of_its_own_weights_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A selector that does not know the soft cap of Gemma 2: the cap of the action's weights matters, not the reference's."""
    save_for_study(tmp_path / "capped", "gemma2")
    (tmp_path / "mine.py").write_text(LOOKING)
    selector, own = ACTIONS[1][0], ACTIONS[1][1].replace("snapkv", "mine:Looking")
    capped = write_study(tmp_path, (selector, own.replace("int4", "./capped")))
    line = mistake(capsys, "run", capped, "--store", tmp_path / "store", "--dry-run")
    assert "action 'snapkv-half': selector mine:Looking: " in line
    rounded = own.replace("int4", "kvdrift/tiny-int4")
    reference = write_study(tmp_path, ("kvdrift/tiny", "./capped"), (selector, rounded))
    (unchecked,) = check_study(run_of(load_study(reference), tmp_path / "store"))
    assert unchecked.startswith("the model; ")


def test_a_service_has_one_models_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("run", study_in(tmp_path), "--store", tmp_path / "store", "--endpoint", "grpc://127.0.0.1:1")
    line = mistake(capsys, *given)
    assert line.startswith("kvdrift: action 'snapkv-half': ")
    assert line.endswith("--endpoint\n")

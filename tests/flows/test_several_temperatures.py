"""A study of several temperatures: the events of studies of one temperature each, from one prefill of each document."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.command import call, mistake
from fixtures.finite_study import write_finite_study
from fixtures.heard import Heard
from fixtures.processes import Command
from fixtures.report_views import check
from fixtures.small_study import write_study
from fixtures.stored_rows import OF_THE_RUN
from fixtures.study_files import load_study

from kvdrift.flows.cluster.address import default_location
from kvdrift.flows.generate.local import LocalGenerator, named, with_actions
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.plan.frozen_plan import require_plan
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun, of_all_laws, pending_development
from kvdrift.generator.transformer.prompts.document import PreparedPrompt
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.study import Study, load_studies
from kvdrift.sql.catalog import open_views

SEVERAL = ("seed = 3", "seed = 3\ntemperature = [0.0, 0.7]\ntop_p = 0.9")
SMALL = [
    ("replicates = 5", "replicates_between = [2, 4]"),
    ("development_replicates = 4", "development_replicates = 3"),
    ("horizon = 12", "horizon = 8"),
]
BOTH = ("[plan]", '[plan]\nestimator = "swrb"')


def runs_of(studies: Sequence[Study], location: Path, limit: int | None = None) -> list[StudyRun]:
    local, shared = LocalGenerator(), DocumentLimit(limit)
    return [StudyRun(study, str(location), storing(local), limit=shared) for study in studies]


def develop(runs: Sequence[StudyRun]) -> None:
    for run in runs:
        stages.prepare(run)
    stages.develop(*runs)


def evaluate(runs: Sequence[StudyRun]) -> None:
    """Do the work of a run until the events of a file's studies are stored."""
    develop(runs)
    stages.derive(runs[0])
    for run in runs:
        stages.plan(run)
    stages.evaluate(*runs)


def made(location: Path, study: str, table: str) -> pa.Table:
    """Return a study's rows in order, without measured values."""
    found = Store.open(location).read(table)
    found = found.filter(pc.equal(found["study"], study))
    found = found.drop_columns([name for name in found.column_names if name in OF_THE_RUN])
    keys = [name for name in found.column_names if not pa.types.is_nested(found[name].type)]
    return found.sort_by([(name, "ascending") for name in keys])


def test_a_list_is_a_study_of_each_temperature(tmp_path: Path) -> None:
    listed = ("seed = 3", "seed = 3\ntemperature = [0, 0.7, 1.0]\ntop_p = 0.9\ntop_k = 20")
    studies = load_studies(write_study(tmp_path, listed))
    assert [study.name for study in studies] == ["small-t0", "small-t0.7", "small-t1"]
    assert [study.sampling for study in studies] == [
        Sampling(0.0), Sampling(0.7, 0.9, 20), Sampling(1.0, 0.9, 20)
    ]  # fmt: skip
    assert {study.name_in_file for study in studies} == {"small"}
    assert default_location(studies) == "stores/small"
    alone = load_study(write_study(tmp_path, ('"small"', '"small-t0.7"'), ("seed = 3", _alone("0.7"))))
    assert alone.settings == studies[1].settings
    models = ('[model]\nid = "kvdrift/tiny"', '[[model]]\nid = "one"\n\n[[model]]\nid = "other"')
    both = load_studies(write_study(tmp_path, SEVERAL, models))
    assert [(study.model.id, study.name) for study in both] == [
        (model, name) for model in ("one", "other") for name in ("small-t0", "small-t0.7")
    ]


def _alone(temperature: str) -> str:
    return f"seed = 3\ntemperature = {temperature}\ntop_p = 0.9\ntop_k = 20"


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("[]", r"study.temperature = \[\]: .*"),
        ("[1, 0.7, 1.0]", "study.temperature: 1 is given 2 times.*"),
        ('[1.0, "warm"]', "study.temperature = 'warm': should be a valid number"),
        ("[0.7, true]", "study.temperature = True: should be a valid number"),
        ("[[1.0]]", r"study.temperature = \[1.0\]: should be a valid number"),
    ],
)
def test_what_is_no_list_of_temperatures_is_refused(tmp_path: Path, written: str, line: str) -> None:
    with pytest.raises(InputError, match=f"{line}$"):
        load_studies(write_study(tmp_path, ("seed = 3", f"seed = 3\ntemperature = {written}")))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The store of both temperatures with both estimators, and how many prompts were prefilled."""
    folder, prefilled = tmp_path_factory.mktemp("together"), []
    init = PreparedPrompt.__init__

    def counting(self: PreparedPrompt, *given: object) -> None:
        prefilled.append(given[1])
        init(self, *given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedPrompt, "__init__", counting)
        evaluate(runs_of(load_studies(write_study(folder, SEVERAL, BOTH, *SMALL)), folder / "store"))
    return folder / "store", len(prefilled)


@pytest.mark.slow
def test_events_are_those_of_a_study_of_one_temperature(together: tuple[Path, int], tmp_path: Path) -> None:
    """Bit for bit, under plans of their own: a greedy law takes one replicate."""
    location, prefilled = together
    assert prefilled == 4 + 2 * 3, "each document once, for both laws"
    replicates = []
    for name, law in (("small-t0", "temperature = 0.0"), ("small-t0.7", "temperature = 0.7\ntop_p = 0.9")):
        folder = tmp_path / name
        folder.mkdir()
        one = ("seed = 3", f"seed = 3\n{law}")
        (run,) = runs_of([load_study(write_study(folder, ('"small"', f'"{name}"'), one, BOTH, *SMALL))], folder / "s")
        evaluate([run])
        for table in ("events", "units", "studies", "documents", "actions", "identities"):
            assert made(location, name, table).equals(made(folder / "s", name, table)), table
        replicates.append(require_plan(Store.open(location), run.study).replicates)
    assert replicates == [1, 4]


@pytest.mark.slow
def test_laws_share_the_seconds_of_prefill_and_have_their_own_of_decoding(together: tuple[Path, int]) -> None:
    """Both laws' units of a document and action carry the same share, so that all units have the whole time once."""
    units = Store.open(together[0]).units().to_pylist()
    of_one: dict[tuple[str, str], dict[str, list[float]]] = {}
    for unit in units:
        of_one.setdefault((unit["doc"], unit["action"]), {}).setdefault(unit["study"], []).append(
            unit["prefill_seconds"]
        )
    for laws in of_one.values():
        assert len({seconds for own in laws.values() for seconds in own}) == 1
    assert all(unit["decode_seconds"] > 0 for unit in units)


@pytest.mark.slow
def test_plans_are_made_before_any_law_is_evaluated(together: tuple[Path, int], tmp_path: Path) -> None:
    """No plan has then seen the documents of another plan; the plan of a temperature that is added later has."""
    store = Store.open(together[0])
    studies = load_studies(write_study(tmp_path, SEVERAL, BOTH, *SMALL))
    assert [require_plan(store, study).seen for study in studies] == [False, False]


@pytest.mark.slow
def test_a_limit_counts_a_document_of_all_laws_once(tmp_path: Path, together: tuple[Path, int]) -> None:
    """A study stopped at the limit, or killed between two documents, goes on to the same events."""
    studies = load_studies(write_study(tmp_path, SEVERAL, BOTH, *SMALL))
    limited = runs_of(studies, tmp_path / "store", 1)
    for run in limited:
        stages.prepare(run)
    assert stages.develop(*limited) == 2 * (2 * 2 + 1)  # laws by units: two actions under two estimators, the control
    assert limited[0].limit.left_over == 3
    evaluate(runs_of(studies, tmp_path / "store"))
    for study in studies:
        assert made(tmp_path / "store", study.name, "events").equals(made(together[0], study.name, "events"))


def test_another_process_is_given_the_laws_too(tmp_path: Path) -> None:
    runs = runs_of(load_studies(write_study(tmp_path, SEVERAL)), tmp_path / "store")
    for run in runs:
        stages.prepare(run)
    work = of_all_laws([(run.study, pending_development(run.store, run.material)) for run in runs])
    assert len(work) == 4
    assert {unit.of.study for _, pending in work for unit in pending if unit.of} == {"small-t0", "small-t0.7"}
    assert [(document, list(units)) for document, units in with_actions(runs[0].study, named(work))] == work


class Stages(Heard):
    """Keeps the names of stages too."""

    def begin(self, stage: str, total: int, unit: str) -> None:  # noqa: ARG002 - what a listener is told
        """Keep the stage's name."""
        self.lines.append(stage)


def test_progress_says_which_temperature_and_model_it_is_of(tmp_path: Path) -> None:
    heard = Stages()
    models = ('[model]\nid = "kvdrift/tiny"', '[[model]]\nid = "one"\n\n[[model]]\nid = "other"')

    def told(*changes: tuple[str, str]) -> list[str]:
        heard.lines.clear()
        for study in load_studies(write_study(tmp_path, *changes)):
            run = StudyRun(study, str(tmp_path), storing(LocalGenerator()), heard)
            run.say("plan")
            run.own_progress.begin("report", 1, "pages")
        return heard.lines

    assert told() == ["plan", "report"]
    assert told(SEVERAL) == ["small-t0: plan", "small-t0: report", "small-t0.7: plan", "small-t0.7: report"]
    assert told(models) == ["one: plan", "one: report", "other: plan", "other: report"]
    assert told(SEVERAL, models)[2:5] == [
        "small-t0.7 on one: plan",
        "small-t0.7 on one: report",
        "small-t0 on other: plan",
    ]


@pytest.mark.slow
def test_generation_says_which_temperatures_it_is_of(tmp_path: Path) -> None:
    """Studies may lack units of all laws, some, or one; missing units of several laws are generated together."""
    heard, three = Stages(), ("seed = 3", "seed = 3\ntemperature = [0.0, 0.5, 0.7]")
    small = [("horizon = 12", "horizon = 2"), ("development_replicates = 4", "development_replicates = 2")]
    studies = load_studies(write_study(tmp_path, three, *small))
    for some in (studies[:1], studies[:1], studies):
        runs = [replace(run, progress=heard) for run in runs_of(some, tmp_path / "store")]
        develop(runs)
    assert heard.lines == ["small-t0: development documents", "small-t0.5, small-t0.7: development documents"]
    heard.lines.clear()
    develop([replace(run, progress=heard) for run in runs_of(studies, tmp_path / "other")])
    assert heard.lines == ["all temperatures: development documents"]


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A study of systems at three temperatures, run to its pages by the command: the study file and the store."""
    folder = tmp_path_factory.mktemp("systems")
    several = ("seed = 24", "seed = 24\ntemperature = [1.0, 0.0, 0.5]")
    file = write_finite_study(folder, several)
    command = Command("run", file, "--store", folder / "store")
    code, _, err = command.end()
    assert code == 0, err
    return file, folder / "store"


@pytest.mark.slow
def test_a_run_ends_with_a_page_of_each_law_and_one_of_all(
    systems: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is finished then; a lost page is written again."""
    file, store = systems
    code, out, _ = call(capsys, "run", file, "--store", store)
    assert code == 0
    assert out.startswith("study 'finite' is finished: nothing to do\n")
    pages = [
        store / "report" / name / "index.html"
        for name in ("finite-t1", "finite-t0", "finite-t0.5", "finite-temperatures")
    ]
    assert out.splitlines()[2:] == [f"report: {page}" for page in pages]
    html = [page.read_text(encoding="utf-8") for page in pages]
    own = [link for link in check(html[-1]).links if link.endswith(".html")]
    assert {(pages[-1].parent / link).resolve() for link in own} == set(pages[:-1])
    assert all('<a href="../finite-temperatures/index.html">' in one for one in html[:-1])
    again = store / "again"
    assert call(capsys, "report", store, "--side-by-side", "-o", again)[:2] == (0, f"report: {again / 'index.html'}\n")
    assert (again / "index.html").read_text() == html[-1].replace('href="../finite', 'href="../report/finite')
    assert call(capsys, "report", store)[0] == 0
    assert [page.read_text(encoding="utf-8") for page in pages] == html
    with (again / "tables" / "by_temperature_1.csv").open() as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    with open_views(Store.open(store)) as views:
        stored = views.rows("decomposition", split="evaluation", stratum="pooled").to_pylist()
    known = {(row["study"], row["action"]): row for row in stored}
    assert [row["temperature"] for row in rows if row["quantity"] == "mismatch"] == ["0.0", "0.5", "1.0"]
    for row in rows:
        value = known[row["study"], row["action"]][row["quantity"]]
        assert row["estimate"] == "" if value is None else float(row["estimate"]) == pytest.approx(value)


@pytest.mark.slow
def test_commands_name_the_law(systems: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file, store = systems
    _, out, _ = call(capsys, "status", store)
    assert [line for line in out.splitlines() if line.startswith("study ")] == [
        f"study {name}, model binary:" for name in ("finite-t0", "finite-t0.5", "finite-t1")
    ]
    _, out, _ = call(capsys, "run", file, "--store", store, "--dry-run")
    assert [line.partition("; ")[0] for line in out.splitlines() if line.startswith("study ")] == [
        "study 'finite-t1' on binary, H = 4",
        "study 'finite-t0' on binary, H = 4, greedy",
        "study 'finite-t0.5' on binary, H = 4, temperature 0.5, full softmax",
    ]
    _, out, _ = call(capsys, "run", file, "--store", store, "--plan-only")
    plans = [f"plan of study '{name}', model binary" for name in ("finite-t1", "finite-t0", "finite-t0.5")]
    assert [line for line in out.splitlines() if line.startswith("plan of")] == plans
    line = mistake(capsys, "show", store, "system-1", "mixture")
    assert "--study is missing, must be one of finite-t0, finite-t0.5, finite-t1" in line
    _, out, _ = call(capsys, "show", store, "system-1", "mixture", "--study", "finite-t0.5")
    assert out.startswith("finite-t0.5, binary: system-1")


@pytest.mark.slow
def test_a_temperature_that_is_added_is_generated_alone_and_planned_as_seen(
    systems: tuple[Path, Path], tmp_path: Path
) -> None:
    file, store = systems
    copied = shutil.copytree(store, tmp_path / "store")
    more = tmp_path / "finite.toml"
    more.write_text(file.read_text().replace("[1.0, 0.0, 0.5]", "[1.0, 0.0, 0.5, 2.0]"))
    studies = load_studies(more)
    runs = runs_of(studies, copied)
    evaluate(runs)
    assert made(copied, "finite-t2", "events").num_rows == made(store, "finite-t1", "events").num_rows
    for name in ("finite-t1", "finite-t0", "finite-t0.5"):
        assert made(copied, name, "events").equals(made(store, name, "events"))
    assert [require_plan(Store.open(copied), study).seen for study in studies] == [False, False, False, True]

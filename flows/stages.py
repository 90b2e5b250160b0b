"""The stages of a study as plain functions of (study, store location): each does what is left of it, once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from flows.analysis.calibration import calibrate_study
from flows.analysis.estimation import Analysis, Runner, analyzed_splits, estimate_study, in_sequence, replicate_moments
from flows.checks import check_controls, check_equal_bytes
from flows.generation import generate_development, generate_evaluation, pending_development, pending_evaluation
from flows.material import Material, gather_material, record_material
from flows.plan import check_plan_agrees, find_plan, freeze_plan, make_plan
from generator.finite.model import finite_model
from generator.finite.study_systems import exact_value_rows
from generator.transformer.configuration import position_limit
from generator.transformer.decoder import check_positions
from generator.transformer.loading import check_model
from generator.transformer.tokenizer import token_reader
from report.page import build_report
from report.reading.source import Provenance
from schema.document import SPLITS
from schema.errors import InputError
from schema.location import is_local
from schema.progress import progress
from schema.store.store import Store
from schema.study import FINITE_STATE, POOLED, Study
from sql.catalog import MOMENT_VIEWS, Views, open_views, refresh_catalog
from transforms.pipeline import run_derivation

_REPORT_INPUTS = "inputs.json"


@lru_cache(maxsize=4)
def _material(study_json: str, several_models: bool) -> Material:  # noqa: FBT001 - the cache's key
    study = Study.model_validate_json(study_json)
    return gather_material(study.as_one_of_several() if several_models else study)


def material_of(study: Study) -> Material:
    """The study's documents and actions, made once per process."""
    return _material(study.model_dump_json(exclude_unset=True), study.several_models)


def check_before_writing(study: Study, *, served: bool = False) -> None:
    """InputError for whatever in the study file, or of the model that it names, cannot be done.

    Of a model that is ``served`` elsewhere it does not matter which devices are here.
    """
    model = study.model
    if model.kind == FINITE_STATE:
        for system in finite_model(study).systems.values():
            exact_value_rows(study.name, model.id, system)  # refuses what is too large to enumerate
        return
    device, device_map = ("cpu", None) if served else (model.device, model.device_map)
    check_model(model.id, dtype=model.dtype, revision=model.revision, device=device, device_map=device_map)
    limit = position_limit(model.id, revision=model.revision)
    for split in SPLITS:
        for document in material_of(study).of_split(split):
            check_positions(document.doc, document.prompt_tokens, study.study.horizon, limit)


def prepare(study: Study, location: str) -> None:
    """Write documents, actions and parameters; PlanError where the study file no longer fits its frozen plan."""
    store = Store.create(location)
    plan = find_plan(store, study.name, study.model.id)
    if plan is not None:
        check_plan_agrees(plan, study)
    record_material(store, material_of(study), None if plan is None else plan.actions)


def develop(study: Study, location: str) -> int:
    """Generate what the development documents still lack; returns new units."""
    return generate_development(Store.open(location), material_of(study))


def derive(location: str) -> int:
    """Derive trajectories and steps of whatever is not derived yet; returns segments, and refreshes the catalogue."""
    store = Store.open(location)
    done = run_derivation(location).segments
    if done:
        progress().say(f"derived {done} new segments")
        refresh_catalog(store)
    return done


def plan(study: Study, location: str) -> str:
    """Freeze the plan from development documents unless it is frozen; returns its hash."""
    store = Store.open(location)
    frozen = find_plan(store, study.name, study.model.id)
    if frozen is None:
        material = material_of(study)
        names = {document.doc for document in material.of_split("development")}
        version = store.version("events")
        units = store.units(study.name, study.model.id)
        units = units.filter(pc.is_in(units["doc"], value_set=pa.array(sorted(names))))
        with open_views(store) as views:
            development = replicate_moments(views, study.name, study.model.id, "development")
            efficiency = branching_efficiency(views, study.name, study.model.id, "development")
        frozen = freeze_plan(store, material, make_plan(material, development, units, efficiency), version)
        progress().say(
            f"plan {frozen.sha256[:12]} frozen: K = {frozen.replicates} replicates, "
            f"N = {frozen.content['documents_per_stratum']} documents per stratum; {frozen.content['reason']}"
        )
    return frozen.sha256


def branching_efficiency(views: Views, study: str, model: str, split: str) -> dict[str, float | None]:
    """Efficiency in seconds of residual branching against plain coupling by action, pooled; None where undefined."""
    rows = views.rows("swrb_efficiency", study=study, model=model, split=split, stratum=POOLED)
    return dict(zip(rows["action"].to_pylist(), rows["efficiency_in_seconds"].to_pylist(), strict=True))


def evaluate(study: Study, location: str) -> int:
    """Generate what the plan asks of the evaluation documents; returns new units. PlanError without a plan."""
    return generate_evaluation(Store.open(location), material_of(study))


def check(study: Study, location: str) -> None:
    """Controls exactly 0 and equal bytes at equal retention, or the study fails saying so."""
    store = Store.open(location)
    controls = check_controls(store, material_of(study))
    pairs = check_equal_bytes(store, material_of(study))
    progress().say(f"{controls} full-retention controls exactly 0; {pairs} pairs of equal retention hold equal bytes")


def analyze(study: Study, location: str, run: Runner = in_sequence) -> int:
    """Bootstrap the evaluation documents unless that is done for this events version; returns estimates."""
    return analyze_stored(Store.open(location), study.name, study.model.id, run)


def analyze_stored(store: Store, study: str, model: str, run: Runner = in_sequence) -> int:
    """The same for a stored study: as its frozen plan says, or, without a plan, every split as exploratory.

    ``run`` estimates the parts of an analysis. InputError where events are not derived, or there is nothing to
    estimate.
    """
    version = store.version("events")
    if estimated_version(store, study, model) == version:
        return 0
    if pending := store.pending_segments(version):
        raise InputError(f"{len(pending)} segments of events are not derived: kvdrift derive {store.location}")
    frozen = find_plan(store, study, model)
    with open_views(store, kept=MOMENT_VIEWS) as views:
        splits = analyzed_splits(views, study, model)
        if frozen is not None:
            analyses = [Analysis.planned(frozen)]
        else:
            analyses = [Analysis.exploratory(views, study, model, split) for split in splits]
        if not analyses or any(analysis.split not in splits for analysis in analyses):
            what = "evaluation" if frozen is not None else "measured"
            raise InputError(f"study '{study}', model '{model}': no complete {what} trajectories, nothing to estimate")
        progress().begin("bootstrap", len(analyses), "analyses")
        # Before the estimates, which say that this version is done: a kill in between then leaves both to do.
        count = calibrate_study(store, views, frozen, version) if frozen is not None else 0
        for analysis in analyses:
            count += estimate_study(store, views, analysis, version, run)
            progress().advance(1)
    refresh_catalog(store)
    return count


def estimated_version(store: Store, study: str, model: str) -> int | None:
    """The newest events version that the study's results were estimated from; None where there are none."""
    results = store.read("results", columns=["study", "model", "events_version"])
    own = results.filter(pc.and_(pc.equal(results["study"], study), pc.equal(results["model"], model)))
    newest = pc.max(own["events_version"]).as_py()
    return None if newest is None else int(newest)


def report(study: Study, location: str) -> Path:
    """Write the report unless it is there for these tables; returns its path."""
    store = Store.open(location)
    folder = report_folder_of(study, store)
    page = folder / "index.html"
    if not report_is_current(store, folder):
        finite = study.model.kind == FINITE_STATE
        text = None if finite else token_reader(study.model.id, revision=study.model.revision)
        write_report(store, study.name, study.model.id, folder, token_text=text)
    return page


def write_report(
    store: Store,
    study: str,
    model: str,
    folder: Path,
    *,
    token_text: Callable[[int], str] | None = None,
    latex: bool = False,
) -> Path:
    """Write the report of a stored study into ``folder``, with ``latex`` its tables as .tex too; returns its page."""
    progress().begin("report", 1, "pages")
    inputs = _report_inputs(store)
    with open_views(store, kept=MOMENT_VIEWS) as views:
        page = build_report(
            views, study, model, folder,
            token_text=token_text,
            latex=latex,
            provenance=Provenance(store=Path(store.location).name, tables=views.versions),
        )  # fmt: skip
    (folder / _REPORT_INPUTS).write_text(json.dumps(inputs), encoding="utf-8")
    progress().advance(1)
    return page


def report_folder(store: Store, study: str, model: str | None = None) -> Path:
    """Where a study's report goes unless asked otherwise: in the store, if that is a folder.

    A study of several models has a report of each: then ``model`` says whose.
    """
    base = Path(store.location) / "report" if is_local(store.location) else Path("report")
    return base / study if model is None else base / study / model_folder(model)


def model_folder(model: str) -> str:
    """A model's id as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")


def report_folder_of(study: Study, store: Store) -> Path:
    """Where the report of a study file's study goes."""
    return report_folder(store, study.name, study.model.id if study.several_models else None)


def report_is_current(store: Store, folder: Path) -> bool:
    """Whether the folder's report was made from the store's present tables."""
    try:
        made_from = json.loads((folder / _REPORT_INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (folder / "index.html").is_file() and made_from == _report_inputs(store)


def is_finished(study: Study, location: str) -> bool:
    """Whether nothing of the study is left to do: units, derivation, estimates and report are all there."""
    try:
        store = Store.open(location)
    except InputError:
        return False
    if find_plan(store, study.name, study.model.id) is None:
        return False
    material = material_of(study)
    return (
        not pending_development(store, material)
        and not pending_evaluation(store, material)
        and not store.pending_segments(store.version("events"))
        and estimated_version(store, study.name, study.model.id) == store.version("events")
        and report_is_current(store, report_folder_of(study, store))
    )


def _report_inputs(store: Store) -> dict[str, int]:
    tables = ("events", "trajectories", "branchings", "exact_values", "results", "calibration", "plans", "actions")
    return {table: store.version(table) for table in tables}

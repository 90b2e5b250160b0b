"""Checks of a study before anything is written, and of its log before anything is concluded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from kvdrift.flows.material import Material
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.actions import Action
from kvdrift.generator.attention.parts import LayerTraits
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.finite.model import finite_model
from kvdrift.generator.finite.study_systems import exact_value_rows
from kvdrift.generator.generation.units import library_versions
from kvdrift.generator.transformer.files.fingerprints import model_identity
from kvdrift.generator.transformer.files.local_folders import (
    has_local_weights,
    local_configuration,
    local_folder,
    model_location,
)
from kvdrift.generator.transformer.model_checks import check_layers, check_model, check_placement, known_traits
from kvdrift.generator.transformer.other_weights.named import check_shared, told_of, weights_location, with_own_weights
from kvdrift.log.store import Store
from kvdrift.schema.errors import ControlError, InputError, OperationError
from kvdrift.schema.study import CONTROL_ACTION, FINITE_STATE, FLOOR_ACTION, KERNEL_FLOOR_ACTION, Study
from kvdrift.schema.tables import PLAIN
from kvdrift.sql.catalog import open_views
from kvdrift.stats.quantities import ANSWER_QUANTITIES

_SIZES = ("payload_bytes", "scale_bytes", "index_bytes", "metadata_bytes", "resident_bytes")
_ABSENT = "; not on this machine"
NO_KERNEL_FLOOR = f"no {KERNEL_FLOOR_ACTION}, so what rounding alone does is unknown"


def check_study(run: StudyRun, *, served: bool = False) -> list[str]:
    """Check a study file, and the model that it names, before anything is written.

    If it is ``served``, another process generates, and this machine's devices do not matter. The lines that are
    returned tell which checks could not be made, and why.
    """
    model, unchecked = run.study.model, []
    if model.kind == FINITE_STATE:
        for system in finite_model(run.study).systems.values():
            exact_value_rows(run.study.name, model.id, system)  # refuses systems too large to enumerate
    elif model.engine is not None:
        engine_model(run.study)  # refuses unusable settings and weights
    else:
        device, device_map = ("cpu", None) if served else (model.device, model.device_map)
        check_placement(model.dtype, device, device_map)
        location = model_location(model)
        named = local_folder(location) is None and not location.startswith(("/", "~"))
        if run.offline and named and local_configuration(location, model.revision) is None:
            unchecked.append(f"configuration and weights of the model, taken for '{location}' of Hugging Face{_ABSENT}")
        elif not _has_made_units(run) and not check_model(
            location, dtype=model.dtype, revision=model.revision, device=device, device_map=device_map
        ):
            here = has_local_weights(location, model.revision)
            unchecked.append("the model; it is proven when it is loaded" if here else f"weights of the model{_ABSENT}")
        unchecked += _check_other_weights(run, device, device_map)
        traits = known_traits(location, dtype=model.dtype, revision=model.revision, device=device)
        own = {action.name for action in with_own_weights(run.study)}
        _check_selectors(run.material, traits, [one for one in run.material.actions if one.name not in own])
    _check_plannable(run.material)
    if run.material.nominal:  # making the material refuses everything else
        unchecked.append(f"prompts, which need the model's tokenizer{_ABSENT}")
    return unchecked


def _check_other_weights(run: StudyRun, device: str, device_map: str | None) -> Iterator[str]:
    """Check the weights of actions with their own weights; yield a line on each check that could not be made."""
    study, dtype = run.study, run.study.model.dtype
    for action in with_own_weights(study):
        location, named = weights_location(study, action), f"weights of action '{action.name}'"
        if run.offline and local_folder(location) is None and local_configuration(location) is None:
            yield f"{named}, taken for '{location}' of Hugging Face{_ABSENT}"
            continue
        with told_of(action, location):
            whole = check_model(location, dtype=dtype, revision=None, device=device, device_map=device_map)
        if not whole:
            yield f"{named}; they are proven when they are loaded" if has_local_weights(location) else named + _ABSENT
        traits = known_traits(location, dtype=dtype, revision=None, device=device)
        _check_selectors(run.material, traits, [one for one in run.material.actions if one.name == action.name])
    check_shared(study, fetch=not run.offline)


def _check_selectors(material: Material, traits: LayerTraits, actions: Sequence[Action]) -> None:
    """Refuse actions whose selectors need something of the model's layers that these are known to lack."""
    longest = max(document.prompt_tokens for document in material.every_document)
    for action in actions:
        if action.removes(longest, material.study.study.horizon):
            check_layers(action, traits)


def _check_plannable(material: Material) -> None:
    """Refuse development documents from which no plan can be made."""
    for stratum, documents in material.documents["development"].items():
        if len({document.cluster for document in documents}) == 1:
            raise InputError(
                f"documents '{stratum}': all {len(documents)} development documents are of cluster "
                f"'{documents[0].cluster}', and a plan needs two clusters; ask for more documents"
            )
    asked = [name for name in material.study.plan.primary if name in ANSWER_QUANTITIES]
    if asked and not material.nominal and not any(one.answers for one in material.of_split("development")):
        raise InputError(
            f"plan.primary: '{asked[0]}' is of documents with answers, and no development document has any"
        )


def _has_made_units(run: StudyRun) -> bool:
    """Tell whether stored units were made from the model's present files, by the installed libraries.

    If so, the model needs no further check. A model outside a folder may have changed at its source.
    """
    model, found = run.study.model, run.stored
    location = model_location(model)
    if found is None or not (run.offline or local_folder(location) is not None):
        return False
    weights = model_identity(location, model.revision).weights_sha256
    if weights is None:
        return False
    units = found.units(run.study.name, model.id)
    made = units.filter(pc.equal(units["weights_sha256"], weights))["versions"].drop_null().unique().to_pylist()
    installed = library_versions().items()  # on any GPU
    return any(installed <= json.loads(versions).items() for versions in made)


def check_controls(store: Store, material: Material) -> int:
    """Check that every full-retention control has delta = f = 0 exactly, in its derived rows.

    Returns:
        The number of controls, counted in pairs of continuations.
    """
    own = {"study": material.study.name, "model": material.model_id, "action": CONTROL_ACTION}
    with open_views(store) as views:
        controls = views.rows("controls", **own).to_pylist()
        generated = pc.sum(views.rows("units", **own, estimator=PLAIN)["replicates"]).as_py() or 0
        for row in controls:
            if row["moved_pairs"]:
                pair = {**own, "doc": row["first_moved_doc"], "replicate": row["first_moved_replicate"]}
                raise ControlError(_moved_line(pair, views.rows("steps", **pair).to_pylist()))
    derived: int = sum(row["pairs"] for row in controls)
    if derived < generated:
        raise InputError(
            f"{generated - derived} controls of study '{material.study.name}' are not derived: kvdrift derive "
            f"{store.location}"
        )
    return derived


def _moved_line(pair: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """Return the error line of a control that moved, with its first deviation."""
    first = next(step for step in steps if step["delta"] or step["f"] or step["mismatch"])
    return (
        f"study '{pair['study']}': the full-retention control moved in document '{pair['doc']}', replicate "
        f"{pair['replicate']} (delta {first['delta']:.3g}, f {first['f']:.3g} at position {first['t']}); it must be "
        "exactly 0, so this device and dtype do not compute reference and compressed model alike"
    )


def check_equal_bytes(store: Store, material: Material) -> int:
    """Check that actions which keep equally many entries of a document hold equal bytes (definitions, "Equal bytes").

    Payload, scales, index, metadata and resident bytes are compared, as measured on the tensors. Actions that hold
    entries in another way, such as another dtype or codec, are compared among themselves. A codec's bytes depend on how
    many entries each layer keeps, so its actions are compared only at the same budgets. A policy whose steps may read
    more entries than the prompt has is not compared.

    Returns:
        The number of pairs of actions that were compared.
    """
    units = store.units(material.study.name, material.model_id)
    units = units.filter(pc.and_(pc.equal(units["estimator"], PLAIN), pc.is_valid(units["kept_entries"])))
    columns = [
        "doc",
        "action",
        "first_replicate",
        "replicates",
        "prompt_entries",
        "kept_entries",
        "kept_sha256",
        *_SIZES,
    ]
    actions = {action.name: action for action in material.actions}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for unit in units.select(columns).to_pylist():
        unit["scale_bytes"] = unit["scale_bytes"] or 0  # null if no entry is coded
        action, layers = actions.get(unit["action"]), len(unit["kept_sha256"] or ())
        if unit["kept_entries"] == unit["prompt_entries"] and action is not None and action.policy is not None:
            continue
        held = action and action.decides_bytes(unit["kept_entries"], unit["prompt_entries"], layers)
        groups[unit["doc"], unit["first_replicate"], unit["replicates"], unit["kept_entries"], held].append(unit)
    compared = 0
    for first, *others in groups.values():
        for other in others:
            compared += 1
            for size in _SIZES:
                if first[size] != other[size]:
                    raise OperationError(
                        f"document '{first['doc']}': '{first['action']}' and '{other['action']}' keep "
                        f"{first['kept_entries']} entries each, but {size} differ: {first[size]} and {other[size]}"
                    )
    return compared


def floor_line(store: Store, study: Study) -> str:
    """Return a line about the floors; empty without an engine."""
    if not study.model.has_floor:
        return ""
    with open_views(store) as views:
        named = {"study": study.name, "model": study.model.id}
        rows = views.rows("trajectories", **named, action=FLOOR_ACTION).to_pylist()
        kernel = views.rows("trajectories", **named, action=KERNEL_FLOOR_ACTION).to_pylist()
    moved = [row for row in rows if _moved(row)]
    if moved and engine_model(study).reference.capabilities.row_invariant:
        first = min(moved, key=lambda row: (row["doc"], row["replicate"]))
        raise ControlError(
            f"study '{study.name}': the floor moved in document '{first['doc']}', replicate {first['replicate']} (sum "
            f"of delta {first['sum_delta']:.3g}); {study.model.engine} promises that no stream depends on those beside "
            "it, so that it must be exactly 0"
        )
    other = f"{KERNEL_FLOOR_ACTION}: {_distance(kernel)}" if kernel else NO_KERNEL_FLOOR
    return f"{FLOOR_ACTION}: {_distance(rows)}; {other}"


def _moved(row: Mapping[str, Any]) -> bool:
    return bool(row["sum_delta"] or row["sum_f"] or row["mismatches"])


def _distance(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how far a floor's trajectories are from the reference."""
    if not any(map(_moved, rows)):
        return "exactly 0"
    positions, tokens = sum(row["horizon"] for row in rows), sum(row["mismatches"] for row in rows)
    mean = sum(row["sum_delta"] for row in rows) / positions
    return f"mean delta {mean:.2g}, {tokens} of {positions:,} tokens differ"

"""Checks of a study before anything is written, and of its log before any conclusion; remarks on its settings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from kvdrift.flows.material import Material
from kvdrift.flows.plan.making import primary_endpoints
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.actions import Action, build_actions
from kvdrift.generator.attention.parts import LayerTraits
from kvdrift.generator.documents.answers import task_scoring
from kvdrift.generator.documents.jsonl import left_out
from kvdrift.generator.documents.registry import SOURCES
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.finite.model import finite_model
from kvdrift.generator.finite.study_systems import exact_value_rows
from kvdrift.generator.generation.units import library_versions
from kvdrift.generator.transformer.files.fingerprints import model_identity
from kvdrift.generator.transformer.files.gguf_folders import unknown_split
from kvdrift.generator.transformer.files.local_folders import has_local_weights, local_configuration, local_folder
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.text_ends import absent_ends, text_ends
from kvdrift.generator.transformer.model_checks import (
    check_layers,
    check_model,
    check_placement,
    check_row_tile,
    known_traits,
)
from kvdrift.generator.transformer.other_weights.named import (
    check_shared,
    naming_action,
    weights_location,
    with_own_weights,
)
from kvdrift.log.store import Store
from kvdrift.schema.document import Document
from kvdrift.schema.errors import ControlError, InputError, OperationError
from kvdrift.schema.study import CONTROL_ACTION, FINITE_STATE, FIXED, FLOOR_ACTION, HTTP, KERNEL_FLOOR_ACTION, Study
from kvdrift.schema.tables import PLAIN
from kvdrift.sql.catalog import open_views
from kvdrift.stats.quantities import ANSWER_QUANTITIES

_SIZES = ("payload_bytes", "scale_bytes", "index_bytes", "metadata_bytes", "resident_bytes")
_ABSENT = "; not on this machine"
NO_KERNEL_FLOOR = f"no {KERNEL_FLOOR_ACTION}, so the effect of rounding alone is unknown"


def check_study(run: StudyRun, *, served: bool = False) -> list[str]:
    """Check a study file, and the model that it names, before anything is written.

    If the study is ``served``, another process generates, and this machine's devices do not matter. Return a line on
    each check that could not be made, with the reason.
    """
    model, unchecked = run.study.model, []
    if model.kind == FINITE_STATE:
        for system in finite_model(run.study).systems.values():
            exact_value_rows(run.study.name, model.id, system)  # refuses systems too large to enumerate
    elif model.engine is not None:
        engine_model(run.study)  # refuses unusable settings and weights
    else:
        for action in build_actions(run.study):  # run.material would read the documents first
            check_row_tile(action, model.device, model.device_map)
        device, device_map = ("cpu", None) if served else (model.device, model.device_map)
        check_placement(model.dtype, device, device_map)
        location = model_location(model)
        if model.revision is not None and local_folder(location) is not None:
            raise InputError(
                f"model.revision = '{model.revision}': model.id = '{model.id}' is a folder on this machine, and only "
                "Hugging Face ids have revisions; remove it"
            )
        named = local_folder(location) is None and not location.startswith(("/", "~"))
        if run.offline and named and local_configuration(location, model.revision) is None:
            unchecked.append(f"configuration and weights of the model, taken for '{location}' of Hugging Face{_ABSENT}")
        elif not _has_made_units(run) and not check_model(
            location, dtype=model.dtype, revision=model.revision, device=device, device_map=device_map, served=served
        ):
            here = has_local_weights(location, model.revision)
            unchecked.append("the model; it is proven when it is loaded" if here else f"weights of the model{_ABSENT}")
        unchecked += _check_other_weights(run, device, device_map)
        traits = known_traits(location, dtype=model.dtype, revision=model.revision, device=device)
        names = {action.name for action in with_own_weights(run.study)}
        _check_selectors(run.material, traits, [action for action in run.material.actions if action.name not in names])
    _check_plannable(run.material)
    if run.material.nominal:  # making the material refuses everything else
        unchecked.append(f"prompts, which need the model's tokenizer{_ABSENT}")
    return unchecked


def _check_other_weights(run: StudyRun, device: str, device_map: str | None) -> Iterator[str]:
    """Check the files of actions with other weights; yield a line on each check that could not be made."""
    study, dtype = run.study, run.study.model.dtype
    for action in with_own_weights(study):
        location, named = weights_location(study, action), f"weights of action '{action.name}'"
        if run.offline and local_folder(location) is None and local_configuration(location) is None:
            yield f"{named}, taken for '{location}' of Hugging Face{_ABSENT}"
            continue
        with naming_action(action, location):
            whole = check_model(location, dtype=dtype, revision=None, device=device, device_map=device_map)
        if not whole:
            yield f"{named}; they are proven when they are loaded" if has_local_weights(location) else named + _ABSENT
        traits = known_traits(location, dtype=dtype, revision=None, device=device)
        _check_selectors(run.material, traits, [other for other in run.material.actions if other.name == action.name])
    check_shared(study, fetch=not run.offline)


def _check_selectors(material: Material, traits: LayerTraits, actions: Sequence[Action]) -> None:
    """Refuse actions whose selectors need a property that the model's layers are known to lack."""
    longest = max(document.prompt_tokens for document in material.every_document)
    for action in actions:
        if action.removes(longest, material.study.study.horizon):
            check_layers(action, traits)


def _check_plannable(material: Material) -> None:
    for stratum, documents in material.documents["development"].items():
        if len({document.cluster for document in documents}) == 1:
            raise InputError(
                f"documents '{stratum}': all {len(documents)} development documents are of cluster "
                f"'{documents[0].cluster}', and a plan needs two clusters; take more development documents"
            )
    answer_quantities = [name for name in material.study.plan.primary if name in ANSWER_QUANTITIES]
    if (
        answer_quantities
        and not material.nominal
        and not any(document.answers for document in material.of_split("development"))
    ):
        raise InputError(
            f"plan.primary: '{answer_quantities[0]}' needs documents with answers, but no development document has "
            "answers"
        )


def _has_made_units(run: StudyRun) -> bool:
    """Return whether stored units were made from the model's present files, by the installed libraries.

    If so, the model needs no further check. The result is False for a model that is not in a local folder, unless the
    run is offline, since the model may have changed at its source.
    """
    model, counts = run.study.model, run.stored
    location = model_location(model)
    if counts is None or not (run.offline or local_folder(location) is not None):
        return False
    weights = model_identity(location, model.revision).weights_sha256
    if weights is None:
        return False
    units = counts.units(run.study.name, model.id)
    made = units.filter(pc.equal(units["weights_sha256"], weights))["versions"].drop_null().unique().to_pylist()
    installed = library_versions().items()  # on any GPU
    return any(installed <= json.loads(versions).items() for versions in made)


def check_controls(store: Store, material: Material) -> int:
    """Check that every full-retention control has delta = f = 0 exactly in its derived rows.

    Return the number of checked pairs.
    """
    keys = {"study": material.study.name, "model": material.model_id, "action": CONTROL_ACTION}
    with open_views(store) as views:
        controls = views.rows("controls", **keys).to_pylist()
        generated = pc.sum(views.rows("units", **keys, estimator=PLAIN)["replicates"]).as_py() or 0
        for row in controls:
            if row["moved_pairs"]:
                pair = {**keys, "doc": row["first_moved_doc"], "replicate": row["first_moved_replicate"]}
                raise ControlError(_moved_line(pair, views.rows("steps", **pair).to_pylist()))
    derived: int = sum(row["pairs"] for row in controls)
    if derived < generated:
        raise InputError(
            f"{generated - derived} controls of study '{material.study.name}' are not derived: kvdrift derive "
            f"{store.location}"
        )
    return derived


def _moved_line(pair: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    first = next(step for step in steps if step["delta"] or step["f"] or step["mismatch"])
    return (
        f"study '{pair['study']}': the full-retention control moved in document '{pair['doc']}', replicate "
        f"{pair['replicate']} (delta {first['delta']:.3g}, f {first['f']:.3g} at position {first['t']}); it must be "
        "exactly 0, so this device and dtype do not compute the reference and the compressed model identically"
    )


def check_equal_bytes(store: Store, material: Material) -> int:
    """Check that actions which keep equally many entries of a document hold equal bytes.

    Payload, scales, index, metadata and resident bytes are compared, as measured on the tensors. Only actions that hold
    their entries in the same way, such as in one dtype or codec, are compared. A codec's bytes depend on how many
    entries each layer keeps, so its actions are compared only at the same budgets. A policy whose steps may read more
    entries than the prompt has is not compared. Return the number of compared pairs of actions.
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
        held = action and action.decides_bytes(unit["prompt_entries"], layers)
        groups[unit["doc"], unit["first_replicate"], unit["replicates"], unit["kept_entries"], held].append(unit)
    compared = 0
    for first, *others in groups.values():
        for other in others:
            compared += 1
            for size in _SIZES:
                if first[size] != other[size]:
                    raise OperationError(
                        f"document '{first['doc']}': '{first['action']}' and '{other['action']}' keep "
                        f"{first['kept_entries']} entries each in the same way, so {size} should be equal, but are "
                        f"{first[size]} and {other[size]}; a codec's bytes must follow from shapes and dtype alone"
                    )
    return compared


def floor_line(store: Store, study: Study) -> str:
    """Return a line on the distances of an engine's floor and kernel floor from the reference; empty without an engine.

    Raises:
        ControlError: The floor's distances are not exactly 0, although the engine promises that.
    """
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
            f"of delta {first['sum_delta']:.3g}); {study.model.engine} promises that no stream depends on its "
            "neighbours, so that the floor must be exactly 0"
        )
    other = f"{KERNEL_FLOOR_ACTION}: {_distance(kernel)}" if kernel else NO_KERNEL_FLOOR
    return f"{FLOOR_ACTION}: {_distance(rows)}; {other}"


def _moved(row: Mapping[str, Any]) -> bool:
    return bool(row["sum_delta"] or row["sum_f"] or row["mismatches"])


def _distance(rows: Sequence[Mapping[str, Any]]) -> str:
    if not any(map(_moved, rows)):
        return "exactly 0"
    positions, tokens = sum(row["horizon"] for row in rows), sum(row["mismatches"] for row in rows)
    mean = sum(row["sum_delta"] for row in rows) / positions
    return f"mean delta {mean:.2g}, {tokens} of {positions:,} tokens differ"


_DRAWS_BEYOND = 50
_NAMED = 3  # control tokens in a line


def remarks(runs: Sequence[StudyRun]) -> list[str]:
    """Return a line on each setting of a file's checked studies that may have another effect than the user means."""
    lines = left_out(runs[0].study.documents)
    for run in runs:
        lines += _absent_eos_tokens(run.study)
        lines += _unknown_split(run.material)
        lines += _absent_kernel_floor(run.study)
        lines += _equal_replicates(run.study)
        lines += _few_draws(run.study)
        lines += _unscored_tasks(run.study)
        lines += _control_tokens(run.material)
        lines += _whole_caches(run.material)
        lines += _equal_prompts(run.material)
        lines += _single_clusters(run.material)
    return list(dict.fromkeys(lines))


def _absent_eos_tokens(study: Study) -> Iterator[str]:
    if study.model.kind == FINITE_STATE or study.model.engine is not None or study.study.eos is not None:
        return
    if absent := absent_ends(model_location(study.model), study.model.revision):
        which = f"EOS token{'s' if absent[1:] else ''} {', '.join(map(str, absent))}"
        effect = "nothing ends there" if text_ends(study).tokens else "no continuation ends"
        yield (
            f"model.id = '{study.model.id}': {which} of its configuration {'are' if absent[1:] else 'is'} not in its "
            f"vocabulary (vocab_size), and {effect}"
        )


def _unknown_split(material: Material) -> Iterator[str]:
    """Yield a line if prompts go through a GGUF file's tokenizer that may split texts otherwise than the file says."""
    model = material.study.model
    if model.engine is not None or not model.is_gguf:
        return
    if not any(SOURCES[section.source].reads_text for section in material.study.documents):
        return
    if (pre := unknown_split(Path(model_location(model)))) is not None:
        yield (
            f"model.id = '{model.id}': the file splits texts by the rule '{pre}', which transformers does not read, so "
            "some texts have other tokens than in llama.cpp; model.tokenizer may name a folder or Hugging Face id that "
            "has the model's own tokenizer"
        )


def _absent_kernel_floor(study: Study) -> Iterator[str]:
    if study.model.has_floor and all(action.name != KERNEL_FLOOR_ACTION for action in study.actions):
        how = (
            "a url of the same model, started with another attention kernel"
            if study.model.engine == HTTP
            else "settings that select another attention kernel"
        )
        yield (
            f"study '{study.name}': no action '{KERNEL_FLOOR_ACTION}', so the effect of rounding alone stays unknown; "
            f'add [[actions]] name = "{KERNEL_FLOOR_ACTION}" with {how}'
        )


def _control_tokens(material: Material) -> Iterator[str]:
    """Yield a line on control tokens of the tokenizer that stand in users' texts, if there are any."""
    for templated in (False, True):
        documents = [
            document
            for document in material.every_document
            if document.control_tokens and document.templated == templated
        ]
        if not documents:
            continue
        names = list(dict.fromkeys(name for document in documents for name in document.control_tokens))
        named = ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        count, first = sum(len(document.control_tokens) for document in documents), documents[0]
        which = (
            f"{_counted(len(documents), 'document')} have {_counted(count, 'control token')} of the tokenizer ({named})"
        )
        place = f"in '{first.doc}'" if len(documents) == 1 else f"{len(first.control_tokens)} in '{first.doc}'"
        read = "which messages keep as text" if templated else "which act as such in a prompt without a chat template"
        yield f"the texts of {which}, {place}, {read}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _whole_caches(material: Material) -> Iterator[str]:
    """Yield a line on each action that keeps the whole cache of some prompts, and so does nothing there."""
    documents = material.every_document
    for action in material.actions:
        if action.retention.rule is not None and action.codec is None:
            whole = [
                document
                for document in documents
                if _is_whole(action, document.prompt_tokens, material.study.study.horizon)
            ]
            strata = ", ".join(dict.fromkeys(document.stratum for document in whole))
            if whole:
                yield (
                    f"action '{action.name}': keep = {action.retention} is the whole cache of {len(whole)} of "
                    f"{len(documents)} documents ({strata}), so nothing can differ there"
                )


def _is_whole(action: Action, entries: int, horizon: int) -> bool:
    if action.policy is not None:
        return action.budget(entries, horizon) is None
    return action.retention.kept(entries) == entries


def _equal_replicates(study: Study) -> Iterator[str]:
    requested, sampling = study.plan.replicates, study.sampling
    if sampling.greedy and requested != "auto" and requested > 1:
        yield (
            f"plan.replicates = {requested}: a plan of study '{study.name}' takes 1, since at temperature 0 all "
            "replicates of a document are the same"
        )
    elif sampling.top_k == 1 and requested != 1:
        yield (
            f"study.top_k = 1: leaves study '{study.name}' one token at each position, so that all replicates of a "
            "document are the same; temperature = 0 gives the same tokens, and a plan then takes 1 replicate"
        )


def _few_draws(study: Study) -> Iterator[str]:
    planned = study.plan
    tail = planned.alpha / (planned.family_size or len(primary_endpoints(study))) / 2
    if planned.stopping == FIXED and planned.draws * tail < 1:
        yield (
            f"plan.draws = {planned.draws}: fewer than one draw lies beyond an end of a primary interval, which may be "
            f"too narrow; {round(_DRAWS_BEYOND / tail):,} draws have {_DRAWS_BEYOND} there"
        )


def _unscored_tasks(study: Study) -> Iterator[str]:
    """Yield a line on tasks for which the scoring rule of their benchmark is not implemented."""
    for section in study.documents:
        unscored = [task for task in section.tasks if task_scoring(section.source, task) is None]
        if unscored:
            yield (
                f"documents '{section.stratum_name}': answers of {', '.join(unscored)} are not scored, since the "
                f"scoring rule of {section.source} for them is not implemented"
            )


def _equal_prompts(material: Material) -> Iterator[str]:
    """Yield a line on documents of different clusters with equal prompts: intervals take clusters as independent."""
    same = defaultdict[tuple[int, ...], list[Document]](list)
    for document in material.every_document:
        if document.tokens and document.stratum not in material.nominal:
            same[document.tokens].append(document)
    repeated = [documents for documents in same.values() if len({document.cluster for document in documents}) > 1]
    if repeated:
        first, second = next(
            (document, other) for document, *rest in repeated for other in rest if document.cluster != other.cluster
        )
        yield (
            f"{sum(map(len, repeated))} documents share {len(repeated)} {'prompt' if len(repeated) == 1 else 'prompts'}"
            f", such as '{first.doc}' and '{second.doc}', and intervals take them as independent; give those of one "
            "prompt one cluster, or leave out all but one"
        )


def _single_clusters(material: Material) -> Iterator[str]:
    planned = material.study.plan.documents
    for stratum, documents in material.documents["evaluation"].items():
        taken = documents if planned == "auto" else documents[:planned]
        if len({document.cluster for document in taken}) == 1:
            what = "one evaluation document" if len(taken) == 1 else f"{len(taken)} evaluation documents of one cluster"
            yield f"stratum '{stratum}': a plan takes {what}, and an interval needs documents of two clusters"

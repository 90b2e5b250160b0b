"""The documents and actions of a study, made and checked before anything is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from kvdrift.generator.actions import Action, build_actions
from kvdrift.generator.documents.prompts import TokenizerWithVariables
from kvdrift.generator.documents.registry import SOURCES, choose_candidates, stratum_documents
from kvdrift.generator.documents.source import NOTHING_HELD, Candidate, HeldDocuments, document_of
from kvdrift.generator.engines.registry import engine_model, load_prompt_tokenizer
from kvdrift.generator.finite.study_systems import study_systems, system_document
from kvdrift.generator.selectors.layer_choice import ALL_LAYERS
from kvdrift.generator.transformer.decoder import check_prompt
from kvdrift.generator.transformer.files.configuration import (
    head_size,
    position_limit,
    position_switch,
    vocabulary_size,
)
from kvdrift.generator.transformer.files.local_folders import local_configuration, local_folder
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.footprint import local_footprint
from kvdrift.generator.transformer.other_weights.named import naming_action, weights_location, with_own_weights
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import FINITE_STATE, DocumentsSection, Study
from kvdrift.stats.quantities import PAIR_QUANTITIES


@dataclass(frozen=True)
class Material:
    """A study with its documents and actions: everything that generation needs except the model."""

    study: Study
    documents: dict[str, dict[str, list[Document]]]  # split -> stratum -> documents in the source's order
    actions: list[Action]
    nominal: frozenset[str] = frozenset()  # strata whose texts are not tokenized yet, with prompts of nominal length

    @property
    def model_id(self) -> str:
        """The model's id as in the study file."""
        return self.study.model.id

    def of_split(self, split: str, per_stratum: int | None = None) -> list[Document]:
        """Return all documents of a split, stratum by stratum, or the first ``per_stratum`` of each."""
        return [document for documents in self.documents[split].values() for document in documents[:per_stratum]]

    @property
    def every_document(self) -> list[Document]:
        """Return the documents of both splits."""
        return [document for split in SPLITS for document in self.of_split(split)]

    @cached_property
    def measured_actions(self) -> list[str]:
        """Return the names of the compared actions: all but the control."""
        return [action.name for action in self.actions if not action.control]


def gather_material(study: Study, *, offline: bool = False, held: HeldDocuments = NOTHING_HELD) -> Material:
    """Make the documents and actions of a study; its stored documents, ``held``, are taken first.

    ``offline`` does without a tokenizer or configuration that is not on this machine.
    """
    actions = checked_actions(study)
    documents: dict[str, dict[str, list[Document]]] = {split: {} for split in SPLITS}
    nominal = set()
    if study.model.kind == FINITE_STATE:
        for split, strata in study_systems(study).items():
            for stratum, systems in strata.items():
                documents[split][stratum] = [
                    system_document(system, stratum) for system in systems if not held.forgotten.has(system.name)
                ]
    else:
        tokenizer, seed = cache(partial(_tokenizer, study)), study.study.seed
        for section, chosen in zip(study.documents, choose_candidates(study.documents, seed, held), strict=True):
            made = _nominal_documents(section, study, tokenizer, chosen) if offline else None
            if made is not None:
                nominal.add(section.stratum_name)
            for split, split_documents in (made or stratum_documents(section, seed, tokenizer, chosen)).items():
                documents[split][section.stratum_name] = split_documents
    material = Material(study, documents, actions, frozenset(nominal))
    check_distinct(material.every_document)
    check_disjoint(material)
    if study.model.kind != FINITE_STATE:
        _check_with_model(material, offline=offline)
    return material


def _tokenizer(study: Study) -> Any:
    """Load the tokenizer of a study's prompts, with the variables that the study file has for its chat template."""
    loaded = load_prompt_tokenizer(study.model)
    variables = study.model.chat_template_kwargs
    return loaded if variables is None else TokenizerWithVariables(loaded, variables)


class SharedMaterial:
    """The documents of a file's studies, made once for all studies of a model, which differ in temperature."""

    def __init__(self) -> None:
        self._of_models: dict[str, tuple[HeldDocuments, Material]] = {}

    def __call__(self, study: Study, *, offline: bool = False, held: HeldDocuments = NOTHING_HELD) -> Material:
        """Return a study's material; its documents are made once for all studies of its model.

        The documents are made anew for a study that has other documents stored than the study before it.

        Finite-state systems are made anew for each study, since another temperature gives other systems.
        """
        of, known = self._of_models.get(study.model.id, (NOTHING_HELD, None))
        if known is None or study.model.finite or held not in (NOTHING_HELD, of):
            known = gather_material(study, offline=offline, held=held)
            self._of_models[study.model.id] = held, known
        return known if known.study is study else replace(known, study=study, actions=checked_actions(study))


def _check_with_model(material: Material, *, offline: bool) -> None:
    """Refuse a model whose heads a codec cannot code, and prompts too long for the model or too short for an action."""
    if material.study.model.engine is not None:
        made = engine_model(material.study)
        for document in material.every_document:
            made.check_prompt(document, material.study.study.horizon)
        return
    location, revision = model_location(material.study.model), material.study.model.revision
    limit = vocabulary = switch = None
    if not offline or local_configuration(location, revision) is not None:
        limit, vocabulary = (read(location, revision=revision) for read in (position_limit, vocabulary_size))
        switch = position_switch(location, revision=revision)
        for action in (action for action in material.actions if action.weights is None):
            _check_layers(action, location, revision)
    limit = _check_with_other_weights(material, limit, offline=offline)
    for document in material.every_document:
        if document.stratum not in material.nominal:
            check_prompt(document, material.study.study.horizon, limit, vocabulary, switch)
        check_retentions(material.actions, document.prompt_tokens, f"document '{document.doc}'")


def _check_with_other_weights(material: Material, limit: int | None, *, offline: bool) -> int | None:
    """Refuse an action's own weights if its codec cannot code their heads; return the lowest limit of positions.

    ``limit`` is the limit of the study's own model, None if that is unknown; the limits of other weights may be lower.
    """
    actions = {action.name: action for action in material.actions}
    for section in with_own_weights(material.study):
        location = weights_location(material.study, section)
        if not offline or local_configuration(location) is not None:
            with naming_action(section, location):
                positions = position_limit(location)
                _check_layers(actions[section.name], location, None)
            limit = positions if limit is None else min(limit, positions)
    return limit


def _check_layers(action: Action, location: str, revision: str | None) -> None:
    """Refuse an action whose codec cannot code the heads of a model, or whose layers the model lacks."""
    if action.codec is not None:
        action.check_heads(head_size(location, revision=revision))
    if (action.chosen, action.coded) == (ALL_LAYERS, ALL_LAYERS):
        return
    footprint = local_footprint(location, "float32", revision)
    if footprint is not None:
        action.check_layer_numbers(footprint.shape.evictable_layers)


def _nominal_documents(
    section: DocumentsSection, study: Study, tokenizer: Callable[[], Any], chosen: Mapping[str, Sequence[Candidate]]
) -> dict[str, list[Document]] | None:
    """Return stand-in documents of the greatest length if texts cannot be tokenized here; None if they can.

    The tokenizer of a Hugging Face id may be downloaded later; a folder without a tokenizer is refused.
    """
    if not SOURCES[section.source].reads_text:
        return None
    if study.model.engine is not None:
        return None  # the tokenizer is in a local file
    location = model_location(study.model)
    local = local_folder(location) is not None
    if local or local_configuration(location, study.model.revision) is not None:
        try:
            tokenizer()
        except InputError:
            if local:
                raise
        else:
            return None
    tokens = (0,) * section.length
    return {split: [document_of(section, candidate, tokens, ()) for candidate in chosen[split]] for split in SPLITS}


def checked_actions(study: Study) -> list[Action]:
    """Build and check the actions of a study; check the quantities and the family size that ``[plan]`` names."""
    actions = build_actions(study)
    primary = study.plan.primary
    for name in primary:
        if primary.count(name) > 1:
            raise InputError(f"plan.primary: '{name}' is given {primary.count(name)} times; name each quantity once")
        if name not in PAIR_QUANTITIES:
            raise InputError(f"plan.primary: unknown quantity '{name}'; {nearest(name, PAIR_QUANTITIES)}")
        if PAIR_QUANTITIES[name].profile:
            raise InputError(f"plan.primary: '{name}' is a profile over positions or lags; name a single quantity")
    contrasts = sum(PAIR_QUANTITIES[name].kind == "contrast" for name in primary)
    if contrasts and all(name == study.plan.baseline for name in study.estimated):
        raise InputError("plan.primary names a contrast, but the study has one action: add another action")
    endpoints = len(primary) * len(study.estimated) - contrasts * (study.plan.baseline in study.estimated)
    if study.plan.family_size is not None and study.plan.family_size < endpoints:
        raise InputError(
            f"plan.family_size = {study.plan.family_size}: this model alone has {endpoints} endpoints; family_size "
            "must be at least that"
        )
    return actions


def check_retentions(actions: Iterable[Action], tokens: int, where: str) -> None:
    """Check that every action can keep its required entries of a prompt; an error line begins with ``where``."""
    for action in actions:
        action.kept_entries(tokens, where)


def check_distinct(documents: Sequence[Document]) -> None:
    """Check that no document is in two strata."""
    strata: dict[str, str] = {}
    for document in documents:
        if (other := strata.setdefault(document.doc, document.stratum)) != document.stratum:
            line = f"document '{document.doc}' is in two strata, '{other}' and '{document.stratum}', and can be in one:"
            rows = ", or name a stratum in each row of the file" if document.source == "jsonl" else ""
            raise InputError(f'{line} give their [[documents]] sections part = "1/2" and part = "2/2"{rows}')


def check_disjoint(material: Material) -> None:
    """Check that no cluster is in both splits; giving a stored document another cluster can break this."""
    development = {document.cluster: document for document in material.of_split("development")}
    for document in material.of_split("evaluation"):
        if (other := development.get(document.cluster)) is not None:
            raise InputError(
                f"cluster '{document.cluster}' has development document '{other.doc}' and evaluation document "
                f"'{document.doc}', and must be in one split: give one document another cluster"
            )

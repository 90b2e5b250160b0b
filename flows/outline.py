"""What can be said of a study before its texts are read and tokenized."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flows.material import check_distinct, check_retentions, checked_actions
from generator.actions import Action
from generator.documents.registry import SOURCES, check_source, choose_candidates, stratum_documents
from generator.finite.study_systems import study_systems
from generator.transformer.decoder import check_positions
from generator.transformer.local_folders import local_configuration
from schema.document import SPLITS
from schema.study import FINITE_STATE, DocumentsSection, Study


@dataclass(frozen=True)
class Outline:
    """A study's extent.

    Attributes:
        study: the study.
        actions: its actions.
        positions: the model's positions, None where its configuration is not on this machine.
        lengths: prompt tokens, split by split and stratum by stratum: exact where the source needs no tokenizer, else
            the section's nominal length.
        nominal: strata whose lengths are nominal.
        absent: strata whose files are not on this machine, with the path that was looked for.

    """

    study: Study
    actions: list[Action]
    positions: int | None
    lengths: dict[str, dict[str, list[int]]]
    nominal: list[str] = field(default_factory=list)
    absent: dict[str, Path] = field(default_factory=dict)


def outline_study(study: Study) -> Outline:
    """Make the outline of a study; nothing is tokenized or downloaded.

    Raises:
        InputError: something in the study file cannot be done, as far as that shows without its texts.

    """
    actions = checked_actions(study)
    if study.model.kind == FINITE_STATE:
        systems = study_systems(study)
        lengths = {split: {name: [0] * len(made) for name, made in systems[split].items()} for split in SPLITS}
        return Outline(study, actions, None, lengths)
    positions = (local_configuration(study.model.id, study.model.revision) or {}).get("max_position_embeddings")
    outline = Outline(study, actions, positions, {split: {} for split in SPLITS})
    names: list[tuple[str, str]] = []
    for section in study.documents:
        check_source(section)
        stratum = section.stratum_name
        if SOURCES[section.source].reads_text:
            names += _nominal_stratum(outline, section)
        else:
            made = stratum_documents(section, study.study.seed)
            for split in SPLITS:
                names += [(document.doc, stratum) for document in made[split]]
                outline.lengths[split][stratum] = [document.prompt_tokens for document in made[split]]
                for document in made[split]:
                    check_positions(document.doc, document.prompt_tokens, study.study.horizon, positions)
                    check_retentions(actions, document.prompt_tokens, f"document '{document.doc}'")
    check_distinct(names)
    return outline


def _nominal_stratum(outline: Outline, section: DocumentsSection) -> list[tuple[str, str]]:
    """Enter a stratum of texts into the outline; return its documents and stratum, none where its files are absent."""
    stratum = section.stratum_name
    outline.nominal.append(stratum)
    check_retentions(outline.actions, section.length, f"stratum '{stratum}'")
    for split, count in (("development", section.development), ("evaluation", section.evaluation)):
        outline.lengths[split][stratum] = [section.length] * count
    path = section.path
    if path is not None and not Path(path).expanduser().exists():
        outline.absent[stratum] = Path(path)
        return []
    chosen = choose_candidates(section, outline.study.study.seed)
    return [(candidate.doc, stratum) for candidates in chosen.values() for candidate in candidates]

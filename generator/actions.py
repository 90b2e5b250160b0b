"""Actions: what selectors keep and codecs store, what policies let a step read, and the control of every study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from generator.attention.holding import AsComputed, Holding
from generator.codecs import CODECS, Codec
from generator.codecs.generated import GeneratedEntries
from generator.selectors import Full, Numerics, Selector, build_selector
from generator.selectors.own.building import build
from generator.selectors.own.kinds import PartKind
from generator.selectors.parameters import Value
from generator.selectors.policies import Policy, build_policy
from schema.errors import InputError, failure_of
from schema.retention import Retention
from schema.study import CONTROL_ACTION, FINITE_STATE, ActionSection, Study

GENERATED = "generated"  # the key of every codec by which it codes generated entries, too

CODEC_KIND: PartKind[Codec] = PartKind(
    noun="codec",
    plural="codecs",
    base=Codec,
    derive="Codec of generator.codecs.codec",
    says="how it stores entries",
    class_variables=MappingProxyType({"summary": "str", "paper": "str | None"}),
    keys=("name", GENERATED),
    recorded=lambda codec: codec.parameters,
    common=MappingProxyType({GENERATED: False}),
)


@dataclass(frozen=True)
class Action:
    """One selector with its parameters and retention, and the codec that stores what it keeps, if there is one.

    With a decode-time policy the selector keeps everything, and the retention says m: how many entries a step reads at
    most. A codec may code what is generated, too. With an engine it is the engine's settings and weights.

    Attributes:
        settings: Of an engine, where they differ from those of the reference; None without an engine.
        weights: What its side has in place of the reference's weights, as the study file names it.
    """

    name: str
    selector_name: str
    selector: Selector
    retention: Retention
    codec_name: str | None = None
    codec: Codec | None = None
    policy_name: str | None = None
    policy: Policy | None = None
    generated: GeneratedEntries | None = None
    settings: Mapping[str, Value] | None = None
    weights: str | None = None

    @property
    def control(self) -> bool:
        """Whether this is the full-retention control, whose delta and f must be exactly 0."""
        return self.name == CONTROL_ACTION

    @property
    def parts(self) -> tuple[Selector, *tuple[Codec | Policy | GeneratedEntries, ...]]:
        """What the action is made of, its selector first, or a policy's first cut: what its identity covers."""
        if self.policy is not None:
            return (self.chooser, self.policy)
        return (self.selector, *(part for part in (self.codec, self.generated) if part is not None))

    @property
    def codec_parameters(self) -> dict[str, Any] | None:
        """Parameters of the codec, by name; None where there is none. Without ``generated`` it is not among them."""
        if self.codec is None:
            return None
        return self.codec.parameters | (self.generated.parameters if self.generated is not None else {})

    @property
    def told(self) -> str:
        """Its parts, as error lines name them."""
        if self.settings is not None:
            return "the engine's settings, weights, libraries and environment"
        weights = [] if self.weights is None else [f"weights '{self.weights}'"]
        if self.policy is not None:
            return " and ".join([f"policy '{self.policy_name}'", *weights])
        codec = [] if self.codec_name is None else [f"codec '{self.codec_name}'"]
        return " and ".join([f"selector '{self.selector_name}'", *codec, *weights])

    @property
    def holding(self) -> Holding:
        """How the compressed side holds what the selector keeps."""
        if self.codec is not None:
            return self.codec
        return self.selector.holding if isinstance(self.selector, Numerics) else AsComputed()

    def decides_bytes(self, kept: int, entries: int, layers: int) -> tuple[Any, ...]:
        """What the bytes of m kept entries of n follow from: weights, how entries are held, with a codec m of layers.

        A codec may leave a window of each layer exact, so that unlike budgets with the same sum take unlike bytes.
        """
        if self.settings is not None:
            return _as_json(dict(self.settings)), ()
        if self.codec is None:
            return self.weights, self.holding, ()
        chooser = Full() if kept >= entries else self.chooser
        return self.weights, self.holding, tuple(chooser.budgets(kept, entries, layers))

    @property
    def prefill_chunk(self) -> int | None:
        """How many tokens a prefill of its own takes at once; None where it keeps entries of the reference's prompt."""
        return self.selector.prefill_chunk if isinstance(self.selector, Numerics) else None

    @property
    def row_tile(self) -> int | None:
        """How many rows read its cache at once, at most; None for as many as of others."""
        return (self.selector.row_tile or None) if isinstance(self.selector, Numerics) else None

    @property
    def chooser(self) -> Selector:
        """What chooses the prompt entries that are kept after prefill."""
        return self.selector if self.policy is None else self.policy.first_cut

    @property
    def least_budget(self) -> int:
        """The smallest m of a policy: what it needs, and what its first cut does; 0 without a policy."""
        if self.policy is None:
            return 0
        return max(self.policy.least, self.chooser.window + self.chooser.sinks)

    def budget(self, entries: int, horizon: int) -> int | None:
        """M of a policy, if it is ever too few for n prompt entries and those of H - 1 fed tokens; else None."""
        budget = None if self.policy is None else self.retention.count(entries)
        return None if budget is None or budget >= entries + horizon - 1 else budget

    def most_entries(self, entries: int, horizon: int) -> int:
        """How many entries bytes are counted of: those kept of the prompt, or the most that a policy's step reads."""
        count = self.retention.count(entries)
        if self.policy is None or count is None:
            return self.retention.kept(entries)
        return min(count, entries + horizon - 1)

    def removes(self, entries: int, horizon: int) -> bool:
        """Whether prefill or a policy's step ever removes one of n prompt entries or of H - 1 generated ones."""
        return self.retention.kept(entries) < entries or self.budget(entries, horizon) is not None

    def scored_entries(self, entries: int, horizon: int) -> int:
        """Of how many prompt entries every stream keeps scores."""
        scores = self.policy is not None and self.policy.keeps_scores and self.budget(entries, horizon) is not None
        return self.retention.kept(entries) if scores else 0

    def check_heads(self, size: int) -> None:
        """Check that the codec can code heads of ``size`` channels."""
        try:
            if self.codec is not None:
                self.codec.check(size)
        except InputError as error:
            raise InputError(f"action '{self.name}': codec '{self.codec_name}': {error}") from None
        except Exception as error:
            line = f"action '{self.name}': codec '{self.codec_name}': {failure_of(error, self.codec)}"
            raise InputError(line) from error

    def kept_entries(self, entries: int, where: str) -> int:
        """How many of a prompt's n entries the action keeps at first: m, or n where the retention is n or above."""
        if self.policy is not None and (budget := self.retention.count(entries) or 0) < (least := self.least_budget):
            raise InputError(
                f"action '{self.name}', {where}: keep = {self.retention} lets a step read {budget} entries; "
                f"policy {self.policy_name} needs at least {least}"
            )
        kept = self.retention.kept(entries)
        if kept >= entries:
            return entries
        window, sinks = self.selector.window, self.selector.sinks
        if kept < (needed := max(window + sinks, 1)):
            raise InputError(
                f"action '{self.name}', {where}: keep = {self.retention} retains {kept} of {entries} prompt entries, "
                f"below the {needed} that its window ({window}) and sinks ({sinks}) need"
            )
        return kept

    def row(self, study: str, *, prespecified: bool, revision: int = 0) -> dict[str, Any]:
        """The action's row of the ``actions`` table."""
        identity = self.selector.identity()
        parameters = identity.pop("parameters")
        return {
            "study": study, "action": self.name, "selector": self.selector_name, "keep": str(self.retention),
            "window": self.selector.window, "sinks": self.selector.sinks,
            "position_mode": "continued from the prompt's true length", "control": self.control,
            "prespecified": prespecified, "parameters": _as_json(parameters),
            "action_revision": revision, "dropped": False, "codec": self.codec_name,
            "codec_parameters": _as_json(self.codec_parameters or {}),
            "policy": self.policy_name,
            "policy_parameters": None if self.policy is None else _as_json(self.policy.parameters),
            "settings": None if self.settings is None else json.dumps(dict(self.settings), sort_keys=True),
            "weights": self.weights,
            **identity,
        }  # fmt: skip


def _as_json(parameters: dict[str, Any]) -> str | None:
    return json.dumps(parameters, sort_keys=True) if parameters else None


def build_action(section: ActionSection, folder: Path | None = None) -> Action:
    """Make an action from its section of a study file in ``folder``, where modules of its own are found."""
    codec = generated = None
    try:
        if section.policy_name is not None:
            policy = build_policy(section.policy_name, section.policy_parameters, folder)
            return Action(
                section.name, "full", Full(), section.retention, policy_name=section.policy_name, policy=policy,
                weights=section.weights,
            )  # fmt: skip
        selector = build_selector(section.selector, section.parameters, folder)
        if section.codec_name is not None:
            parameters = section.codec_parameters
            codec = build_codec(section.codec_name, parameters, folder)
            generated = GeneratedEntries(codec) if parameters.get(GENERATED) else None
    except InputError as error:
        raise InputError(f"action '{section.name}': {error}") from error.__cause__
    if isinstance(selector, Full) and section.retention.rule is not None:
        line = f"action '{section.name}': selector '{section.selector}' keeps every entry"
        raise InputError(f'{line}; write keep = "all"')
    if isinstance(selector, Numerics) and (codec is not None or section.weights is not None):
        other = "weights" if codec is None else "codec"
        line = f"action '{section.name}': '{section.selector}' is the noise floor, where nothing is compressed"
        raise InputError(f"{line}; leave {other} or selector out")
    return Action(
        section.name, section.selector, selector, section.retention, section.codec_name, codec, generated=generated,
        weights=section.weights,
    )  # fmt: skip


def build_codec(name: str, parameters: Mapping[str, Value], folder: Path | None = None) -> Codec:
    """Make a codec.

    Args:
        name: One of ``CODECS``, an entry point's name, or ``module:Class``.
        parameters: Those that differ from the defaults; ``generated`` is checked, but is not the codec's own.
        folder: Where a module is looked for before installed ones, if anywhere.
    """
    return build(CODEC_KIND, name, parameters, CODECS, folder)


def build_actions(study: Study) -> list[Action]:
    """Make the study's actions in the file's order, and then the control.

    Raises:
        InputError: An unknown selector or parameter, or a value that a selector does not take.
    """
    control = Action(CONTROL_ACTION, "full", Full(), Retention(None))
    if study.model.kind == FINITE_STATE:  # an action is a law, and there is no prompt to keep entries of
        return [*(Action(section.name, FINITE_STATE, Full(), Retention(None)) for section in study.actions), control]
    if study.model.engine is not None:  # an action is a side of the engine; the floor stands for the control
        return [
            replace(
                control, name=one.name, selector_name=one.selector, settings=one.settings or {}, weights=one.weights
            )
            for one in study.actions
        ]
    return [*(build_action(section, study.folder) for section in study.actions), control]

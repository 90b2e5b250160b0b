"""Build the actions of a study, and the control; an action is a policy, or a selector with or without a codec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvdrift.generator.attention.holding import AsComputed, Holding
from kvdrift.generator.codecs import CODECS, Codec
from kvdrift.generator.codecs.generated import GeneratedEntries
from kvdrift.generator.selectors import Full, Numerics, Selector, build_selector
from kvdrift.generator.selectors.custom.parts import PartKind
from kvdrift.generator.selectors.parameters import Value
from kvdrift.generator.selectors.policies import Policy, build_policy
from kvdrift.schema.errors import InputError, failure_of
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import CONTROL_ACTION, FINITE_STATE, ActionSection, Study

GENERATED = "generated"  # the parameter of every codec by which it codes generated entries, too

CODEC_KIND: PartKind[Codec] = PartKind(
    noun="codec", plural="codecs", base=Codec, known=CODECS, derive="Codec of kvdrift.generator.codecs.codec",
    says="how it stores entries", common=MappingProxyType({GENERATED: False}),
)  # fmt: skip


@dataclass(frozen=True)
class Action:
    """A selector with its parameters and retention, and the codec that stores the kept entries, if there is one.

    With a decode-time policy, the selector keeps everything, and the retention says m, the most entries that a step
    reads. A codec may also code generated entries. With an engine, the action is the engine's settings and weights.

    Attributes:
        settings: The engine's settings that differ from the reference's; None without an engine.
        weights: The weights in place of the reference's, as the study file names them.
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
        """The parts that the action's identity covers, first its selector or its policy's ``first_cut``."""
        if self.policy is not None:
            return (self.chooser, self.policy)
        return (self.selector, *(part for part in (self.codec, self.generated) if part is not None))

    @property
    def codec_parameters(self) -> dict[str, Any] | None:
        """The codec's parameters by name, with ``generated`` only if that is set; None without a codec."""
        if self.codec is None:
            return None
        return self.codec.parameters | (self.generated.parameters if self.generated is not None else {})

    @property
    def words(self) -> str:
        """The action's parts in words, for error lines."""
        if self.settings is not None:
            return "the engine's settings, weights, libraries and environment"
        weights = [] if self.weights is None else [f"weights '{self.weights}'"]
        if self.policy is not None:
            return " and ".join([f"policy '{self.policy_name}'", *weights])
        codec = [] if self.codec_name is None else [f"codec '{self.codec_name}'"]
        return " and ".join([f"selector '{self.selector_name}'", *codec, *weights])

    @property
    def holding(self) -> Holding:
        """How the compressed side stores the entries that the selector keeps."""
        if self.codec is not None:
            return self.codec
        return self.selector.holding if isinstance(self.selector, Numerics) else AsComputed()

    def decides_bytes(self, kept: int, entries: int, layers: int) -> tuple[Any, ...]:
        """Return values that determine how many bytes ``kept`` of ``entries`` entries take, in ``layers`` layers.

        Actions with equal values take equal bytes. A codec may leave a window of each layer exact, so bytes depend on
        how many entries each layer keeps, and not on the sum alone.
        """
        if self.settings is not None:
            return _as_json(dict(self.settings)), ()
        if self.codec is None:
            return self.weights, self.holding, ()
        chooser = Full() if kept >= entries else self.chooser
        return self.weights, self.holding, tuple(chooser.budgets(kept, entries, layers))

    @property
    def prefill_chunk(self) -> int | None:
        """The most tokens in a chunk of the action's own prefill; None if the action uses the reference's prefill."""
        return self.selector.prefill_chunk if isinstance(self.selector, Numerics) else None

    @property
    def row_tile(self) -> int | None:
        """The most streams that read the action's cache at once; None for the usual number."""
        return (self.selector.row_tile or None) if isinstance(self.selector, Numerics) else None

    @property
    def chooser(self) -> Selector:
        """The selector of the prompt entries that are kept after prefill."""
        return self.selector if self.policy is None else self.policy.first_cut

    @property
    def least_budget(self) -> int:
        """The smallest m, in entries, with which the policy and its ``first_cut`` can work; 0 without a policy."""
        if self.policy is None:
            return 0
        return max(self.policy.least, self.chooser.window + self.chooser.sinks)

    def budget(self, entries: int, horizon: int) -> int | None:
        """Return m, the most entries that a policy's step reads; None without a policy, or if no step has more than m.

        Even the last step has only ``entries`` prompt entries and those of ``horizon`` - 1 fed tokens.
        """
        budget = None if self.policy is None else self.retention.count(entries)
        return None if budget is None or budget >= entries + horizon - 1 else budget

    def most_entries(self, entries: int, horizon: int) -> int:
        """Return for how many entries bytes are counted: the kept ones, or the most that a policy's step reads."""
        count = self.retention.count(entries)
        if self.policy is None or count is None:
            return self.retention.kept(entries)
        return min(count, entries + horizon - 1)

    def removes(self, entries: int, horizon: int) -> bool:
        """Return whether prefill or a policy's step ever removes a prompt entry or a generated entry."""
        return self.retention.kept(entries) < entries or self.budget(entries, horizon) is not None

    def scored_entries(self, entries: int, horizon: int) -> int:
        """Return for how many prompt entries each stream keeps scores; 0 if no scores are kept."""
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
        """Return how many of n = ``entries`` prompt entries are kept after prefill: the retention's m, but at most n.

        Raises:
            InputError: m is too small for the policy, or for the selector's window and sinks; the error names
                ``where``.
        """
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
                f"fewer than the {needed} that its window ({window}) and sinks ({sinks}) need"
            )
        return kept

    def row(self, study: str, *, prespecified: bool, revision: int = 0) -> dict[str, Any]:
        """Return the action's row of the ``actions`` table."""
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
    """Make an action from its section of a study file in ``folder``, which may hold custom modules."""
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
            codec = CODEC_KIND.build(section.codec_name, parameters, folder)
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


def build_actions(study: Study) -> list[Action]:
    """Return the study's actions in the file's order, followed by the control."""
    control = Action(CONTROL_ACTION, "full", Full(), Retention(None))
    if study.model.kind == FINITE_STATE:  # an action is a distribution, and there is no prompt to keep entries of
        return [*(Action(section.name, FINITE_STATE, Full(), Retention(None)) for section in study.actions), control]
    if study.model.engine is not None:  # an action is a side of the engine; the floor stands for the control
        return [
            replace(
                control,
                name=action.name,
                selector_name=action.selector,
                settings=action.settings or {},
                weights=action.weights,
            )
            for action in study.actions
        ]
    return [*(build_action(section, study.folder) for section in study.actions), control]

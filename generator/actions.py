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
from kvdrift.generator.codecs.combined import KeysAndValues
from kvdrift.generator.codecs.generated import GeneratedEntries
from kvdrift.generator.selectors import Full, Numerics, Selector, build_selector
from kvdrift.generator.selectors.custom.parts import PartKind
from kvdrift.generator.selectors.layer_choice import ALL_LAYERS, ChosenLayers, LayerChoice
from kvdrift.generator.selectors.parameters import Value, check_types
from kvdrift.generator.selectors.policies import Policy, build_policy
from kvdrift.generator.selectors.selector import EVEN, ScoringSelector
from kvdrift.schema.errors import InputError, failing_as, failure_of
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import CONTROL_ACTION, FINITE_STATE, ActionSection, Study
from kvdrift.schema.study.actions import HALVES

GENERATED = "generated"  # the parameter of every codec by which it codes generated entries, too
_LAYERS: Mapping[str, Any] = MappingProxyType({"layers": (), "skip_layers": ()})

CODEC_KIND: PartKind[Codec] = PartKind(
    noun="codec", plural="codecs", base=Codec, known=CODECS, derive="Codec of kvdrift.generator.codecs.codec",
    says="how it stores entries", common=MappingProxyType({GENERATED: False, **_LAYERS}),
)  # fmt: skip


@dataclass(frozen=True)
class Action:
    """A selector with its parameters and retention, and the codec that stores the kept entries, if there is one.

    With a decode-time policy, the selector keeps everything, and the retention says m, the most entries that a step
    reads. A codec may also code generated entries. With an engine, the action is the engine's settings and weights.

    Attributes:
        chosen: The layers in which the selector chooses; all entries of other layers are kept.
        coded: The layers that the codec stores; entries of other layers are stored as computed.
        settings: The engine's settings that differ from the reference's; None without an engine.
        weights: The weights in place of the reference's, as the study file names them.
        server: The URL of the action's own server, whose options say how it stores entries; None without one.
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
    chosen: LayerChoice = ALL_LAYERS
    coded: LayerChoice = ALL_LAYERS
    settings: Mapping[str, Value] | None = None
    weights: str | None = None
    server: str | None = None

    @property
    def control(self) -> bool:
        """Whether this is the full-retention control, whose delta and f must be exactly 0."""
        return self.name == CONTROL_ACTION

    @property
    def parts(self) -> tuple[Selector, *tuple[Codec | Policy | GeneratedEntries | ChosenLayers, ...]]:
        """The parts that the action's identity covers, first its selector or its policy's ``first_cut``."""
        if self.policy is not None:
            return (self.chooser, self.policy)
        layers = ChosenLayers(self.chosen, self.coded)
        codecs = () if self.codec is None else self.codec.codecs
        generated = () if self.generated is None else (self.generated,)
        return (self.selector, *codecs, *generated, *((layers,) if layers.parameters else ()))

    @property
    def codec_parameters(self) -> dict[str, Any] | None:
        """The codec's parameters by name, with ``generated`` and layers only if they are set; None without a codec."""
        if self.codec is None:
            return None
        generated = {} if self.generated is None else self.generated.parameters
        return self.codec.parameters | generated | self.coded.parameters

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
        """How the compressed side stores the entries that the selector keeps, in layers that the codec stores."""
        if self.codec is not None:
            return self.codec
        return self.selector.holding if isinstance(self.selector, Numerics) else AsComputed()

    def holdings(self, layers: int) -> list[Holding]:
        """Return how the compressed side stores the kept entries of each of ``layers`` layers with full attention."""
        exact = self.coded.left_out(layers) if self.codec is not None else ()
        return [AsComputed() if layer in exact else self.holding for layer in range(layers)]

    def layer_entries(self, kept: int, entries: int, layers: int) -> list[int]:
        """Return how many of n = ``entries`` entries each of ``layers`` layers keeps; ``kept`` is m."""
        chooser, whole = Full() if kept >= entries else self.chooser, self.chosen.left_out(layers)
        with failing_as("selector", chooser):
            budgets = iter(chooser.budgets(kept, entries, layers - len(whole)))
        return [entries if layer in whole else next(budgets) for layer in range(layers)]

    def decides_bytes(self, entries: int, layers: int) -> tuple[Any, ...]:
        """Return values that determine how many bytes the kept ones of ``entries`` entries take, in ``layers`` layers.

        Actions that keep equally many entries, and have equal values, take equal bytes. A codec may leave a window of
        each layer exact, so bytes depend on how many entries each layer keeps, and not on the sum alone.
        """
        if self.settings is not None:
            return _as_json(dict(self.settings)), self.server
        if self.codec is None:
            return self.weights, self.holding, self.chosen
        kept = self.retention.kept(entries)
        chooser = Full() if kept >= entries else self.chooser
        shared = chooser if chooser.least_of_head(kept) < kept else None  # heads may keep different numbers of entries
        return self.weights, self.holding, (*self.layer_entries(kept, entries, layers), shared), self.coded

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

    def check_layer_numbers(self, layers: int) -> None:
        """Check that the selector and the codec apply to layers of a model with ``layers`` layers with full attention.

        Raises:
            InputError: A number is not that of a layer, or no layer is left.
        """
        for part, choice in ((self.selector_name, self.chosen), (self.codec_name, self.coded)):
            try:
                choice.left_out(layers)
            except InputError as error:
                raise InputError(f"action '{self.name}': {part}: {error}") from None

    def check_heads(self, size: int) -> None:
        """Check that the codec can code heads of ``size`` channels."""
        try:
            if self.codec is not None:
                self.codec.check(size, "keys")
                self.codec.check(size, "values")
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
        parameters = identity.pop("parameters") | self.chosen.parameters
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
    try:
        if section.policy_name is not None:
            policy = build_policy(section.policy_name, section.policy_parameters, folder)
            return Action(
                section.name, "full", Full(), section.retention, policy_name=section.policy_name, policy=policy,
                weights=section.weights,
            )  # fmt: skip
        selector = build_selector(section.selector, section.parameters, folder)
        layers = LayerChoice.written(section.layers, section.skip_layers)
        stored = {} if section.codec is None else _codec_parts(section, layers, folder)
    except InputError as error:
        raise InputError(f"action '{section.name}': {error}") from error.__cause__
    if stored and isinstance(selector, ScoringSelector) and selector.budget != EVEN:
        _check_heads_apart(section.name, selector.budget, stored["codec"], stored["generated"])
    if isinstance(selector, Full) and section.retention.rule is not None:
        line = f"action '{section.name}': selector '{section.selector}' keeps every entry"
        raise InputError(f'{line}; write keep = "all"')
    if isinstance(selector, Numerics) and (stored or layers or section.weights is not None):
        other = "codec" if stored else "layers" if layers else "weights"
        line = f"action '{section.name}': '{section.selector}' is the noise floor, where nothing is compressed"
        raise InputError(f"{line}; leave {other} or selector out")
    if layers is not None and isinstance(selector, Full) and not stored:
        raise InputError(
            f"action '{section.name}': has layers, but no selector and no codec for them; leave layers out"
        )
    everywhere = layers is None or layers.skip_layers == () or isinstance(selector, Full)
    chosen = ALL_LAYERS if layers is None or everywhere else layers
    return Action(
        section.name, section.selector, selector, section.retention, weights=section.weights, chosen=chosen, **stored
    )


def _check_heads_apart(name: str, budget: str, codec: Codec, generated: GeneratedEntries | None) -> None:
    """Refuse a codec that codes the heads of a layer together, since they keep different numbers of entries."""
    if generated is not None or any(one.heads_together for one in codec.codecs):
        what = "generated = true" if generated is not None else "codec"
        raise InputError(
            f"action '{name}': {what}: codes all heads of a layer together, and budget = '{budget}' lets them keep "
            "different numbers of entries; leave one of the two out"
        )


def _codec_parts(section: ActionSection, layers: LayerChoice | None, folder: Path | None) -> dict[str, Any]:
    """Return the fields of an action that its codec decides; ``layers`` are the action's own, if it names any."""
    written = section.codec_parameters
    own = LayerChoice.written(written.get("layers"), written.get("skip_layers"))
    codec: Codec
    if section.codec_halves is None:
        codec = CODEC_KIND.build(str(section.codec_name), written, folder)
    else:
        for key in written:
            if key not in CODEC_KIND.common:
                raise InputError(f"codec.{key}: unknown key; a table of keys and values takes {', '.join(_OF_BOTH)}")
        check_types(written, CODEC_KIND.common)
        codec = KeysAndValues(**{part: _half(half, part, folder) for part, half in section.codec_halves.items()})
    generated = GeneratedEntries(codec) if written.get(GENERATED) else None
    ends = max(one.exact_ends for one in codec.codecs)
    coded = own or layers or LayerChoice(ends=ends)
    if not ends and coded.skip_layers == ():
        coded = ALL_LAYERS
    return {"codec_name": section.codec_name, "codec": codec, "generated": generated, "coded": coded}


_OF_BOTH = (*HALVES, *CODEC_KIND.common)


def _half(written: Mapping[str, Any], part: str, folder: Path | None) -> Codec:
    """Return the codec of keys or of values, from its name and parameters."""
    parameters = {key: value for key, value in written.items() if key != "name"}
    for key in CODEC_KIND.common:
        if key in parameters:
            raise InputError(f"codec.{part}.{key}: is a parameter of keys and values together; write codec.{key}")
    try:
        return CODEC_KIND.build(str(written["name"]), parameters, folder)
    except InputError as error:
        raise InputError(f"codec.{part}: {error}") from error.__cause__


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
                server=action.url,
            )
            for action in study.actions
        ]
    return [*(build_action(section, study.folder) for section in study.actions), control]

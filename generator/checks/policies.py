"""The checks of decode-time policies, under small models.

The attention of a step shows which entries it reads, by its effect on values: zero queries weigh all read entries
equally, and one-hot values show them. The step's output is then compared with plain attention over these entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import embedded_document, random_document, random_model
from kvdrift.generator.checks.trial import Check, Trial, common_checks, require, require_no_draws, same_events
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full, Selector
from kvdrift.generator.selectors.policies import POLICY_KIND, Policy
from kvdrift.generator.selectors.policies.around import GuardedRule, rule_of
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection

_PROMPT, _HORIZON, _SEED = 131, 20, 7
_FEW = 12  # entries: fewer than are generated
_ROOM = 400  # the most entries that a policy may need, so that a step can be tried with every entry of a prompt
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of attention, in units of the largest value
_NOTHING_SHARED = SharingOptions(share_streams=False, share_prompt_reads=False)


@dataclass(frozen=True, eq=False)
class PolicyTrial(Trial[Policy]):
    """A decode-time policy to check."""

    kind: ClassVar = POLICY_KIND
    decides: ClassVar[str] = "events"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > _ROOM:
            raise InputError(
                f"policy '{self.name}' needs at least {self.least} entries, more than the {_ROOM} that the checks have "
                "prompts for; lower that number with --parameter"
            )

    @property
    def least(self) -> int:
        """The smallest m that the policy accepts; m bounds the entries that a step reads."""
        return self.action().least_budget

    @property
    def entries(self) -> int:
        """The number n of prompt entries, so large that with m = n / 2 the policy still has entries to choose among."""
        return max(_PROMPT, 2 * (self.least + 16) + 1)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Three values of m, which bounds the entries that a step reads.

        They are half of the prompt's entries, few (at least ``least``), and more than the prompt has.
        """
        return (self.entries // 2, max(_FEW, self.least), self.entries + 3)

    def action(self, name: str = "own", keep: int | str = "1/2", **changes: Any) -> Action:
        """Return an action of the policy with retention ``keep``; ``changes`` are new values of its parameters."""
        policy = {**self.parameters, **changes, "name": self.name}
        return build_action(ActionSection.model_validate({"name": name, "policy": policy, "keep": keep}), self.folder)

    def decided(self) -> dict[str, str]:
        """Return a digest of the events for each m of ``budgets``, keyed by text such as "m = 12"."""
        units = self.units([self.action(f"own-{budget}", budget) for budget in self.budgets], 2)
        return {f"m = {m}": _digest(unit) for m, unit in zip(self.budgets, units, strict=True)}

    def decided_on(self, prompt: str) -> str:
        """Return a digest of the events after another prompt, whose random tokens ``prompt`` seeds."""
        document, pending = random_document(prompt, self.entries + 1), [PendingUnit(self.action(), 0, 2)]
        (unit,) = generate_units(random_model("llama"), "study", document, pending, _HORIZON, _SEED)
        return _digest(unit)

    def units(self, actions: Sequence[Action], count: int, sharing: SharingOptions = SHARE_ALL) -> list[Unit]:
        """Return a unit of each action, with ``count`` replicates of one prompt, under a random-weight model."""
        pending = [PendingUnit(action, 0, count) for action in actions]
        document = random_document("policies", self.entries)
        return generate_units(random_model("llama"), "study", document, pending, _HORIZON, _SEED, sharing)


def _digest(unit: Unit) -> str:
    return hashlib.sha256(json.dumps(unit.events.drop_columns(["model"]).to_pylist()).encode()).hexdigest()


# --- What steps read -------------------------------------------------------------------------------------------------


class _Watched(Policy):
    """A policy that behaves like another policy and records which entries its streams read.

    Attributes:
        kept: For each layer the positions that ``first_cut`` kept; empty until the policy is asked for its rule.
        read: For each layer in which the rule attended, the places of the entries that each head read in the last step.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.kept: Sequence[Tensor] = ()
        self.read: dict[int, list[list[int]]] = {}

    @property
    def least(self) -> int:
        return self._policy.least

    @property
    def first_cut(self) -> Selector:
        return self._policy.first_cut

    def rule(self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
        self.kept = kept
        return _WatchedRule(self._policy, rule_of(self._policy, prompt, kept, budget), budget, self.read)


class _WatchedRule(GuardedRule):
    """A policy's rule that records which entries the first row of queries reads, and checks its attention to them."""

    def __init__(self, policy: Policy, rule: CacheRule, budget: int, read: dict[int, list[list[int]]]) -> None:
        super().__init__(policy, rule, budget)
        self._read = read

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        replaces = self.replaces(entries.suffix_key.shape[2])
        if replaces:
            self._read[entries.layer] = self._places(entries, scores)
        attention, after = super().attend(entries, scores)
        if replaces and attention is not None:
            plain = _plain_attention(entries, self._read[entries.layer])
            error = float((attention[0].double() - plain).abs().max() / entries.prompt_value.abs().max())
            exact = error < _TOLERANCES[attention.dtype]
            require(
                exact,
                f"step {entries.suffix_key.shape[2]}: the rule's attention differs from softmax attention to the "
                "entries that it reads",
            )
        return attention, after

    def _places(self, entries: StreamEntries, scores: Tensor) -> list[list[int]]:
        """Return for each KV head the places of the entries that the first row of queries reads."""
        prompt, size = entries.prompt_key.shape[1], entries.query.shape[-1]
        count = prompt + entries.suffix_key.shape[2]
        one_hot = torch.eye(count, device=entries.query.device, dtype=entries.query.dtype)
        shares = []
        for values in torch.split(torch.nn.functional.pad(one_hot, (0, -count % size)), size, 1):
            prompt_value = values[:prompt].expand_as(entries.prompt_value).contiguous()
            suffix_value = values[prompt:].expand_as(entries.suffix_value).contiguous()
            query = torch.zeros_like(entries.query)
            probe = replace(entries, query=query, prompt_value=prompt_value, suffix_value=suffix_value)
            attention, _ = super().attend(probe, scores.clone())
            if attention is not None:
                shares.append(attention[0].float().amax(1))  # [KV heads, size]
        return [row.nonzero().squeeze(-1).tolist() for row in torch.cat(shares, -1)[:, :count]]


def _plain_attention(entries: StreamEntries, read: Sequence[Sequence[int]]) -> Tensor:
    """Return the first row's attention to the places that each KV head reads, float64 [KV heads, group, size]."""
    heads = []
    for head, places in enumerate(read):
        key, value = (
            torch.cat([shared[head], suffix[0, head]])[list(places)].double()
            for shared, suffix in (
                (entries.prompt_key, entries.suffix_key),
                (entries.prompt_value, entries.suffix_value),
            )
        )
        heads.append((entries.query[0, head].double() @ key.T * entries.scaling).softmax(-1) @ value)
    return torch.stack(heads)


def _positions_read(
    model: LoadedModel, document: Document, action: Action, tokens: Sequence[int]
) -> list[list[set[int]]]:
    """Feed tokens; return for each step the set of positions that each KV head of each layer reads."""
    assert action.policy is not None  # noqa: S101 - an action of a policy
    watched = _Watched(action.policy)
    with model.computing():
        prepared = model.prepare(document, [replace(action, policy=watched)], len(tokens) + 1)
        kernels = prepared.kernels(1, SHARE_ALL)
    kernels.open([1])
    steps = []
    for step, token in enumerate(tokens, start=1):
        watched.read.clear()
        with model.computing():
            kernels.advance(torch.tensor([token]))
        require(bool(watched.kept), f"step {step}: the policy was not asked for its rule, so there is nothing to check")
        generated = [*range(document.prompt_tokens, document.prompt_tokens + step)]
        heads = []
        for layer, kept in enumerate(watched.kept):
            held = [[*index, *generated] for index in kept.tolist()]
            read = watched.read.get(layer, [range(len(positions)) for positions in held])
            heads += [{positions[place] for place in places} for positions, places in zip(held, read, strict=True)]
        require(
            all(generated[-1] in head for head in heads),
            f"step {step}: a KV head does not read the entry of the token being fed; every head must",
        )
        counts = sorted({len(head) for head in heads})
        require(
            len(counts) == 1,
            f"step {step}: some KV heads read {counts[0]} entries and others {counts[-1]}; all must read equally "
            "many, since one number stands for the bytes of all heads and layers",
        )
        steps.append(heads)
    return steps


def _entries_read(trial: PolicyTrial) -> str:
    """Check the entries that steps read, for each kind of model; dropped entries must never return."""
    document, tokens = random_document("policies", trial.entries), random_document("fed", _HORIZON - 1).tokens
    for (dtype, kv_heads), budget in zip((("float32", 1), ("float32", 4), ("bfloat16", 2)), trial.budgets, strict=True):
        model = random_model("qwen2", dtype, kv_heads=kv_heads)
        before: list[set[int]] = []
        for step, heads in enumerate(_positions_read(model, document, trial.action("own", budget), tokens)):
            where = f"{dtype}, {kv_heads} KV heads, m = {budget}, step {step + 1}"
            require(len(heads[0]) <= budget, f"{where}: {len(heads[0])} entries are read, more than m")
            fed = {document.prompt_tokens + step}
            back = any(now - then - fed for now, then in zip(heads, before, strict=False))
            require(not back, f"{where}: an entry is read again after it was dropped")
            before = heads
    return (
        "attention over at most m entries at every step, dropped entries never return; "
        f"m = {', '.join(map(str, trial.budgets))}"
    )


# --- What events depend on -------------------------------------------------------------------------------------------


def _nothing_dropped(trial: PolicyTrial) -> str:
    more = trial.budgets[-1] - trial.entries  # tokens that are fed before the first entry is dropped
    actions = [trial.action("above", trial.budgets[-1]), trial.action("all", trial.entries + _HORIZON - 1)]
    units = trial.units([*actions, Action("full", "full", Full(), Retention(None))], 4)
    named = (("m above n", more + 1), ("m = n + H - 1", _HORIZON), ("the control", _HORIZON))
    for unit, (name, last) in zip(units, named, strict=True):
        rows = [row for row in unit.events.to_pylist() if row["t"] <= last]
        moved = sum(row["delta"] != 0 or row["f"] != 0 or row["x_token"] != row["y_token"] for row in rows)
        line = f"{name}: delta or f is not 0, or tokens differ, in {moved} of {len(rows)} events"
        require(moved == 0, f"{line}; no entry has been dropped, so they must be as with the full cache")
    return f"delta = f = 0 exactly; with m = n + {more}, until the first entry is dropped"


def _repetition(trial: PolicyTrial) -> str:
    torch.manual_seed(2)
    state = torch.get_rng_state()
    (first,), (second,) = trial.units([trial.action()], 2), trial.units([trial.action()], 2)
    require(first.events.equals(second.events), "a second run, with an equal policy, has other events")
    require_no_draws(state)
    return "the same events, and no draw from torch's state"


def _company(trial: PolicyTrial) -> str:
    """Check that an action has the same events whatever is computed beside it."""
    actions = [trial.action(f"own-{budget}", budget) for budget in trial.budgets]
    for action, unit in zip(actions, trial.units(actions, 4), strict=True):
        for count, sharing, how in (
            (1, SHARE_ALL, "alone with 1 replicate"),
            (4, _NOTHING_SHARED, "alone with nothing shared among replicates"),
        ):
            (other,) = trial.units([action], count, sharing)
            same = other.events.equals(unit.events.slice(0, len(other.events)))
            require(same, f"action '{action.name}' has other events {how} than beside other actions")
        require(
            unit.record["batch_deviation"] == 0.0,
            f"action '{action.name}': results of a stream depend on the streams computed beside it; they must not",
        )
    return "the same events alone, in parts and with nothing shared"


def _embedded_model(trial: PolicyTrial) -> str:
    document = embedded_document()
    count = max(document.prompt_tokens * 3 // 4, min(trial.least + 16, document.prompt_tokens))
    action = trial.action("own", count)
    beside = replace(action, name="beside", retention=Retention(count + 2))
    return same_events(action, beside, load_model(EMBEDDED_ID), document)


_BUDGETS = "m of half of the prompt, of few entries, and above n"
PolicyTrial.checks = (
    Check("entries read", f"{_BUDGETS}; 1, 2 and 4 KV heads, bfloat16", _entries_read),
    Check("nothing dropped", "m = n + H - 1, the control, and m above n", _nothing_dropped),
    Check("repetition", "a second run, with an equal policy", _repetition),
    Check("company", f"{_BUDGETS}; beside other actions, and alone", _company),
    *common_checks("prompts"),
    Check("embedded model", "2 pairs of 8 tokens after a needle prompt of 396", _embedded_model),
)

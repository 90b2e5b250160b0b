"""The checks of decode-time policies: each tries a policy, and returns a line about the result or raises an error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.checks.elsewhere import ELSEWHERE, IN_TURN, same_after_others, same_elsewhere
from kvdrift.generator.checks.random_models import embedded_document, random_document, random_model, same_events
from kvdrift.generator.checks.real_cache import TOLERANCE, Law, RealSide, RealStream, WatchedStream, plain_network
from kvdrift.generator.checks.tried import Check, Tried, first_token_found, identity_found, require
from kvdrift.generator.coupling.streams import ALL_SAVINGS, Savings
from kvdrift.generator.coupling.uniforms import uniform_table
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.generator.selectors.policies import Policy
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.model import LoadedModel
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import PLAIN, SWRB

_PROMPT, _HORIZON, _SEED = 131, 20, 7
_FEW = 12  # entries: fewer than are generated
_ROOM = 400  # what a policy can need: prompts stay short enough for a step to be tried with every entry
_RANDOM = "random:llama"


@dataclass(frozen=True, eq=False)
class PolicySubject(Tried[Policy]):
    """A decode-time policy that ``kvdrift check`` tries."""

    kind: ClassVar[str] = "policy"
    decides: ClassVar[str] = "events"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > _ROOM:
            raise InputError(
                f"policy '{self.name}' needs at least {self.least} entries, more than the {_ROOM} that the checks have "
                "prompts for; make it fewer with --parameter"
            )

    @staticmethod
    def part_of(action: Action) -> Policy:
        """Return the action's policy."""
        assert action.policy is not None  # noqa: S101 - an action of this class has one
        return action.policy

    @property
    def least(self) -> int:
        """The smallest m that the policy accepts."""
        return self.action().least_budget

    @property
    def entries(self) -> int:
        """The number n of prompt entries: half of them hold what the policy needs and leave it a choice."""
        return max(_PROMPT, 2 * (self.least + 16) + 1)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Three values of m: half of the prompt, fewer than generated tokens, and more than the prompt."""
        return (self.entries // 2, max(_FEW, self.least), self.entries + 3)

    @property
    def document(self) -> Document:
        """Return a prompt of random tokens."""
        return random_document("policies", self.entries)

    def action(self, name: str = "own", keep: int | str = "1/2", **changes: Any) -> Action:
        """Return an action of the policy; by default m is half of the prompt's entries."""
        chosen: dict[str, Any] = {"policy": {**self.parameters, **changes, "name": self.name}, "keep": keep}
        return build_action(ActionSection(name=name, **chosen), self.folder)

    def generate(self) -> list[Unit]:
        """Return units of one prompt: of every budget, of a budget that is never too small, and of the control."""
        actions = [self.action(f"own-{budget}", budget) for budget in self.budgets]
        actions.append(self.action("all", self.entries + _HORIZON - 1))
        return self.units([*actions, Action("full", "full", Full(), Retention(None))])

    def decided(self) -> dict[str, str]:
        """Return digests of the events, by budget."""
        units = self.units([self.action(f"own-{budget}", budget) for budget in self.budgets], 2)
        return {f"m = {m}": _digest(unit) for m, unit in zip(self.budgets, units, strict=True)}

    def decided_of(self, prompt: str) -> str:
        """Return a digest of the events after another prompt."""
        document, pending = random_document(prompt, self.entries + 1), [PendingUnit(self.action(), 0, 2)]
        (unit,) = generate_units(random_model("llama"), "study", document, pending, _HORIZON, _SEED)
        return _digest(unit)

    def units(
        self, actions: Sequence[Action], count: int = 4, estimator: str = PLAIN, savings: Savings = ALL_SAVINGS
    ) -> list[Unit]:
        """Return units of the prompt under a random-weight model."""
        pending = [PendingUnit(action, 0, count, estimator) for action in actions]
        return generate_units(random_model("llama"), "study", self.document, pending, _HORIZON, _SEED, savings)

    def side(self, action: Action) -> RealSide:
        """Return the compressed side of the prompt, with a real cache."""
        return _side(_RANDOM, random_model("llama"), self.document, action, _HORIZON)


def _digest(unit: Unit) -> str:
    return hashlib.sha256(json.dumps(unit.events.drop_columns(["model"]).to_pylist()).encode()).hexdigest()


def _side(network: str, model: LoadedModel, document: Document, action: Action, horizon: int) -> RealSide:
    return RealSide(plain_network(network), model, document, action, PolicySubject.part_of(action), horizon)


# --- What steps read -------------------------------------------------------------------------------------------------


def _entries_read(subject: PolicySubject) -> str:
    """Check the entries that steps read, for each kind of model; dropped entries must never return."""
    kinds = (("float32", 1), ("float32", 4), ("bfloat16", 2))
    for (dtype, kv_heads), budget in zip(kinds, subject.budgets, strict=True):
        model, document = random_model("qwen2", dtype, kv_heads=kv_heads), subject.document
        action = subject.action("own", budget)
        stream = WatchedStream(model, document, action, subject.part, _HORIZON)
        before: list[set[int]] = []
        for step, token in enumerate(random_document("fed", _HORIZON - 1).tokens):
            where = f"{dtype}, {kv_heads} KV heads, m = {budget}, step {step + 1}"
            read = stream.advance(token)
            require(read is not None, f"{where}: nothing is ever dropped")
            heads = [set(head) for layer in read or [] for head in layer]
            most = max(map(len, heads))
            require(most <= budget, f"{where}: {most} entries are read")
            own = {document.prompt_tokens + step}
            back = any(now - then - own for now, then in zip(heads, before, strict=False))
            require(not back, f"{where}: an entry is read again after it was dropped")
            before = heads
    return f"at most m at every step, what is dropped never returns; m = {', '.join(map(str, subject.budgets))}"


def _real_removal(subject: PolicySubject) -> str:
    units = subject.generated()
    found = [
        _held_against(_RANDOM, random_model("llama"), subject.document, subject.action(f"own-{budget}", budget), unit)
        for budget, unit in zip(subject.budgets, units[: len(subject.budgets)], strict=True)
    ]
    most = max(float(np.max(unit.events["delta"].to_numpy())) for unit in units[: len(subject.budgets)])
    require(most > 0, "delta is 0 though entries are dropped")
    return f"the same tokens in {sum(found)} positions, delta and f to {TOLERANCE:.0e}; delta up to {most:.2f}"


def _held_against(network: str, model: LoadedModel, document: Document, action: Action, unit: Unit) -> int:
    """Compare a coupled unit's first replicate with real caches; return its positions up to the first end."""
    rows = [row for row in unit.events.to_pylist() if row["replicate"] == 0]
    u_x = uniform_table(_SEED, document.doc, None, [0], len(rows), 1)[0]
    u_y = uniform_table(_SEED, document.doc, action.name, [0], len(rows), 2)[0]
    reference = RealStream(plain_network(network), document.tokens)
    own, forced = (_side(network, model, document, action, len(rows)) for _ in range(2))
    for at, row in enumerate(rows):
        p, q, f = reference.law, own.law, forced.law
        where = f"action '{action.name}', t = {at + 1}"
        for name, wanted in (("delta", _apart(p, q)), ("f", _apart(p, f))):
            require(abs(row[name] - wanted) < TOLERANCE, f"{where}: {name} is {row[name]}, by real caches {wanted}")
        x = _drawn(p, u_x[at, 0])
        same = u_y[at, 0] < q[x] / p[x]
        y = x if same else _drawn(np.maximum(q - p, 0.0), u_y[at, 1])
        require((row["x_token"], row["y_token"]) == (x, y), f"{where}: tokens are others than by real caches")
        if row["x_eos"] or row["y_eos"] or at + 1 == len(rows):
            return at + 1
        reference.advance(x)
        own.advance(y)
        forced.advance(x)
    return len(rows)


def _apart(p: Law, q: Law) -> float:
    return float(np.abs(p - q).sum()) / 2


def _drawn(weights: Law, u: float) -> int:
    """Return the first token at which the running sum exceeds u times the total."""
    running = np.cumsum(weights)
    return int(np.searchsorted(running, u * running[-1], side="right"))


def _residual_branching(subject: PolicySubject) -> str:
    """Check that distances of scans and branches equal those of real caches along the same histories, shared or not."""
    action = subject.action("own", subject.budgets[0])
    (unit,) = subject.units([action], 2, SWRB)
    (again,) = subject.units([action], 2, SWRB, _NOTHING_SHARED)
    require(unit.events.equals(again.events), "with nothing shared, events are others")
    positions = 0
    for replicate in range(2):
        own = [row for row in unit.events.to_pylist() if row["replicate"] == replicate]
        scan, branch = ([row for row in own if row["kind"] == kind] for kind in ("scan", "branch"))
        common = [row["x_token"] for row in scan if not row["x_eos"]]
        positions += _distances(subject, action, common, common, scan, 0)
        if branch:
            start = branch[0]["t"] - 1
            x, y = (common[:start] + [row[side] for row in branch] for side in ("x_token", "y_token"))
            positions += _distances(subject, action, x, y, branch, start)
    return f"scans and branches are those of real caches in {positions} positions"


def _distances(
    subject: PolicySubject, action: Action, x: Sequence[int], y: Sequence[int], rows: Sequence[Any], start: int
) -> int:
    """Compare the distances of rows, from position ``start`` to an end, with real caches along two histories."""
    reference, own = RealStream(plain_network(_RANDOM), subject.document.tokens), subject.side(action)
    for at in range(start + len(rows)):
        if at:
            reference.advance(x[at - 1])
            own.advance(y[at - 1])
        if at >= start:
            row, wanted = rows[at - start], _apart(reference.law, own.law)
            where = f"{row['kind']} of replicate {row['replicate']}, t = {at + 1}: delta is {row['delta']}"
            require(abs(row["delta"] - wanted) < TOLERANCE, f"{where}, by real caches {wanted}")
            if row["x_eos"] or row["y_eos"]:
                return at - start + 1
    return len(rows)


# --- What events depend on -------------------------------------------------------------------------------------------

_NOTHING_SHARED = Savings(**{field.name: False for field in fields(Savings) if field.name != "fused"})


def _nothing_dropped(subject: PolicySubject) -> str:
    *_, above, whole, control = subject.generated()
    more = subject.budgets[-1] - subject.entries  # tokens that are fed before the first entry is dropped
    units = ((whole, "m = n + H - 1", _HORIZON), (control, "the control", _HORIZON), (above, "m above n", more + 1))
    for unit, name, last in units:
        rows = [row for row in unit.events.to_pylist() if row["t"] <= last]
        moved = sum(row["delta"] != 0 or row["f"] != 0 or row["x_token"] != row["y_token"] for row in rows)
        require(moved == 0, f"{name}: delta or f is not 0, or tokens differ, in {moved} of {len(rows)} events")
    return f"delta = f = 0 exactly; with m = n + {more}, until the first entry is dropped"


def _repetition(subject: PolicySubject) -> str:
    torch.manual_seed(2)
    state, twin = torch.get_rng_state(), subject.action()
    alike = twin.policy == subject.part and hash(twin.policy) == hash(subject.part)
    require(alike, "equal parameters make unequal policies")
    first, second = subject.units([subject.action()], 2), subject.units([twin], 2)
    require(first[0].events.equals(second[0].events), "a second run's events are others")
    require(torch.equal(torch.get_rng_state(), state), "numbers are drawn from torch's own state; seed a generator")
    return "the same events, and no draw from torch's state"


def _company(subject: PolicySubject) -> str:
    """Check that an action has the same events whatever is computed beside it."""
    units = subject.generated()
    for budget, unit in zip(subject.budgets, units, strict=False):
        action = subject.action(unit.record["action"], budget)
        for count, savings, said in ((1, ALL_SAVINGS, "alone and fewer"), (4, _NOTHING_SHARED, "with nothing shared")):
            (other,) = subject.units([action], count, savings=savings)
            same = other.events.equals(unit.events.slice(0, len(other.events)))
            require(same, f"m = {budget}: events are others {said}")
        require(unit.record["batch_deviation"] == 0.0, f"m = {budget}: steps depend on the rows beside")
    return "the same events alone, in parts and with nothing shared"


def _embedded_model(subject: PolicySubject) -> str:
    document, model = embedded_document(), load_model(EMBEDDED_ID)
    count = max(document.prompt_tokens * 3 // 4, min(subject.least + 16, document.prompt_tokens))
    own = subject.action("own", count)
    found = same_events(own, replace(own, name="beside", retention=Retention(count + 2)), document)
    (unit,) = generate_units(model, "study", document, [PendingUnit(own, 0, 1)], 8, _SEED)
    positions = _held_against(EMBEDDED_ID, model, document, own, unit)
    return f"{found}; by real caches the same {positions}"


_BUDGETS = "m of half of the prompt, few, and above n"
POLICY_CHECKS = (
    Check("entries read", f"{_BUDGETS}; 1, 2 and 4 KV heads, bfloat16", _entries_read),
    Check("real removal", f"{_BUDGETS}; a cache from which entries are taken out", _real_removal),
    Check("first token", "4 pairs of continuations", first_token_found),
    Check("nothing dropped", "m = n + H - 1, the control, and m above n", _nothing_dropped),
    Check("repetition", "a second run, and a twin's", _repetition),
    Check("other prompts", IN_TURN, same_after_others),
    Check("another process", ELSEWHERE, same_elsewhere),
    Check("company", f"{_BUDGETS}; beside others, and alone", _company),
    Check("residual branching", "2 scans with their branches, and real caches along them", _residual_branching),
    Check("identity", "each parameter changed", identity_found),
    Check("embedded model", "2 pairs of 8 tokens after a needle prompt of 396, and real caches", _embedded_model),
)

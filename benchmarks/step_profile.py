"""Operations of one decoding step on a device: copies to and from the host, waits of the host, and launches.

    python -m benchmarks.step_profile                     # on a pretend device, which takes no GPU
    python -m benchmarks.step_profile --estimator swrb --json
    python -m benchmarks.step_profile --device cuda

A small model of random weights decodes a few replicates of three actions, among them the control. Every operation that
torch dispatches is counted as a copy (or another operation that the host waits for), or as a launch; views and
allocations are left out. Our own operations count as one launch each, as on CUDA; so do torch's, though some take
several.

Each number is that of the step with the most operations of its kind. "A layer" is half of what two more layers add. The
outputs of these two layers are zero, so that both models draw the same tokens.

A step either takes new streams from the host, or is begun with the streams of the step before. A CUDA graph can replay
the second kind only if the step repeats another: the same operations, with the same shapes, strides, offsets and
numbers, on memory at the same addresses. The profile counts steps that do not repeat the first one of their bucket. The
steps of a bucket have the same numbers of rows, tiles and partial results, and draw in the same way.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import SEED, Case, random_document, random_model
from benchmarks.measurement import benchmark_parser
from benchmarks.pretend_device import SECOND, TwoDevices, tensors_of, to_second_device
from generator.actions import Action
from generator.coupling.residual_branching import PURPOSES, branch_replicates
from generator.coupling.rollout import ActionReplicates, rollout
from generator.coupling.streams import Savings
from generator.coupling.uniforms import uniform_table
from generator.selectors import Full, Recent, SnapKV
from generator.transformer.model import LoadedModel
from schema.retention import Retention
from schema.tables import PLAIN, SWRB

PRETEND = "pretend"
LAYERS, SILENT = 2, 2  # of the shallower model, and what the deeper one has besides
STEPS = 64
CASE = Case(
    layers=LAYERS + SILENT, width=64, inner_width=96, heads=4, kv_heads=2, vocabulary=5000, entries=300, replicates=4,
    horizon=STEPS + 1,
)  # fmt: skip

# Allocations, views that torch does not call so, and a copy.
_NO_LAUNCHES = {
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
        "detach", "alias", "lift_fresh", "_local_scalar_dense",
    )
}  # fmt: skip
# The host learns a number, often a shape, from the device.
_WAITING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "argwhere", "bincount", "_unique",
        "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    )
}  # fmt: skip


Call = tuple[Any, ...]
"""An operation's name, its tensors' shapes, strides and offsets, and its other arguments."""


@dataclass
class Recorded:
    """What a CUDA graph of a step would hold fast.

    Attributes:
        calls: All operations on the device, views included, in order, but no copies between host and device.
        addresses: Those of the memory that the operations use, in order, except memory that they allocate.
        allocated: The addresses of memory that the operations allocate.
    """

    calls: list[Call] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    allocated: set[int] = field(default_factory=set)


@dataclass
class StepOperations:
    """The operations of one decoding step, sorted by what they cost the host.

    Attributes:
        up: Copies to the device.
        down: Copies to the host, for each of which the host waits at once.
        later: Copies to the host that the host does not wait for until it has begun the next step.
        waiting: Other operations for which the host waits.
        launches: Launches.
        begun: Whether the step was begun with the streams of the step before.
        given_up: Whether the step was begun in vain.
        recorded: What a graph of the step would hold fast.
    """

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    later: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    begun: bool = False
    given_up: bool = False
    recorded: Recorded = field(default_factory=Recorded, compare=False)

    @property
    def copies(self) -> int:
        """Copies between host and device, including operations for which the host waits."""
        return self.up.total() + self.down.total() + self.later.total() + self.waiting.total()

    @property
    def bucket(self) -> Sequence[Call | None]:
        """The first attention to prompts and comparison of laws: numbers of rows, tiles, partial results and draws."""
        kinds = ("kvdrift::prompt_attention", "kvdrift::pair_sums")
        return tuple(next((call for call in self.recorded.calls if call[0] == kind), None) for kind in kinds)


def changed_steps(steps: Sequence[StepOperations]) -> tuple[int, int]:
    """Return how many steps that were begun do not repeat the first such step of their bucket.

    Returns:
        The number of steps with other calls, and of steps with other addresses.
    """
    first: dict[Sequence[Call | None], Recorded] = {}
    pairs = [(step.recorded, first.setdefault(step.bucket, step.recorded)) for step in steps if step.begun]
    return sum(one.calls != other.calls for one, other in pairs), sum(
        one.addresses != other.addresses for one, other in pairs
    )


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this block, operations on other devices than the CPU are counted, step by step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[StepOperations] = []
        self._recorded = Recorded()
        self._given: dict[int, Any] = {}  # memory by its address, which is no other's as long as it is held here

    def next_step(self, *, begun: bool = False) -> None:
        """Count the following operations as another step; nothing is counted before the first call.

        What follows a copy that is read later belongs to the graph of a step that is ``begun``.
        """
        self._recorded = self._recorded if begun else Recorded()
        self.steps.append(StepOperations(begun=begun, recorded=self._recorded))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.steps:
            return func(*args, **kwargs)
        self._count(func, args, kwargs)
        recorded, used = self._recorded, _memory((args, *kwargs.values()))
        given = {address: memory for address, memory in used.items() if address not in recorded.allocated}
        recorded.addresses += given
        self._given |= given
        result = func(*args, **kwargs)
        recorded.allocated |= _memory([result]).keys() - used.keys()
        return result

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        step, name = self.steps[-1], func.name().partition(".")[0]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors_of((args, *kwargs.values())))
        target = kwargs.get("device")
        ends_on_device = on_device if target is None else torch.device(target).type != "cpu"
        if name in {"aten::_to_copy", "aten::copy_"}:
            source = args[-1 if name == "aten::_to_copy" else 1].device.type != "cpu"
            ends_on_device = ends_on_device if name == "aten::_to_copy" else args[0].device.type != "cpu"
            if source != ends_on_device:
                later = not ends_on_device and (kwargs.get("non_blocking") or args[2:] == (True,))
                (step.up if ends_on_device else step.later if later else step.down)[name] += 1
                self._recorded = Recorded() if later else self._recorded
                return
        if not on_device and not ends_on_device:
            return
        self._recorded.calls.append((name, *_described((*args, *kwargs.values()))))
        if func.is_view:
            return
        if name in _WAITING or _waits_for_a_shape(name, args, kwargs):
            step.waiting[name] += 1
        elif name == "aten::index_put_" and not args[2].dim():  # on CUDA such a number is copied there
            step.up[name] += 1
        if name not in _NO_LAUNCHES:
            step.launches[name] += 1


def _waits_for_a_shape(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation takes a mask as an index, or repeats as often as a tensor says."""
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    masks = name in {"aten::index", "aten::index_put", "aten::index_put_"}
    return masks and any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1])


def _memory(arguments: Any) -> dict[int, Any]:
    """Return the memory on devices that an operation's arguments use, by its address."""
    tensors = [tensor for tensor in tensors_of(arguments) if tensor.device.type != "cpu"]
    storages = [getattr(tensor, "held", tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages}


def _described(arguments: Any) -> Iterator[Any]:
    """Yield what a graph holds fast of an operation's arguments, except addresses."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield tuple(argument.shape), argument.stride(), argument.storage_offset(), argument.dtype
        else:
            yield tuple(_described(argument)) if isinstance(argument, (list, tuple)) else argument


class _Watched:
    """``StreamKernels`` that begin a step of ``operations`` with each selection of streams, and each step ahead."""

    def __init__(self, kernels: Any, operations: Operations) -> None:
        self._kernels, self._operations = kernels, operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def select(self, rows: Tensor) -> None:
        self._operations.next_step()
        self._kernels.select(rows)

    @property
    def ahead(self) -> _Watched | None:
        return None if self._kernels.ahead is None else self

    def follow(self, tokens: Tensor) -> Tensor:
        self._operations.next_step(begun=True)
        laws: Tensor = self._kernels.follow(tokens)
        return laws

    def give_up(self) -> None:
        self._operations.steps[-1].given_up = True
        self._kernels.give_up()


@dataclass(frozen=True)
class StepProfile:
    """The largest counts among steps.

    Attributes:
        steps: The number of counted steps.
        copies: Copies of the step with the most copies, including waiting operations.
        mean_copies: Copies per step.
        up: Copies to the device in that step, by operation.
        down: Copies to the host for which the host waits at once.
        later: Copies to the host for which the host waits only after it has begun the next step.
        waiting: Other operations for which the host waits.
        launches: Launches of the step with the most launches, by operation.
        layer: The part of each that a layer adds, by operation; fractions if layers share an operation.
        begun: The number of steps begun with the streams of the step before.
        given_up: The number of those that were begun in vain.
        sent_to_begun: Copies to the device in all of those.
        buckets: The number of their buckets.
        changed: The number of those whose operations, shapes or numbers are not those of their bucket.
        moved: The number of those that use memory at other addresses.
    """

    steps: int
    copies: int
    mean_copies: float
    up: dict[str, int]
    down: dict[str, int]
    later: dict[str, int]
    waiting: dict[str, int]
    launches: dict[str, int]
    layer: dict[str, float]
    begun: int
    given_up: int
    sent_to_begun: int
    buckets: int
    changed: int
    moved: int

    @property
    def outside(self) -> dict[str, float]:
        """Launches outside layers, by operation."""
        found = {name: count - LAYERS * self.layer.get(name, 0) for name, count in self.launches.items()}
        return {name: count for name, count in found.items() if count}

    def facts(self) -> dict[str, Any]:
        """All numbers, and the sums of launches."""
        return {
            "steps": self.steps, "copies": self.copies, "mean_copies": round(self.mean_copies, 1), "up": self.up,
            "down": self.down, "later": self.later, "waiting": self.waiting, "launches": sum(self.launches.values()),
            "launches_a_layer": sum(self.layer.values()), "launches_outside": sum(self.outside.values()),
            "begun": self.begun, "given_up": self.given_up, "sent_to_begun": self.sent_to_begun,
            "buckets": self.buckets, "changed": self.changed, "moved": self.moved,
            "by_operation": {"launches": self.launches, "a_layer": self.layer, "outside": self.outside},
        }  # fmt: skip


def profile_steps(device: str, estimator: str, savings: Savings) -> StepProfile:
    """Decode with both models and count the operations of each step.

    Args:
        device: "pretend", or a device as torch names it.
        estimator: Coupled rollouts (``PLAIN``) or residual branching (``SWRB``).
        savings: The computations to share, and whether operations are fused.
    """
    shallow, deep = (_steps(model, estimator, savings) for model in _models(device))
    copied = max(shallow, key=lambda step: step.copies)
    busiest, deeper = max(zip(shallow, deep, strict=True), key=lambda steps: steps[0].launches.total())
    names = sorted(deeper.launches, key=lambda name: (-deeper.launches[name], name))
    added = {name: (deeper.launches[name] - busiest.launches[name]) / SILENT for name in names}
    begun = [step for step in shallow if step.begun]
    return StepProfile(
        len(shallow), copied.copies, sum(step.copies for step in shallow) / len(shallow), dict(copied.up),
        dict(copied.down), dict(copied.later), dict(copied.waiting), {name: busiest.launches[name] for name in names},
        {name: count for name, count in added.items() if count},
        len(begun), sum(step.given_up for step in begun), sum(step.up.total() for step in begun),
        len({step.bucket for step in begun}), *changed_steps(begun),
    )  # fmt: skip


def _models(device: str) -> Iterator[LoadedModel]:
    """Yield a model, and a model with more layers that gives the same results."""
    whole = random_model(replace(CASE, device="cpu" if device == PRETEND else device), plain=True)
    for layer in whole.network.model.layers[LAYERS:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for layers in (LAYERS, LAYERS + SILENT):
        network = copy.deepcopy(whole.network)
        network.model.layers = network.model.layers[:layers]
        network.config.num_hidden_layers = layers
        if device == PRETEND:
            to_second_device(network)
        yield replace(whole, network=network, device=str(SECOND) if device == PRETEND else device)


def _steps(model: LoadedModel, estimator: str, savings: Savings) -> Sequence[StepOperations]:
    half = Retention.parse("1/2")
    actions = [
        Action("snapkv-half", "snapkv", SnapKV(), half), Action("recent-half", "recent", Recent(), half),
        Action("full", "full", Full(), Retention(None)),
    ]  # fmt: skip
    document, replicates = random_document(CASE), range(CASE.replicates)

    def uniforms(action: str | None, purposes: int) -> Any:
        return uniform_table(SEED, document.doc, action, replicates, CASE.horizon, purposes)

    def of_actions(purposes: int) -> list[ActionReplicates]:
        return [
            ActionReplicates(cache, tuple(replicates), uniforms(action.name, purposes))
            for cache, action in enumerate(actions, start=1)
        ]

    operations, streams = Operations(), 3 * len(actions) * CASE.replicates
    with _on(model.device), model.computing():
        prepared = model.prefill(document, actions, CASE.horizon).evict()
        kernels: Any = _Watched(prepared.kernels(streams, savings, parked=streams), operations)
        with operations:
            if estimator == SWRB:
                branch_replicates(kernels, of_actions(PURPOSES), CASE.horizon, savings)
            else:
                rollout(kernels, of_actions(2), replicates, uniforms(None, 1), CASE.horizon, savings)
    return operations.steps


@contextmanager
def _on(device: str) -> Iterator[None]:
    """Compute on the pretend device, if ``device`` is that one; its tensors cannot be inference tensors.

    For inference tensors torch would not dispatch operations separately, so neither copies nor waits would be seen.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "inference_mode", torch.no_grad))
        if device == str(SECOND):
            stack.enter_context(TwoDevices())  # type: ignore[no-untyped-call]
            stack.enter_context(
                mock.patch("generator.transformer.prompts.prepared.available_bytes", return_value=2**33)
            )
        yield


def _table(facts: dict[str, Any]) -> Iterator[str]:
    copies = {way: sum(facts[way].values()) for way in ("up", "down", "later", "waiting")}
    yield (
        f"copies a step: {facts['copies']} at most ({copies['up']} up, {copies['down']} down, {copies['later']} down "
        f"and read later, {copies['waiting']} of operations that wait), {facts['mean_copies']} in the mean of "
        f"{facts['steps']} steps"
    )
    yield (
        f"steps begun with the streams of the step before: {facts['begun']}, {facts['given_up']} in vain; "
        f"{facts['sent_to_begun']} copies to the device; {facts['changed']} with other calls and "
        f"{facts['moved']} with other addresses than the first of their bucket, in {facts['buckets']} buckets"
    )
    for name, count in Counter(facts["waiting"]).most_common():
        yield f"  waits for the device: {name} {count}"
    yield f"{'launches':48}    a step  a layer  outside"
    for name, count in facts["by_operation"]["launches"].items():
        layer, outside = (facts["by_operation"][part].get(name, 0) for part in ("a_layer", "outside"))
        yield f"{name:48}{count:10}{layer:9g}{outside:9g}"
    total = [facts[name] for name in ("launches", "launches_a_layer", "launches_outside")]
    yield f"{'all':48}{total[0]:10}{total[1]:9g}{total[2]:9g}"


def main() -> None:
    """Profile a step with the given options."""
    parser = benchmark_parser("step_profile", "Count what a decoding step asks of a device.")
    parser.add_argument("--device", default=PRETEND, help="cuda, or the pretend device that every machine has")
    parser.add_argument("--estimator", choices=[PLAIN, SWRB], default=PLAIN)
    parser.add_argument("--plain", action="store_true", help="without operations that one launch computes")
    options = parser.parse_args()
    facts = profile_steps(options.device, options.estimator, Savings(fused=not options.plain)).facts()
    if options.json:
        print(json.dumps({"benchmark": "step_profile", **vars(options), "layers": LAYERS, **facts}))
        return
    fused = "plain operations" if options.plain else "fused operations"
    print(f"step profile: {options.device}, {options.estimator}, {fused}, {LAYERS} layers")
    print(*_table(facts), sep="\n")


if __name__ == "__main__":
    main()

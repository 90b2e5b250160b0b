"""The operations that torch dispatches in each decoding step, sorted by what they cost the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pretend_device import tensors_of

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
    """What a CUDA graph of a step would hold fast."""

    calls: list[Call] = field(default_factory=list)  # all on the device, in order, without copies from and to the host
    addresses: list[int] = field(default_factory=list)  # of memory that the operations use and do not allocate
    allocated: set[int] = field(default_factory=set)  # the addresses of memory that the operations allocate


@dataclass
class StepOperations:
    """The operations of one decoding step, sorted by what they cost the host; views are recorded alone."""

    up: Counter[str] = field(default_factory=Counter)  # copies to the device
    down: Counter[str] = field(default_factory=Counter)  # copies to the host, which waits for each at once
    later: Counter[str] = field(default_factory=Counter)  # copies that the host waits for in the next step
    waiting: Counter[str] = field(default_factory=Counter)  # other operations that the host waits for
    launches: Counter[str] = field(default_factory=Counter)
    begun: bool = False  # with the streams of the step before
    given_up: bool = False  # begun in vain
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
    """Return how many steps that were begun do not repeat the first of their bucket, in calls and in addresses."""
    first: dict[Sequence[Call | None], Recorded] = {}
    pairs = [(step.recorded, first.setdefault(step.bucket, step.recorded)) for step in steps if step.begun]
    changed = sum(one.calls != other.calls for one, other in pairs)
    return changed, sum(one.addresses != other.addresses for one, other in pairs)


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

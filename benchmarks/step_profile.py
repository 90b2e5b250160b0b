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

import argparse
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases import SEED, Case, random_document, random_model
from benchmarks.measurement import Measurement, benchmark_parser, run
from benchmarks.pretend_device import SECOND, TwoDevices, to_second_device
from benchmarks.step_operations import Operations, StepOperations, changed_steps
from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.residual_branching import PURPOSES, branch_replicates
from kvdrift.generator.coupling.rollout import ActionReplicates, rollout
from kvdrift.generator.coupling.streams import Savings
from kvdrift.generator.coupling.uniforms import uniform_table
from kvdrift.generator.selectors import Full, Recent, SnapKV
from kvdrift.generator.transformer.model import LoadedModel
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import PLAIN, SWRB

PRETEND = "pretend"
LAYERS, SILENT = 2, 2  # of the shallower model, and what the deeper one has besides
STEPS = 64
CASE = Case(
    layers=LAYERS + SILENT, width=64, inner_width=96, heads=4, kv_heads=2, vocabulary=5000, entries=300, replicates=4,
    horizon=STEPS + 1,
)  # fmt: skip


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

    def feed(self, tokens: Tensor) -> None:
        self._operations.next_step(begun=True)
        self._kernels.feed(tokens)

    def give_up(self) -> None:
        self._operations.steps[-1].given_up = True
        self._kernels.give_up()


def profile_steps(device: str, estimator: str, savings: Savings) -> dict[str, Any]:
    """Decode with both models and count the operations of each step.

    Args:
        device: "pretend", or a device as torch names it.
        estimator: Coupled rollouts (``PLAIN``) or residual branching (``SWRB``).
        savings: The computations to share, and whether operations are fused.

    Returns:
        The facts that are printed: copies and waits of the step with the most copies, launches of the step with the
        most launches, the part of these that a layer adds, and counts of the steps begun with the streams of the step
        before.
    """
    shallow, deep = (_steps(model, estimator, savings) for model in _models(device))
    copied = max(shallow, key=lambda step: step.copies)
    busiest, deeper = max(zip(shallow, deep, strict=True), key=lambda steps: steps[0].launches.total())
    names = sorted(deeper.launches, key=lambda name: (-deeper.launches[name], name))
    added = {name: (deeper.launches[name] - busiest.launches[name]) / SILENT for name in names}
    outside = {name: busiest.launches[name] - LAYERS * added[name] for name in names}
    begun = [step for step in shallow if step.begun]
    changed, moved = changed_steps(begun)
    return {
        "steps": len(shallow), "copies": copied.copies,
        "mean_copies": round(sum(step.copies for step in shallow) / len(shallow), 1),
        **{way: dict(getattr(copied, way)) for way in ("up", "down", "later", "waiting")},
        "launches": busiest.launches.total(), "launches_a_layer": sum(added.values()),
        "launches_outside": sum(outside.values()),
        "begun": len(begun), "given_up": sum(step.given_up for step in begun),
        "sent_to_begun": sum(step.up.total() for step in begun), "buckets": len({step.bucket for step in begun}),
        "changed": changed, "moved": moved,
        "by_operation": {
            name: {"launches": busiest.launches[name], "a_layer": added[name], "outside": outside[name]}
            for name in names
        },
    }  # fmt: skip


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
        # Operations are counted one by one, and what a graph launches is not dispatched.
        stack.enter_context(mock.patch("kvdrift.generator.coupling.step_graphs.captures", return_value=False))
        if device == str(SECOND):
            stack.enter_context(TwoDevices())  # type: ignore[no-untyped-call]
            stack.enter_context(
                mock.patch("kvdrift.generator.transformer.prompts.prepared.available_bytes", return_value=2**33)
            )
        yield


def measure_all(options: argparse.Namespace, _: Path) -> Iterator[Measurement]:
    """Profile a step with the given options."""
    said = {"device": options.device, "estimator": options.estimator, "plain": options.plain, "layers": LAYERS}
    yield [], said | profile_steps(options.device, options.estimator, Savings(fused=not options.plain))


if __name__ == "__main__":
    parser = benchmark_parser("step_profile", "Count what a decoding step asks of a device.")
    parser.add_argument("--device", default=PRETEND, help="cuda, or the pretend device that every machine has")
    parser.add_argument("--estimator", choices=[PLAIN, SWRB], default=PLAIN)
    parser.add_argument("--plain", action="store_true", help="without operations that one launch computes")
    run(parser, "steps", measure_all)

"""Tests that need a GPU; `python -m pytest -m gpu -rs` runs them on a machine with one.

All except ``--gpus all`` also run on the pretended device, marked slow; only CUDA itself is then not tested.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.agreement import assert_kept_alike
from fixtures.common_actions import CONTROL, HALF_SNAPKV, SHARED_SNAPKV, assert_near, assert_same_kept
from fixtures.devices import Device
from fixtures.distributions import large_distributions
from fixtures.house import ROOT
from fixtures.processes import run_command
from fixtures.small_study import write_study
from fixtures.stored_rows import assert_same
from fixtures.study_files import load_study

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import random_document, save_random_model
from kvdrift.generator.coupling.distributions import NOTHING, DistributionTable, fused_draws
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SELECTORS, Full
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.service.client import RemoteGenerator, ServiceAddress
from kvdrift.generator.service.server import GenerationService, identity_of
from kvdrift.generator.transformer.loading import load_model
from kvdrift.log.store import Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.tables import PLAIN, SWRB

LENGTH = 4099
DOCUMENT = random_document(f"d{LENGTH}", LENGTH)
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

WITHOUT_TRITON = """
import pickle, sys
from pathlib import Path
sys.modules["triton"] = None  # which import takes for: there is none
from fixtures.devices import one_of
from kvdrift.generator.generation import generate_units
from kvdrift.generator.transformer.fused.layers import slower
name, model, asked, answer = sys.argv[1:]
with one_of(name) as device:
    loaded = device.load(Path(model), "float32")
    units = generate_units(loaded, *pickle.loads(Path(asked).read_bytes()))
    Path(answer).write_bytes(pickle.dumps((units, slower(loaded.network, name))))
"""


def policy_actions(keep: int) -> list[Action]:
    """An action of each policy, whose steps read ``keep`` entries at most."""
    policies = [(name, kind()) for name, kind in POLICIES.items()]
    retention = Retention.parse(str(keep))
    return [Action(f"{name}-{keep}", "full", Full(), retention, policy_name=name, policy=one) for name, one in policies]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 128 and distributions of 10,007 tokens, whose rows begin at no round address."""
    changes = {"vocab_size": 10_007, "head_dim": 128, "max_position_embeddings": 8192}
    return save_random_model(tmp_path_factory.mktemp("models") / "llama", "llama", **changes)


def pending(replicates: int, control: int = 2) -> list[PendingUnit]:
    """Both estimators, a cache whose heads have different numbers of entries, and a control beside them."""
    coupled = [PendingUnit(HALF_SNAPKV, 0, replicates, estimator) for estimator in (PLAIN, SWRB)]
    return [*coupled, PendingUnit(SHARED_SNAPKV, 0, replicates), PendingUnit(CONTROL, 0, control)]


def sizes(device: Device) -> tuple[int, int]:
    """Return replicates and positions: more of both than in a usual study, unless the device is pretended."""
    return (9, 10) if device.pretended else (66, 130)


@pytest.fixture(scope="module")
def on_the_cpu(folder: Path) -> list[Unit]:
    return generate_units(load_model(str(folder)), "s", DOCUMENT, pending(6), 16, 3)


@FUSED
def test_events_are_those_of_the_cpu(device: Device, fused: bool, folder: Path, on_the_cpu: list[Unit]) -> None:  # noqa: FBT001 - a parameter
    """Kernels round by some 1e-6 in float32; tokens are equal unless a uniform falls as near to a boundary."""
    model = device.load(folder, "float32")
    units = generate_units(model, "s", DOCUMENT, pending(6), 16, 3, SharingOptions(fused=fused))
    for one, other in zip(units, on_the_cpu, strict=True):
        assert_near(one, other)
        assert one.record["kept_sha256"] == other.record["kept_sha256"]
        assert device.pretended or torch.cuda.get_device_name(device.name) in one.record["versions"]


@DTYPES
@FUSED
def test_the_control_is_exactly_zero(device: Device, dtype: str, fused: bool, folder: Path) -> None:  # noqa: FBT001
    many, long = sizes(device)
    asked = [PendingUnit(HALF_SNAPKV, 0, many), PendingUnit(CONTROL, 0, many)]
    units = generate_units(device.load(folder, dtype), "s", DOCUMENT, asked, long, 3, SharingOptions(fused=fused))
    for name in ("delta", "f", "kl", "kl_own"):
        assert np.any(units[0].events[name].fill_null(0).to_numpy())
        assert not np.any(units[1].events[name].fill_null(0).to_numpy())


def test_the_control_of_logits_in_32_bits_is_exactly_zero(device: Device, folder: Path) -> None:
    model = replace(device.load(folder, "bfloat16"), logits_dtype="float32")
    evicted, control = generate_units(model, "s", DOCUMENT, pending(5)[::3], 8, 3)
    assert '"logits_dtype": "float32"' in control.record["versions"]
    for name in ("delta", "f"):
        assert np.any(evicted.events[name].to_numpy())
        assert not np.any(control.events[name].to_numpy())


@DTYPES
@FUSED
def test_events_do_not_depend_on_what_is_generated_beside_them(
    device: Device, dtype: str, fused: bool, folder: Path  # noqa: FBT001
) -> None:  # fmt: skip
    """Bit for bit: with one replicate, with many, and without shared streams, so that a step has three times the rows.

    cuBLAS adds float32 products of other numbers of rows in other orders; every unit then says how much that changes.
    """
    model = device.load(folder, dtype)

    def unit_of(replicates: int, sharing: SharingOptions) -> Unit:
        (unit,) = generate_units(model, "s", DOCUMENT, [PendingUnit(HALF_SNAPKV, 0, replicates)], 8, 3, sharing)
        return unit

    alone = unit_of(1, SharingOptions(fused=fused))
    if not device.pretended and dtype == "float32":
        assert 0.0 < alone.record["batch_deviation"] < 1e-6
        return
    assert model.batch_deviation == 0.0
    for replicates in (5, sizes(device)[0]):
        for sharing in (
            SharingOptions(fused=fused),
            SharingOptions(share_streams=False, share_prompt_reads=False, fused=fused),
        ):
            beside = unit_of(replicates, sharing)
            for name in ("x_token", "y_token", "delta", "f", "kl", "kl_own"):
                one, other = (unit.events[name].to_numpy()[:8] for unit in (alone, beside))
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("sampling", "evicting"),
    [
        (FULL_SOFTMAX, [HALF_SNAPKV]), (Sampling(temperature=0.7, top_p=0.9, top_k=50), [HALF_SNAPKV]),
        (FULL_SOFTMAX, policy_actions(LENGTH + 5)),
    ],
    ids=["softmax", "law", "policies"],
)  # fmt: skip
def test_captured_steps_give_the_same_events(
    device: Device, sampling: Sampling, evicting: list[Action], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with graphs that are replayed and without graphs; a pretended device has none."""
    model = replace(device.load(folder, "bfloat16"), sampling=sampling)
    many, long = sizes(device)
    asked = [PendingUnit(action, 0, many, estimator) for action in (*evicting, CONTROL) for estimator in (PLAIN, SWRB)]
    replayed: list[object] = []
    if not device.pretended:
        replay = torch.cuda.CUDAGraph.replay
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph)))
    captured = generate_units(model, "s", DOCUMENT, asked, long, 3)
    assert device.pretended or len(replayed) > 2 * len(set(replayed)) > 0
    monkeypatch.setattr("kvdrift.generator.coupling.steps.captures", lambda _: False)
    for one, other in zip(captured, generate_units(model, "s", DOCUMENT, asked, long, 3), strict=True):
        assert one.events.equals(other.events)
        assert_same_kept(one, other)


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_keep_what_they_keep_on_the_cpu(device: Device, name: str, folder: Path) -> None:
    """In float32 both devices keep the same entries of a head, but for entries whose scores differ by rounding alone.

    If rounding changes no score of a head by more than r, entries that only one device keeps lie within 2 r.
    """
    action = Action(name, name, SELECTORS[name](), Retention.parse("1/2"))
    assert_kept_alike(device.load_beside(folder, "float32"), device.load(folder, "float32"), DOCUMENT, action)


def test_couplings_in_one_pass(device: Device) -> None:
    """Triton's sums on CUDA equal sums of copies within float32's rounding; equal distributions have distance exactly 0."""
    distributions = large_distributions(10_007, 6, torch.float32)
    random = np.random.default_rng(4)
    left, right = torch.from_numpy(random.integers(-1, 6, (2, 40)))
    right[0] = left[0]
    u = torch.from_numpy(random.random(120))
    rows = torch.stack([torch.cat([torch.full_like(left, NOTHING), left, left]), torch.cat([left, right, right])])
    there = [device.holding(tensor) for tensor in (distributions, rows, u, torch.arange(40))]
    found = fused_draws(*there, 17).cpu().view(7, 40)
    plain = DistributionTable(distributions, 17)
    x = plain.draw(left, u[:40])
    y = plain.couple(left, right, x, u[80:], u[40:80])
    distance, divergence = plain.compare(left, right)
    assert torch.equal(found[:2].long(), torch.stack([x, y]))
    # Both add a block's 512 differences in nine rounds, each with an error of 2^-24 of the sum, which is 1 at most.
    assert (found[2] - distance).abs().max() < 2 * 9 * 2**-24
    assert torch.equal(found[2], found[3])
    assert float(found[2, 0]) == float(found[4, 0]) == 0.0
    # Terms are off by some 2^-22 of |p - q| or of themselves, and their sums like those of differences.
    assert torch.allclose(found[4], divergence, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[4], found[5])
    going = (left >= 0) & (right >= 0)
    tops = distributions.argmax(-1)
    assert torch.equal(found[6].bool()[going], (tops[left] == tops[right])[going])


def test_without_triton(device: Device, folder: Path, tmp_path: Path, on_the_cpu: list[Unit]) -> None:
    """In a process that cannot import Triton, the plain way gives the same events, and one line says so."""
    asked, answer = tmp_path / "asked", tmp_path / "answer"
    asked.write_bytes(pickle.dumps(("s", DOCUMENT, pending(6), 16, 3)))
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", WITHOUT_TRITON, device.name, str(folder), str(asked), str(answer)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    units, line = pickle.loads(answer.read_bytes())  # noqa: S301 - our own
    for one, other in zip(units, on_the_cpu, strict=True):
        assert_near(one, other)
    assert device.pretended or "triton is not installed" in line


def test_a_service_on_the_device(device: Device, folder: Path, tmp_path: Path) -> None:
    """Its units equal those of a run without the service."""
    model = device.load(folder, "float32")
    service = GenerationService(
        model, identity_of(model, None), "grpc://127.0.0.1:0", token=None, certificate=None, max_request_bytes=2**20
    )

    def serve() -> None:
        with device.computing():
            service.run()

    threading.Thread(target=serve, daemon=True).start()
    own = ('id = "kvdrift/tiny"', f'id = "{folder}"\ndevice = "{device.name}"')
    shared = '[[actions]]\nname = "shared"\nselector = "snapkv"\nkeep = "1/2"\nbudget = "adakv"\n'
    changes = (own, ("horizon = 12", "horizon = 16"), ("[plan]", f"{shared}\n[plan]"))
    study = load_study(write_study(tmp_path, *changes))
    remote = RemoteGenerator(ServiceAddress(f"grpc://127.0.0.1:{service.port}"), [study], print)
    try:
        remote.check()
        (there,) = remote.generate(study, [(DOCUMENT, pending(6))])
    finally:
        service.close()
    here = generate_units(model, study.name, DOCUMENT, pending(6), 16, study.study.seed, SHARE_ALL)
    for one, other in zip(there, here, strict=True):
        assert one.events.equals(other.events)
        assert one.record["kept_sha256"] == other.record["kept_sha256"]


@pytest.mark.gpu
def test_all_gpus_generate_what_one_does(tmp_path: Path) -> None:
    study = write_study(tmp_path, ('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\ndevice = "cuda"'))
    for store, options in (("one", ()), ("all", ("--gpus", "all"))):
        code, _, err = run_command("run", study, "--store", tmp_path / store, *options)
        assert code == 0, err
    assert f"{torch.cuda.device_count()} worker" in err
    assert_same(tmp_path / "all", tmp_path / "one")

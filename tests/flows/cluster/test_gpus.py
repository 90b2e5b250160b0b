"""``--gpus``: a worker a GPU, which sees no other one. GPUs are pretended here, and workers compute on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.security import Security
from fixtures.command import call, mistake
from fixtures.finite_study import write_finite_study
from fixtures.small_study import run_of, write_study
from fixtures.stored_rows import content
from fixtures.study_files import load_study

from kvdrift.dry_run.timing import Sample, Seconds, StudyTime
from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.flows.cluster.connection import Cluster, having, local_processes, resources_of, who_has_which
from kvdrift.flows.cluster.generator import ClusterGenerator
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.identity import GpuKinds
from kvdrift.generator.transformer.model_checks import visible_gpus
from kvdrift.schema.errors import InputError

TINY = 'id = "kvdrift/tiny"'
CUDA = (TINY, f'{TINY}\ndevice = "cuda"')


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.generator.transformer.model_checks.visible_gpus", lambda: ["0", "1"])


@pytest.mark.parametrize(
    ("given", "count", "expected"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("2, GPU-5a", 2, ["2", "GPU-5a"]),
        ("3,9", 1, ["3"]),  # what follows a number that there is not is not seen
        ("", 0, []),
    ],
)
def test_gpus_are_called_what_the_environment_calls_them(
    given: str | None, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is set as by a batch system, for a job that has some of a machine's GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert visible_gpus() == expected


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("text", "name", "taken"), [("all", "GPUs 0, 1", "01"), ("2", "GPUs 0, 1", "01"), ("1", "GPU 0", "0")]
)
def test_a_worker_for_each_gpu(text: str, name: str, taken: str, tmp_path: Path) -> None:
    address = ClusterAddress.of_gpus(text, [load_study(write_study(tmp_path, CUDA))])
    assert address.text == f"of {name}"
    assert address.workers is not None
    workers, _ = local_processes(address.workers, Security.temporary())
    assert [worker["options"]["env"] for worker in workers.values()] == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in taken]
    assert [worker["options"]["resources"] for worker in workers.values()] == [{"GPU": 1}] * len(taken)


def test_work_of_a_gpu_needs_a_worker_that_declares_one(tmp_path: Path) -> None:
    on_cuda = load_study(write_study(tmp_path, CUDA)).model
    spread = load_study(write_study(tmp_path, (TINY, f'{TINY}\ndevice_map = "auto"'))).model
    on_cpu = load_study(write_study(tmp_path)).model
    assert [resources_of([model]) for model in (on_cuda, spread, on_cpu)] == [{"GPU": 1}, {"GPU": 1}, {}]
    assert resources_of([on_cpu, on_cuda]) == {"GPU": 1}
    workers = {"tcp://a": {"resources": {}}, "tcp://b": {"resources": {"GPU": 1.0, "MEM": 2.0}}}
    assert having(workers, {"GPU": 1}) == ["tcp://b"]
    assert having(workers, {}) == ["tcp://a", "tcp://b"]


def test_workers_of_this_machine_have_no_gpu_unless_they_are_started_with_one(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, CUDA))
    with (
        Cluster(ClusterAddress.parse("local:1"), lambda _: None) as cluster,
        pytest.raises(InputError, match=r"^cluster local:1: .*; --gpus all "),
    ):
        ClusterGenerator(cluster).check([(study, GpuKinds.of_units([]))])


def test_who_has_which_gpu() -> None:
    found = [("worker tcp://a:1 on x", "H100"), ("worker tcp://a:2 on y", "H100"), ("worker tcp://a:3 on y", "A10")]
    assert who_has_which(found, 0) == "A10: 1 worker on y; H100: 2 workers on x, y"
    none, others = who_has_which([("worker tcp://a:1 on x", None)], 3).split("; ")
    assert none.endswith(": 1 worker on x")
    assert others.endswith(": 3")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ('device = "cuda"', ("3",), "--gpus 3: "),
        ('device = "cuda"', ("0,1",), "--gpus '0,1': "),
        ('device = "cuda"', ("all", "--cluster", "local:2"), "--gpus and --cluster: "),
        ('device = "cuda"', ("all", "--endpoint", "grpc://a:1"), "--gpus and --endpoint: "),
        ('device = "cpu"', ("all",), "--gpus all: model.device = 'cpu': "),
        ('device = "cuda:1"', ("all",), "--gpus all: model.device = 'cuda:1': "),
        ('device_map = "auto"', ("all",), "--gpus all: model.device_map = 'auto' "),
        (None, ("2",), "--gpus 2: model.kind = 'finite-state' "),
    ],
)
def test_what_is_refused(
    model: str | None, options: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_finite_study(tmp_path) if model is None else write_study(tmp_path, (TINY, f"{TINY}\n{model}"))
    assert mistake(capsys, "run", study, "--gpus", *options).startswith(f"kvdrift: {line}")


def test_a_machine_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    line = mistake(capsys, "run", write_study(tmp_path, CUDA), "--gpus", "all")
    assert line.startswith("kvdrift: --gpus all: torch finds no GPU")


@pytest.mark.usefixtures("two_gpus")
def test_a_dry_run_says_who_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(396, 12, 12, 1.0, 1.0, 0.0, 0.0)
    hour = StudyTime({"development": Seconds(3600, 7200)}, "cuda", 5.0, 9.0, [sample], 396.0)
    monkeypatch.setattr("kvdrift.dry_run.description.study_time", lambda *_: hour)
    code, out, _ = call(capsys, "run", write_study(tmp_path, CUDA), "--gpus", "all", "--dry-run")
    assert code == 0
    assert out.count(" on 2 GPUs ") == 2
    assert ": development 30 to 60 min\n" in out
    assert not list(tmp_path.glob("**/_delta_log"))


@pytest.mark.slow
def test_workers_of_two_gpus_load_their_model_once_and_generate_the_same(tmp_path: Path) -> None:
    """The model computes on the CPU. Torch is not what a worker imports first, so its own GPU is all that torch sees."""

    def state() -> tuple[str | None, bool, int | None]:
        import os  # noqa: PLC0415 - a worker gets this function alone
        import sys  # noqa: PLC0415

        torch_is_there = "torch" in sys.modules
        kept = sys.modules.get("kvdrift.flows.cluster.worker")
        return os.environ.get("CUDA_VISIBLE_DEVICES"), torch_is_there, kept and id(kept.KEPT.local._model)

    study = load_study(write_study(tmp_path))
    expected = run_of(study, tmp_path / "expected")
    said: list[str] = []
    address = ClusterAddress("of GPUs 0, 1", ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}))
    with Cluster(address, said.append) as cluster:
        assert sorted(cluster.client.run(state).values()) == [("0", False, None), ("1", False, None)]
        there = ClusterGenerator(cluster)
        runs = [StudyRun(study, str(tmp_path / name), there, identify=there.identify) for name in ("one", "other")]
        for run in (expected, *runs):
            stages.prepare(run)
        assert stages.develop(runs[0]) == 12
        loaded = sorted(cluster.client.run(state).values())
        assert stages.develop(runs[1]) == 12
        assert sorted(cluster.client.run(state).values()) == loaded
        assert [(gpu, torch, model is not None) for gpu, torch, model in loaded] == [
            ("0", True, True),
            ("1", True, True),
        ]
    assert said[0].startswith("cluster of GPUs 0, 1: 2 workers")
    stages.develop(expected)
    for run in runs:
        assert content(tmp_path / "expected", "events").equals(content(Path(run.location), "events"))

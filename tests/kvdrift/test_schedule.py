"""Mistakes that ``kvdrift schedule`` refuses before it asks a server; tests/flows/scheduling has a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.finite_study import write_finite_study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study file, in a home without a Prefect profile."""
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    refresh_global_settings_context()
    yield write_finite_study(tmp_path)
    monkeypatch.undo()
    refresh_global_settings_context()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--cron", "every night"), "--cron 'every night': write minute, hour, day, month and weekday, as \"0 3 * * *\""),
        (("--cron", "0 3 * * *", "--timezone", "Berlin"), "--timezone Berlin: there is no such zone; write one such as Europe/Berlin"),
        (("--serve", "--work-pool", "mine"), "--work-pool mine: --serve also chooses the process that runs it; give one"),
        (("--token-file", "t"), "--token-file: says how to reach an endpoint; add --endpoint grpc://HOST:PORT"),
        (("--endpoint", "grpc://a:1", "--endpoint", "grpc://b:1"), "--endpoint grpc://a:1 --endpoint grpc://b:1: give one; --cluster generates on many machines"),
        (("--cluster", "here"), "--cluster 'here': write tcp://HOST:PORT of a Dask scheduler, or local:N for N workers here"),
        (("--gpus", "2"), "--gpus 2: model.kind = 'finite-state' uses no GPU; run it without --gpus"),
        ((), "no Prefect server is named; start one with `prefect server start`, and name it with `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"),
    ],
)  # fmt: skip
def test_refusals(study: Path, options: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, "schedule", study, *options) == f"kvdrift: {line}\n"


def test_a_server_that_does_not_answer(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refresh_global_settings_context()
    code, out, err = call(capsys, "schedule", study, "--cron", "0 3 * * *")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("kvdrift: the Prefect server at http://127.0.0.1:9/api does not answer (ConnectError: ")

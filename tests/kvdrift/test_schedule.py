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
        (("--cron", "every night"), "--cron 'every night': "),
        (("--cron", "0 3 * * *", "--timezone", "Berlin"), "--timezone Berlin: "),
        (("--serve", "--work-pool", "mine"), "--work-pool mine: with --serve"),
        (("--token-file", "t"), "--token-file: "),
        (("--endpoint", "grpc://a:1", "--endpoint", "grpc://b:1"), "--endpoint grpc://a:1 --endpoint grpc://b:1: "),
        (("--cluster", "here"), "--cluster 'here': "),
        (("--gpus", "2"), "--gpus 2: model.kind = 'finite-state' "),
        ((), "no Prefect server"),
    ],
)  # fmt: skip
def test_refusals(study: Path, options: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, "schedule", study, *options).startswith(f"kvdrift: {line}")


def test_a_server_that_does_not_answer(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refresh_global_settings_context()
    code, out, err = call(capsys, "schedule", study, "--cron", "0 3 * * *")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "http://127.0.0.1:9/api" in err
    assert "ConnectError" in err

"""A study with fake servers through its stages: page, moved and changed servers, dry run, greedy tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.engine_study import NEEDS, addressed, fake_servers, write_server_study
from fixtures.fake_server import FakeServer
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study

import kvdrift
from kvdrift.flows.run import stages
from kvdrift.generator.actions import build_actions
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.verification.whole_store import verify

Pair = tuple[FakeServer, FakeServer]
SMALLER = (
    ("horizon = 12", "horizon = 6"),
    ("evaluation = 4", "evaluation = 2"),
    (
        "replicates = 4\ndocuments = 4\ndevelopment_replicates = 4",
        "replicates = 2\ndocuments = 2\ndevelopment_replicates = 2",
    ),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with fake_servers(tmp_path_factory.mktemp("served")) as pair:
        yield pair


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, servers: Pair) -> Path:
    folder = tmp_path_factory.mktemp("servers")
    run = run_of(load_study(write_server_study(folder, addressed(servers), *SMALLER)), folder / "store")
    finish(run)
    stages.report(run)
    return folder


def test_the_page_of_servers(measured: Path) -> None:
    page = (measured / "store" / "report" / "servers" / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style|svg)[\s\S]*?</\1>", "", page))
    for word in ("evict", "full cache", "the full one", "compressed", "left out or coded"):
        assert word not in text, word
    for words in ("--bits 4", "http, httpx", "server llama-server b1; ", "floor", "the reference repeated"):
        assert words in text, words
    assert "# Stores keep no addresses " in unescape(text)
    with kvdrift.open(measured / "store") as views:
        rows = views.sql("select action, cache_share, mismatch from frontier where split = 'evaluation'").fetchall()
        risk = dict(views.sql(
            "select action, rollout_tv from decomposition where split = 'evaluation' and stratum = 'pooled'"
        ).fetchall())  # fmt: skip
    assert all(share is None for _, share, _ in rows)
    assert risk["floor"] == 0 < risk["bits-4"]
    assert not [check for check in verify(Store.open(str(measured / "store"))) if check.faults]


def test_a_server_of_its_own_may_store_entries_in_another_way(tmp_path: Path, servers: Pair) -> None:
    """A vLLM with fp8 entries beside the reference repeated: an equal number of entries takes other bytes."""
    unsaid = ('settings = { started = "--bits 4" }\n', "")
    study = load_study(write_server_study(tmp_path, addressed(servers), unsaid))
    floor, other = (one for one in build_actions(study) if not one.control)
    assert floor.settings == other.settings == {}
    assert floor.decides_bytes(9, 2) != other.decides_bytes(9, 2)


def test_what_made_the_units_is_known(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "status", measured / "store")
    assert code == 0
    assert "do not say which weights" not in out


def test_a_server_may_move_and_may_not_change(measured: Path, servers: Pair) -> None:
    store = measured / "store"
    moved = FakeServer("llama-server", servers[1].weights, 4).start()
    changed = FakeServer("llama-server", servers[1].weights, 4, build="b2").start()
    try:
        for server in (moved, changed):
            requests = ('id = "fake"', 'id = "fake"\nrequests = { at_once = 2 }')
            study = write_server_study(measured, addressed((servers[0], server)), *SMALLER, requests)
            run = run_of(load_study(study), store)
            if server is moved:
                assert stages.is_finished(run)
            else:
                with pytest.raises(InputError, match=r"action 'bits-4'.*--redo bits-4"):
                    stages.prepare(run)
    finally:
        moved.stop()
        changed.stop()


@pytest.mark.slow
def test_the_dry_run_says_what_a_position_costs(
    tmp_path: Path, servers: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_server_study(tmp_path, addressed(servers))
    code, out, _ = call(capsys, "run", study, "--store", tmp_path / "store", "--dry-run")
    assert code == 0
    assert re.search(rf"reference at {servers[0].url} \(llama-server b1, 8 slots\): [\d.]+ ms to read the prompt", out)
    assert re.search(rf"bits-4 at {servers[1].url} .*ms and [\d.]+ KiB a position of one stream", out)
    assert "up to 2 replicates at once" in out
    assert "memory of generation" not in out
    assert "time of generation" in out


@pytest.mark.slow
def test_greedy_tokens_have_a_status_of_their_own(tmp_path: Path) -> None:
    changes = (
        *SMALLER,
        ("horizon = 6", "horizon = 6\ntemperature = 0"),
        ('id = "fake"', f'id = "fake"\nsettings = {{ api = "openai", {NEEDS} }}'),
    )
    with fake_servers(tmp_path, "openai") as pair:
        run = run_of(load_study(write_server_study(tmp_path, addressed(pair), *changes)), tmp_path / "store")
        finish(run)
        stages.report(run)
    with kvdrift.open(tmp_path / "store") as views:
        found = views.sql("select distinct delta from events order by delta").fetchall()
        versions = views.sql("select distinct versions from units").fetchall()
    assert {delta for (delta,) in found} == {0.0, 1.0}
    assert all("greedy" in text for (text,) in versions)
    page = (tmp_path / "store" / "report" / "servers" / "index.html").read_text(encoding="utf-8")
    assert "A greedy distribution is all on one token" in page

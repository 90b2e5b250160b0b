"""A study with the engine ``transformers`` through its stages: own cache, patch, fp8 cache, and presses of kvpress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.engine_study import study_text
from fixtures.house import ROOT
from fixtures.refusals import refused
from fixtures.small_study import finish, run_of
from fixtures.study_files import changed, load_study

from kvdrift.flows.run import stages
from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views
from kvdrift.verification.whole_store import verify

OWN = """
[[actions]]
name = "sharper"
settings = { patch = "my_cache:sharper" }

[[actions]]
name = "fp8"
settings = { cache = "QuantizedCache(backend='fp8')" }
"""
PRESSES = """
[[actions]]
name = "adakv"
settings = { press = "AdaKVPress(SnapKVPress(compression_ratio=0.5, window_size=32))" }

[[actions]]
name = "kvzip"
settings = { press = "KVzipPress(compression_ratio=0.5)" }

[[actions]]
name = "decoding"
settings = { press = "DecodingPress(KnormPress(), compression_interval=4, target_size=256)" }
"""
MODEL = 'engine = "transformers"\nid = "kvdrift/tiny"'
SLIDING = 'settings = { cache = "my_cache.Sliding(window=96)" }'
SMALLER = (
    ("horizon = 12", "horizon = 6"), ("evaluation = 4", "evaluation = 2"),
    ("replicates = 4", "replicates = 2"), ("documents = 4", "documents = 2"),
    ("development_replicates = 4", "development_replicates = 2"),
)  # fmt: skip


def write(folder: Path, more: str, *changes: tuple[str, str]) -> Path:
    """Write a study of the page's own cache and ``more`` actions; return its file."""
    page = (ROOT / "docs" / "kvpress.md").read_text(encoding="utf-8")
    (folder / "my_cache.py").write_text(page.split("```python\n")[1].split("```")[0])
    (folder / "study.toml").write_text(changed(study_text("presses", MODEL, SLIDING, more, of="sliding"), *changes))
    return folder / "study.toml"


def test_a_study_of_a_cache_a_patch_and_fp8_runs_to_its_page(tmp_path: Path) -> None:
    study, store = load_study(write(tmp_path, OWN, *SMALLER)), tmp_path / "store"
    run = run_of(study, store)
    finish(run)
    stages.report(run)
    pooled = {"split": "evaluation", "stratum": "pooled"}
    with open_views(Store.open(store)) as views:
        risk = {row["action"]: row["rollout_tv"] for row in views.rows("decomposition", **pooled).to_pylist()}
        shares = {row["action"]: row["cache_share"] for row in views.rows("frontier", **pooled).to_pylist()}
        units = {row["action"]: row for row in views.rows("units").to_pylist()}
        kept = {row["action"] for row in views.rows("prompts").to_pylist() if row["kept"] is not None}
    assert 0 < risk["floor"] < 1e-5  # float32, in rows
    assert 0 < risk["kernel-floor"] < 1e-5
    assert max(risk["fp8"], risk["sharper"]) < risk["sliding"]
    assert {name: round(share, 2) for name, share in shares.items()} == {
        "fp8": 0.25, "sliding": 0.24, "sharper": 1.0, "floor": 1.0, "kernel-floor": 1.0,
    }  # fmt: skip
    assert units["sliding"]["kept_entries"] == 96
    assert kept == {"sliding", "sharper", "floor", "kernel-floor"}
    engine = json.loads(units["sliding"]["engine"])
    assert (engine["asked"]["cache"], engine["read_back"]["cache"]) == ("my_cache.Sliding(window=96)", "Sliding")
    assert {"my_cache.py", "cache", "transformers.cache_utils"} <= set(engine["code"])
    assert (store / "report" / "presses" / "index.html").is_file()
    assert [check.subject for check in verify(Store.open(store)) if check.faults] == []

    assert stages.is_finished(run_of(study, store))
    cache = tmp_path / "my_cache.py"
    cache.write_text(cache.read_text().replace("range(4)", "range(8)").replace("range(4 +", "range(8 +"))
    line = refused(stages.prepare, run_of(study, store))
    assert "sliding" in line
    assert "--redo" in line


@pytest.mark.kvpress
def test_a_study_of_presses_runs_to_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    code, _, said = call(capsys, "run", write(tmp_path, PRESSES), "--store", store)
    assert code == 0, said
    pooled = {"split": "evaluation", "stratum": "pooled"}
    with open_views(Store.open(store)) as views:
        shares = {row["action"]: row["cache_share"] for row in views.rows("frontier", **pooled).to_pylist()}
        first = views.rows("generation_clock", **pooled).to_pylist()
        kept = {row["action"] for row in views.rows("prompts").to_pylist() if row["kept"] is not None}
    assert (round(shares["adakv"], 2), round(shares["kvzip"], 2)) == (0.5, 0.5)
    assert 1 <= shares["decoding"] < 1.05  # a peak: the prompt and what is written before the first eviction
    delta = {row["action"]: row["delta"] for row in first if row["t"] == 1}
    assert [delta[name] for name in ("adakv", "decoding", "kvzip", "sliding")] == [0.0] * 4
    assert kept == {"adakv", "decoding", "floor", "kernel-floor", "kvzip", "sliding"}

"""Studies of models with windows and with states: what no action can evict, and another checkpoint of such a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.families import save_for_study
from fixtures.small_study import TEXT, finish, run_of
from fixtures.study_files import load_study

import kvdrift
from kvdrift.flows.run import stages
from kvdrift.log.store import Store
from kvdrift.verification.whole_store import verify

# Bytes in float32: of the 39 entries of a window, 2 KV heads of keys and values of 16 numbers each; and of states,
# 4 inputs of each of 128 channels, and a matrix of 16 by 16 for each of 4 heads.
FIXED = {"gemma3": 39 * 2 * 2 * 16 * 4, "qwen3.5": (4 * 128 + 4 * 16 * 16) * 4}

pytestmark = pytest.mark.slow  # views and pages of such rows are tested without a model

# Of another checkpoint: alone, and with a selector, a codec and a policy.
OTHER_WEIGHTS = {
    "own": "",
    "own-recent": 'selector = "recent"\nkeep = "1/2"',
    "own-int8": 'codec = "int8"',
    "own-sliding": 'policy = "sliding"\nkeep = 128',
}


@pytest.fixture(autouse=True, scope="module")
def own_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No proof of before counts, and none is left on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def study_in(folder: Path, family: str) -> Path:
    """A study file of one stratum, whose baseline keeps the most recent half, and the models beside the file."""
    save_for_study(folder / "reference", family)
    save_for_study(folder / "near", family, noise=0.01)
    head, _, rest = TEXT.partition('[[documents]]\nsource = "embedded"\ntasks = ["variable_tracking"]')
    added = "".join(
        f'[[actions]]\nname = "{name}"\nweights = "near"\n{what}\n\n' for name, what in OTHER_WEIGHTS.items()
    )
    plan = rest[rest.index("[plan]") :].replace('"snapkv-half"', '"recent-half"').replace('"gap", ', "")
    plan = plan.replace("replicates = 5", "replicates = 2").replace(
        "development_replicates = 4", "development_replicates = 2"
    )
    text = f'{head}[[actions]]\nname = "recent-half"\nselector = "recent"\nkeep = "1/2"\n\n{added}{plan}'
    path = folder / "study.toml"
    path.write_text(text.replace("kvdrift/tiny", "reference"))
    return path


def finished_in(folder: Path, family: str) -> tuple[Path, str]:
    """The store and the page of a study that was taken from its documents to its page, stage by stage."""
    run = run_of(load_study(study_in(folder, family)), folder / "store")
    finish(run)
    return folder / "store", stages.report(run).read_text("utf-8")


@pytest.mark.parametrize("family", FIXED)
def test_views_and_page_say_which_bytes_no_action_can_evict(family: str, tmp_path: Path) -> None:
    """Half of the entries is half of the evictable bytes; the half's index comes on top. So it is for other weights."""
    store, page = finished_in(tmp_path, family)
    assert not [check for check in verify(Store.open(str(store))) if check.faults]
    with kvdrift.open(store) as views:
        rows = views.sql(
            "select action, cache_bytes, fixed_bytes from frontier where stratum = 'pooled' and split = 'evaluation'"
        ).fetchall()
        ((index,),) = views.sql("select avg(index_bytes) from units where action = 'recent-half'").fetchall()
        first = dict(views.sql("select action, min(delta) from events where t = 1 group by action").fetchall())
        assert views.sql("select sum(moved_pairs) from controls").fetchall() == [(0,)]
        assert views.sql("select distinct fixed_bytes from units").fetchall() == [(FIXED[family],)]
    evictable = {action: cache - fixed for action, cache, fixed in rows}
    assert evictable["recent-half"] - index == pytest.approx(evictable["full"] / 2, rel=0.01)
    assert first["recent-half"] == first["full"] == 0
    assert all(first[name] > 0 for name in OTHER_WEIGHTS)
    text = re.sub(r"<[^>]+>", " ", page)
    size = f"{FIXED[family] / 1024:.1f} KiB"
    assert re.search(rf"{size} of the full cache’s \d+ KiB are windows and states", text)
    assert len(re.findall(rf"% of full; {size} not evictable", text)) >= 2
    assert "weights near, then int8" in page

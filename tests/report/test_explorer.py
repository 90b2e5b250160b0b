"""The trajectory explorer's data: the choice of trajectories, and packed data equal to the views."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.report_views import Page, content_of, make_views

from kvdrift.report.explorer.page import pack, write_explorer
from kvdrift.report.explorer.trajectories import POSITIONS, Outcomes, Streams, choose
from kvdrift.schema.errors import OperationError
from kvdrift.sql.catalog import Views

HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=alert(1)>",
    "\n\t",
    "\u202eabc",
    "",
]


def unpack(html: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the page's data, decoded as ``packing`` documents it."""
    texts = dict(re.findall(r'<script type="text/plain" id="(\w+)">([^<]*)</script>', html))
    manifest = json.loads(gzip.decompress(base64.b64decode(texts["manifest"])))
    data, horizon = gzip.decompress(base64.b64decode(texts["arrays"])), manifest["horizon"]
    count = len(manifest["trajectories"]["document"])
    index = "<u2" if len(manifest["tokens"]) <= 65536 else "<u4"
    arrays, at = {}, 0
    for name, kind, rows in (
        ("x", index, manifest["references"]),
        ("y", index, count),
        ("delta", "<u4", count),
        ("f", "<u4", count),
    ):
        size = np.dtype(kind).itemsize
        planes = np.frombuffer(data, np.uint8, rows * horizon * size, at).reshape(size, -1)
        arrays[name] = np.ascontiguousarray(planes.T).view(kind).reshape(rows, horizon)
        at += rows * horizon * size
    assert at == len(data)
    f = (arrays["f"] ^ arrays["delta"]).view("<f4")
    tokens = np.array(manifest["tokens"])
    return manifest, arrays | {
        "x": tokens[arrays["x"]],
        "y": tokens[arrays["y"]],
        "delta": arrays["delta"].view("<f4"),
        "f": f,
    }


def test_the_command_has_written_it_beside_the_report(finished: Path) -> None:
    page = finished / "report" / "small" / "trajectories.html"
    manifest, _ = unpack(page.read_text(encoding="utf-8"))
    assert (manifest["study"], manifest["total"], manifest["store"]) == ("small", 60, "store")
    assert len(manifest["texts"]) == len(manifest["tokens"])
    assert 'href="trajectories.html"' in (page.parent / "index.html").read_text(encoding="utf-8")


def test_what_is_packed_is_what_the_views_say(views: Views, tmp_path: Path) -> None:
    path = write_explorer(content_of(views, "small"), tmp_path, "t{}".format)
    assert path is not None
    manifest, arrays = unpack(path.read_text(encoding="utf-8"))
    columns, x = manifest["trajectories"], arrays["x"][manifest["trajectories"]["reference"]]
    names = [manifest["documents"][at]["doc"] for at in columns["document"]]
    assert manifest["references"] == len({*zip(names, columns["replicate"], strict=True)}), "actions share X"
    events, trajectories = (
        views.sql(
            f"from {view} semi join (from documents where split = 'evaluation') using (study, model, doc)"
            " anti join (from actions where control) using (study, action) order by doc, action, replicate"
            f"{', t' if view == 'events' else ''}"
        ).to_arrow_table().to_pylist()
        for view in ("events", "trajectories")
    )  # fmt: skip
    assert len(trajectories) == len(names) == manifest["total"] == 60
    scores = {(row["doc"], row["action"], row["replicate"]): row for row in views.rows("scores").to_pylist()}
    place = {(names[at], manifest["actions"][columns["action"][at]], columns["replicate"][at]): at for at in range(60)}
    for row in trajectories:
        at = place[row["doc"], row["action"], row["replicate"]]
        found = {name: columns[name][at] for name in ("tau", "eos_x", "eos_y", "mismatches")}
        assert found == {name: row[name] for name in found}
        assert columns["agreement"][at] == (row["longest_agreement"] or 0)
        score = scores.get((row["doc"], row["action"], row["replicate"]), {})
        for name in ("score_x", "score_y", "span_first", "span_last"):
            assert columns[name][at] == score.get(name)
    assert any(value is not None for value in columns["span_first"])
    for event in events:
        at, t = place[event["doc"], event["action"], event["replicate"]], event["t"] - 1
        found = (x[at, t], arrays["y"][at, t], arrays["delta"][at, t], arrays["f"][at, t])
        assert found == (event["x_token"], event["y_token"], event["delta"], event["f"])
    assert len(events) == x.size
    assert manifest["texts"] == [f"t{token}" for token in manifest["tokens"]]


def random_outcomes(seed: int) -> Outcomes:
    """Outcomes of 2 strata of 6 documents, 2 actions, up to 9 replicates, with many ties; some trajectories are not there."""
    drawn = random.Random(seed)  # noqa: S311 - no secrets
    documents = [
        {"doc": f"d{at}", "stratum": "ab"[at % 2], "task": "", "answers": [], "prompt_tokens": 9} for at in range(12)
    ]
    rows = []
    for doc in range(12):
        for replicate in range(drawn.randint(1, 9)):
            rows += [(doc, action, replicate) for action in range(2) if drawn.random() < 0.9]
    n, horizon = len(rows), 10
    tau = np.array([drawn.choice([0, *range(2, 11)]) for _ in rows])
    eos_x, eos_y = (np.array([drawn.choice([0, *range(2, 11)]) for _ in rows]) for _ in "xy")
    doc, action, replicate = np.array(rows).T
    return Outcomes(
        documents=documents, strata=["a", "b"], actions=["p", "q"], horizon=horizon,
        stratum=np.arange(12) % 2, doc=doc, action=action, replicate=replicate, tau=tau, eos_x=eos_x, eos_y=eos_y,
        last_eos=np.where((eos_x == 0) | (eos_y == 0), 11, np.maximum(eos_x, eos_y)),
        mismatches=np.ones(n, int), longest_agreement=np.array([drawn.randint(0, 3) if at else 0 for at in tau]),
        lost=np.array([drawn.random() < 0.2 for _ in rows]),
    )  # fmt: skip


def plain_choice(outcomes: Outcomes, count: int) -> tuple[list[int], dict[tuple[str, int | None, int], list[int]]]:
    """The rule as the page states it, one trajectory after the other."""
    rows = range(len(outcomes.doc))
    tau, apart = outcomes.tau.tolist(), np.minimum(outcomes.last_eos, 10) - outcomes.tau
    jumps: dict[tuple[str, int | None, int], list[int]] = {}
    for stratum in (None, 0, 1):
        for action in (0, 1):
            own = [row for row in rows if outcomes.action[row] == action and stratum in {None, outcomes.doc[row] % 2}]
            diverged = [row for row in own if tau[row]]
            ordered = sorted(diverged, key=lambda row: (tau[row], row))
            jumps["earliest", stratum, action] = ordered[:1]
            jumps["median", stratum, action] = ordered[(len(ordered) - 1) // 2 :][:1]
            jumps["latest", stratum, action] = sorted(diverged, key=lambda row: (-tau[row], row))[:1]
            jumps["exposure", stratum, action] = sorted(diverged, key=lambda row: (-apart[row], row))[:1]
            agreed = [row for row in diverged if outcomes.longest_agreement[row]]
            jumps["agreement", stratum, action] = sorted(
                agreed, key=lambda row: (-outcomes.longest_agreement[row], row)
            )[:1]
            lost: dict[int, list[int]] = {}
            for row in own:
                if outcomes.lost[row]:
                    lost.setdefault(int(outcomes.doc[row]), []).append(row)
            turns = zip_longest(*lost.values())  # the first of each document, then the second of each
            jumps["lost", stratum, action] = [row for turn in turns for row in turn if row is not None]
    wanted = [row for to in jumps.values() for row in to[:3]]
    pairs = {(outcomes.doc[row], outcomes.replicate[row]) for row in wanted}
    wanted += [row for row in rows if (outcomes.doc[row], outcomes.replicate[row]) in pairs]
    for block in range(3):
        for place in range(6):
            for doc in (2 * place, 2 * place + 1):
                wanted += [row for row in rows if outcomes.doc[row] == doc and outcomes.replicate[row] // 4 == block]
    held = list(dict.fromkeys(wanted))[:count]
    return sorted(held), {key: kept for key, to in jumps.items() if (kept := [row for row in to if row in held])}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [3, 20, 60, 1000])
def test_the_rule_is_what_the_page_says(seed: int, count: int) -> None:
    outcomes = random_outcomes(seed)
    sample = choose(outcomes, 10 * count + 9)
    rows, jumps = plain_choice(outcomes, count)
    assert sample.rows.tolist() == rows
    assert {(jump.kind, jump.stratum, jump.action): list(jump.rows) for jump in sample.jumps} == jumps
    for jump in sample.jumps:
        within = (
            outcomes.lost
            & (outcomes.action == jump.action)
            & np.isin(outcomes.doc % 2, [jump.stratum] if jump.stratum is not None else [0, 1])
        )
        assert jump.total == (within.sum() if jump.kind == "lost" else 1)


@pytest.mark.slow
def test_a_full_file_has_less_than_5_mb() -> None:
    """The worst there is: distances and tokens that cannot be compressed, of a large vocabulary, no reference shared."""
    horizon = 125
    n = POSITIONS // horizon
    drawn = np.random.default_rng(5)
    documents = [
        {"doc": f"doc-{at}", "stratum": "a", "task": "task", "answers": ["an answer"], "prompt_tokens": 9}
        for at in range(n)
    ]
    whole = drawn.integers(1, horizon, n)
    outcomes = Outcomes(
        documents=documents, strata=["a"], actions=["p"], horizon=horizon, stratum=np.zeros(n, int), doc=np.arange(n),
        action=np.zeros(n, int), replicate=np.zeros(n, int), tau=whole, eos_x=whole, eos_y=whole, last_eos=whole, mismatches=whole,
        longest_agreement=whole, lost=np.zeros(n, bool),
    )  # fmt: skip
    x, y = drawn.integers(0, 150_000, (2, n, horizon), np.int32)
    streams = Streams(x, y, drawn.random((n, horizon), np.float32), drawn.random((n, horizon), np.float32), {})
    packed = pack(outcomes, choose(outcomes), streams, lambda token: f" t{token:x}", {})
    assert 3_000_000 < len(packed.manifest) + len(packed.arrays) < 4_900_000


def test_pages_of_strangers_texts(tmp_path: Path, page: Page) -> None:
    views = make_views(strata=("VT-4K",), documents_each=1)
    page(views, token_text=lambda token: HOSTILE[token % len(HOSTILE)])
    html = (tmp_path / "trajectories.html").read_text(encoding="utf-8")
    assert html.count("</script>") == 3
    assert "onerror" not in html
    manifest, _ = unpack(html)
    assert set(manifest["texts"]) == set(HOSTILE)
    assert manifest["store"] == "stores/quickstart"
    page(views, token_text=None)
    assert unpack((tmp_path / "trajectories.html").read_text(encoding="utf-8"))[0]["texts"] is None


def test_events_that_are_not_there(tmp_path: Path) -> None:
    views = make_views(strata=("VT-4K",), documents_each=1)
    views.views["events"] = [row for row in views.views["events"] if row["t"] != 9]
    with pytest.raises(OperationError, match=r"document .* lacks positions"):
        write_explorer(content_of(views), tmp_path, None)

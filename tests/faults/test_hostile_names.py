"""Names that could lead out of folders, or break documents, terminals or spreadsheets."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from faults.outcomes import SURVIVED, tell
from fixtures.command import call
from fixtures.event_logs import make_log, write

from kvdrift.log.store import Store

HOSTILE = (
    "../../../x",
    "..",
    "/etc/x",
    "con\n\x1b[2Jtrol\x00",
    'it\'s "quoted"; drop table events --',
    "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>&amp;",
    "n" * 3000,
    "ехt",
    "ext",
    "{{ 7 * 7 }}%s$t$\\",
    "?x=%41",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def unwritten_figures() -> None:
    """Figures of hostile names are written."""


def test_from_ingestion_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each name is at once that of a study, a document, an action and a stratum."""
    store, out = tmp_path / "below" / "store", tmp_path / "below" / "out"
    documents = tmp_path / "documents.csv"
    with documents.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["doc", "stratum", "split"])
        rows.writerows([name, name, "evaluation"] for name in (*(n for n in HOSTILE if "\0" not in n), "d0", "d1"))
    logs = []
    for number, name in enumerate(HOSTILE):
        log = make_log([name, "d0", "d1"], ["base", name], range(3), 4, study=name, model=name)
        logs.append(write(tmp_path / f"{number}.parquet", log))
    before = {path for path in tmp_path.rglob("*") if "below" not in path.parts}
    said = [call(capsys, "ingest", *logs, "--store", store, "--documents", documents)]
    said += [call(capsys, "derive", store), call(capsys, "status", store), call(capsys, "verify", store)]
    assert [code for code, _, _ in said] == [2, 0, 0, 0], said  # the name with a zero is in no documents file
    assert set(Store.open(store).units()["study"].to_pylist()) == set(HOSTILE)
    assert call(capsys, "analyze", store)[0] == 0
    for options in ((), ("-o", out)):
        code, listed, err = call(capsys, "report", store, *options)
        assert (code, err[-300:]) == (0, "")
        said.append((code, listed, err))
    for _, printed, err in said:
        assert re.search(r"[\x00-\x08\x0b-\x1f\x7f]", printed + err) is None
    assert {path for path in tmp_path.rglob("*") if "below" not in path.parts} == before
    assert {path.name for path in (tmp_path / "below").iterdir()} == {"store", "out"}
    pages = [*(store / "report").rglob("index.html"), *out.rglob("index.html")]
    assert len(pages) == 2 * len(HOSTILE)
    for page in pages:
        assert "<script>alert" not in page.read_text(encoding="utf-8")
        for figure in page.parent.glob("figures/*.svg"):
            ET.parse(figure)  # noqa: S314 - our own
        for table in page.parent.glob("tables/*.csv"):
            with table.open(newline="", encoding="utf-8") as file:
                cells = {cell for row in csv.reader(file) for cell in row}
            assert not [cell for cell in cells if re.match(r"[=@\t\r]|[+-](?![\d.])", cell)]
    tell("a name that leads out of folders, breaks documents, terminals or spreadsheets", [SURVIVED] * len(HOSTILE))

"""The study file on the page: read again, it asks for the events of the store that it was written from."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from fixtures.report_views import MODEL, STUDY, make_scalar_views
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from kvdrift.generator.actions import build_action
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.log.store import Store
from kvdrift.report.reading.estimates import StudyRows
from kvdrift.report.reading.facts import read_facts
from kvdrift.report.sections.study import study_text
from kvdrift.schema.errors import InputError
from kvdrift.schema.study.actions import ActionSection
from kvdrift.sql.catalog import open_views


def test_it_has_the_settings_the_actions_and_the_plan_of_its_store(finished: Path, tmp_path: Path) -> None:
    """The same text stands on the page of the store, with the command that runs the study file."""
    store = Store.open(finished)
    with open_views(store) as views:
        facts = read_facts(StudyRows(views, "small", "kvdrift/tiny"))
    text = study_text(facts)
    assert text is not None
    (tmp_path / "small.toml").write_text(text)
    study = load_study(tmp_path / "small.toml")
    assert study.sha256 == facts.study_sha256
    assert facts.plan is not None
    assert (study.plan.replicates, study.plan.documents) == (
        facts.plan.content["replicates"], facts.plan.content["documents_per_stratum"],
    )  # fmt: skip
    stored = {row["action"]: row for row in facts.actions}
    for section in study.actions:
        made = build_action(section).row("small", prespecified=stored[section.name]["prespecified"])
        assert {name: made[name] for name in made} == {name: stored[section.name][name] for name in made}
    listed = store.read("documents").to_pylist()
    assert sum(part.development + part.evaluation for part in study.documents) == len(listed)
    page = (finished / "report" / "small" / "index.html").read_text(encoding="utf-8")
    assert unescape(re.findall(r"<pre><code>(# Written.*?)</code></pre>", page, re.DOTALL)[0]) == text
    assert "<code>kvdrift run small.toml --store store</code>" in page


SECTIONS: list[dict[str, object]] = [
    *({"selector": name, "keep": "all" if name in {"full", "numerics"} else 100} for name in SELECTORS),
    *({"codec": name} for name in CODECS),
    *({"policy": {"name": name}, "keep": 100} for name in POLICIES),
    {"selector": "snapkv", "keep": "1/3", "window": 32, "codec": {"name": "int4", "residual": 32}},
    {"selector": "snapkv", "keep": "1/3", "budget": "adakv", "layers": [0, -1], "codec": "int8"},
    {"codec": {"name": "turboquant-3bit", "skip_layers": [], "generated": True}},
    {"codec": {"keys": {"name": "int4", "group": 8}, "values": "turboquant-4bit", "skip_layers": [0]}},
    {"codec": {"values": "q4_0"}},
]


def test_every_action_is_written_as_it_was() -> None:
    """For each selector, codec and policy, the stored row gives a section, and the section gives the same row."""
    rows = []
    for number, section in enumerate(SECTIONS):
        with suppress(InputError):  # a library that is not installed
            action = build_action(ActionSection.model_validate({"name": f"action-{number}"} | section))
            rows.append(action.row("s", prespecified=True))
    assert len(rows) > 25
    facts = read_facts(StudyRows(make_scalar_views(), STUDY, MODEL))
    settings = '{"study": {"name": "s"}, "model": {"id": "m"}, "documents": []}'
    text = study_text(replace(facts, actions=rows, settings=settings))
    assert text is not None
    written = [ActionSection.model_validate(section) for section in tomllib.loads(text)["actions"]]
    assert [build_action(section).row("s", prespecified=True) for section in written] == rows


OF_FILE = "source = 'jsonl'\npath = 'rows.jsonl'\n"


@pytest.mark.parametrize(
    ("section", "stratum"),
    [
        (f"{OF_FILE}stratum = 'mine'\nlength = 512", "mine"),
        (f"{OF_FILE}length = 512", "JSONL-512"),
        (f"{OF_FILE}part = '1/2'\nlength = 512", "JSONL-512"),
        ("source = 'embedded'\ntasks = ['needle']\nlength = 384", "EMBEDDED-384"),
    ],
)
def test_a_section_finds_its_documents_with_or_without_the_name_of_its_stratum(
    tmp_path: Path, section: str, stratum: str
) -> None:
    """The numbers of documents are counted by stratum; settings have none, since a study may grow."""
    of_needle = 'source = "embedded"\ntasks = ["needle"]\nlength = 384\nstratum = "needle"'
    study = load_study(write_study(tmp_path, (of_needle, section)))
    facts = read_facts(StudyRows(make_scalar_views(), STUDY, MODEL))
    listed = {(stratum, "development"): 3, (stratum, "evaluation"): 10}
    text = study_text(replace(facts, actions=[], settings=study.settings, listed=listed))
    assert text is not None
    told, _ = tomllib.loads(text)["documents"]
    assert (told["development"], told["evaluation"]) == (3, 10)
    assert told.get("stratum") == (stratum if "stratum" in section else None)

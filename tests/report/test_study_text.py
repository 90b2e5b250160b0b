"""The study file on the page: read again, it asks for the events of the store that it was written from."""

from __future__ import annotations

import re
import tomllib
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


def test_documents_of_a_section_without_a_stratum_are_counted(tmp_path: Path) -> None:
    """The stratum then has the name of its source and length."""
    study = load_study(write_study(tmp_path, ('stratum = "needle"\n', "")))
    (stratum,) = {part.stratum_name for part in study.documents} - {"tracking"}
    listed = {(stratum, "development"): 2, (stratum, "evaluation"): 3, ("tracking", "development"): 2}
    views = make_scalar_views()
    facts = replace(read_facts(StudyRows(views, STUDY, MODEL)), settings=study.settings, listed=listed)
    text = study_text(facts)
    assert text is not None
    assert [part["development"] for part in tomllib.loads(text)["documents"]] == [2, 2]
    assert [part["evaluation"] for part in tomllib.loads(text)["documents"]] == [3, 0]


@pytest.mark.parametrize(
    "section",
    [
        *({"selector": name, "keep": "all" if name in {"full", "numerics"} else 100} for name in SELECTORS),
        *({"codec": name} for name in CODECS),
        *({"policy": {"name": name}, "keep": 100} for name in POLICIES),
        {"selector": "snapkv", "keep": "1/3", "window": 32, "codec": {"name": "int4", "residual": 32}},
        {"selector": "snapkv", "keep": "1/3", "budget": "adakv", "layers": [0, -1], "codec": "int8"},
        {"codec": {"name": "turboquant-3bit", "skip_layers": [], "generated": True}},
        {"codec": {"keys": {"name": "int4", "group": 8}, "values": "turboquant-4bit", "skip_layers": [0]}},
        {"codec": {"values": "q4_0"}},
    ],
    ids=str,
)
def test_every_action_is_written_as_it_was(section: dict[str, object]) -> None:
    """For each selector, codec and policy, the stored row gives a section, and the section gives the same row."""
    try:
        row = build_action(ActionSection.model_validate({"name": "own"} | section)).row("s", prespecified=True)
    except Exception as error:  # noqa: BLE001 - a library that is not installed
        pytest.skip(str(error))
    facts = read_facts(StudyRows(make_scalar_views(), STUDY, MODEL))
    settings = '{"study": {"name": "s"}, "model": {"id": "m"}, "documents": []}'
    text = study_text(replace(facts, actions=[row], settings=settings))
    assert text is not None
    (written,) = tomllib.loads(text)["actions"]
    assert build_action(ActionSection.model_validate(written)).row("s", prespecified=True) == row


@pytest.mark.parametrize(
    ("section", "stratum"),
    [
        ("stratum = 'mine'\nlength = 512", "mine"),
        ("length = 512", "JSONL-512"),
        ("part = '1/2'\nlength = 512", "JSONL-512"),
    ],
)
def test_a_section_finds_its_documents_with_or_without_the_name_of_its_stratum(
    tmp_path: Path, section: str, stratum: str
) -> None:
    """The numbers of documents are counted by stratum; settings have none, since a study may grow."""
    of_needle = 'source = "embedded"\ntasks = ["needle"]\nlength = 384\nstratum = "needle"'
    of_file = f'source = "jsonl"\npath = "rows.jsonl"\n{section}'
    study = load_study(write_study(tmp_path, (of_needle, of_file)))
    facts = read_facts(StudyRows(make_scalar_views(), STUDY, MODEL))
    listed = {(stratum, "development"): 3, (stratum, "evaluation"): 10}
    text = study_text(replace(facts, actions=[], settings=study.settings, listed=listed))
    assert text is not None
    told, _ = tomllib.loads(text)["documents"]
    assert (told["development"], told["evaluation"]) == (3, 10)
    assert told.get("stratum") == (stratum if "stratum" in section else None)

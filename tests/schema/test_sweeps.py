"""Lists in a study file's actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.refusals import refused
from fixtures.small_study import TEXT

from kvdrift.schema.study import load_studies
from kvdrift.schema.study.reading import families, of_each_member

SWEEP = '[[actions]]\nname = "snapkv"\nselector = "snapkv"\nkeep = ["1/4", "25 %", 128]\ncodec = {codec}\n\n[plan]'


def names(*actions: dict[str, Any]) -> list[str]:
    return [one["name"] for one in of_each_member({"actions": [*actions]})["actions"]]


def test_each_member_is_an_action_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    swept = '["int8", { name = "int4", residual = 32 }]'
    path.write_text(TEXT.replace("[plan]", SWEEP.replace("{codec}", swept).replace("25 %", "3/4")), encoding="utf-8")
    (study,) = load_studies(path)
    members = [f"snapkv@{keep}@{codec}" for keep in ("1/4", "3/4", "128") for codec in ("int8", "int4")]
    assert [action.name for action in study.actions] == ["snapkv-half", "recent-half", *members]
    by_name = {action.name: action for action in study.actions}
    assert str(by_name["snapkv@128@int8"].retention) == "128"
    assert by_name["snapkv@3/4@int4"].codec_parameters == {"residual": 32}
    (plain,) = load_studies(_written(tmp_path / "plain.toml", TEXT))
    assert study.sha256 == plain.sha256


def test_a_member_is_the_action_of_that_name(tmp_path: Path) -> None:
    """A file that names one member by itself has the same action, and a plan names members."""
    one = '[[actions]]\nname = "snapkv@1/4"\nselector = "snapkv"\nkeep = "1/4"\n\n[plan]'
    listed = one.replace('"snapkv@1/4"', '"snapkv"').replace('"1/4"', '["1/4"]')
    texts = [TEXT.replace("[plan]", text).replace('"snapkv-half"\np', '"snapkv@1/4"\np') for text in (one, listed)]
    studies = [load_studies(_written(tmp_path / f"{at}.toml", text))[0] for at, text in enumerate(texts)]
    assert studies[0].actions == studies[1].actions
    assert {study.plan.baseline for study in studies} == {"snapkv@1/4"}


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("action", "where", "right"),
    [
        ({"keep": []}, "actions[0].keep = []", '["1/8", "1/4", "1/2"]'),
        ({"keep": ["1/4", "1/4"]}, "actions[0].keep", "'1/4' is given 2 times"),
        ({"keep": ["1/4", "3/0"]}, "actions[0].keep[1]", "keep = '3/0': write an integer"),
        ({"keep": [0.5]}, "actions[0].keep[0] = 0.5", '"1/2"'),
        ({"codec": ["int4", {"name": "int4", "group": 64}]}, "actions[0].codec", "'int4' is given 2 times"),
        ({"codec": [{"group": 64}]}, "actions[0].codec[0] = ", 'name = "int4"'),
        ({"keep": list(range(1, 258))}, "actions", "257 actions; write at most 256"),
    ],
)
def test_what_cannot_be(action: dict[str, Any], where: str, right: str) -> None:
    line = refused(of_each_member, {"actions": [{"name": "a", "selector": "snapkv", **action}]})
    assert line.startswith(where)
    assert right in line


def test_what_is_no_sweep_stays() -> None:
    for content in ({}, {"actions": 3}, {"actions": [3]}, {"actions": [{"keep": ["1/4"]}]}):
        assert of_each_member(content) == content
    assert names({"name": "a", "keep": "1/2"}, {"name": "b", "keep": ["1/2"]}) == ["a", "b@1/2"]


def test_families() -> None:
    members = ["a@1/4", "a@1/2", "b", "c@1/4@int8", "c@1/4@int4", "c@1/2@int8", "d@1/2"]
    assert families(members) == {"a": ["a@1/4", "a@1/2"], "c@int8": ["c@1/4@int8", "c@1/2@int8"]}

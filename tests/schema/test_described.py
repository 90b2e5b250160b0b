"""Descriptions of actions in words, made from rows of table ``actions``."""

from __future__ import annotations

import pytest

from kvdrift.generator.actions import build_action
from kvdrift.schema.study import ActionSection
from kvdrift.schema.study.described import described_action
from kvdrift.schema.tables import ACTIONS


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"selector": "snapkv", "keep": "1/2"}, "snapkv, half of the entries"),
        ({"selector": "snapkv", "keep": "90%"}, "snapkv, 9/10 of the entries"),
        ({"selector": "recent", "keep": 1024}, "recent, 1,024 entries"),
        (
            {"selector": "snapkv", "keep": "1/2", "budget": "adakv"},
            "snapkv, half of the entries, shared by the heads of a layer (adakv)",
        ),
        ({"codec": "fp8"}, "fp8 (e4m3, a scale for each head)"),
        ({"codec": {"name": "fp8", "format": "e5m2", "scale": 1}}, "fp8 (e5m2, no scale)"),
        ({"codec": "turboquant-4bit"}, "turboquant-4bit (the first and last 2 layers exact, 4-bit keys, 4-bit values)"),
        (
            {"codec": {"keys": "int8", "values": {"name": "q4_0"}, "skip_layers": [0, -1]}},
            "keys int8 (groups of 32, the last 128 exact), values q4_0, layers 0, -1 exact",
        ),
        ({"codec": {"values": "fp8"}}, "keys exact, values fp8 (e4m3, a scale for each head)"),
        (
            {"selector": "snapkv", "keep": "1/2", "codec": "mxfp4", "layers": [1]},
            "snapkv, half of the entries, only in layers 1, then mxfp4 (only in layers 1)",
        ),
        ({"codec": "int4"}, "int4 (groups of 32, the last 128 exact)"),
        ({"codec": "rotated-int4"}, "rotated-int4 (groups of 32)"),
        (
            {"selector": "snapkv", "keep": "1/4", "codec": {"name": "int8", "residual": 32}},
            "snapkv, a quarter of the entries, then int8 (groups of 32, the last 32 exact)",
        ),
        ({"policy": "h2o", "keep": "1/2"}, "h2o while decoding, at most half of the entries"),
        ({"selector": "numerics", "keep": "all"}, "the whole cache, computed in another way"),
    ],
)
def test_actions_of_a_study_file(section: dict[str, object], words: str) -> None:
    action = build_action(ActionSection.model_validate({"name": "a"} | section))
    assert described_action(action.row("s", prespecified=True)) == words


def test_actions_of_elsewhere() -> None:
    """The actions are a policy's, another generator's, a finite-state system's, and the control."""
    row = dict.fromkeys(ACTIONS.columns) | {"selector": "full", "keep": "1/2", "control": False}
    policy = row | {"policy": "sliding", "policy_parameters": '{"sinks": 4}'}
    assert described_action(policy) == "sliding (sinks 4) while decoding, at most half of the entries"
    assert described_action(row | {"keep": "the better half"}) == "full, the better half"
    assert described_action(row | {"keep": "unknown"}) == ""
    assert described_action(row | {"selector": "finite-state", "keep": "all"}) == ""
    assert described_action(row | {"control": True, "keep": "all"}) == "the full cache, as a control"

"""What a study file says wrongly of an action is one line: the action, the key or name, its value, and what is right."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.refusals import refused

from kvdrift.generator.actions import build_action
from kvdrift.schema.study import ActionSection

HALF: dict[str, Any] = {"keep": "1/2"}
NUMERICS: dict[str, Any] = {"selector": "numerics", "keep": "all"}


def codec(name: str, **parameters: Any) -> dict[str, Any]:
    return {"codec": {"name": name, **parameters}}


def policy(name: str, **parameters: Any) -> dict[str, Any]:
    return {"policy": {"name": name, **parameters}, "keep": 20}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        # Names
        ({"selector": "snapvk", **HALF}, ["selector 'snapvk'", "'snapkv'?"]),
        ({"selector": "kvpres:ChunkKVPress", **HALF}, ["selector 'kvpres:ChunkKVPress'", "'kvpres' is installed"]),
        ({"codec": "int3"}, ["codec 'int3'", "'int8'?"]),
        ({"codec": "zip"}, ["codec 'zip'", "MODULE:CLASS, fp8, hqq-int2, hqq-int4, hqq-int8, identity, int2, int4, int8, mxfp4, nvfp4, q4_0"]),
        (policy("slidng"), ["policy 'slidng'", "'sliding'?"]),
        ({"selector": "kvpress:ChunkKV", **HALF}, ["selector 'kvpress:ChunkKV'", "0.5.5", "'ChunkKVPress'?"]),
        ({"selector": "kvpress:ChunkKVPress", "press": "AdaKVPress", **HALF}, ["press = 'AdaKVPress'", "selects entries"]),
        ({"selector": "kvpress:ChunkKVPress", "press": "SnapKV", **HALF}, ["press = 'SnapKV'", "'SnapKVPress'?"]),
        ({"selector": "kvpress:ChunkKVPress", "press": "BlockPress", **HALF}, ["press = 'BlockPress'"]),
        ({"selector": "kvpress:CriticalKVPress", "press": "ObservedAttentionPress", **HALF}, ["'ObservedAttentionPress'"]),
        # Parameters that a part does not have
        ({"selector": "snapkv", "windw": 64, **HALF}, ["windw: ", "'window'?"]),
        ({"selector": "recent", "window": 8, **HALF}, ["selector 'recent'", "'window'; it takes sinks"]),
        ({"selector": "pyramidkv", "sinks": 4, **HALF}, ["'sinks'; it takes beta, budget, kernel, window"]),
        ({"selector": "full", "keep": "all", "sinks": 8}, ["'sinks'; it takes none"]),
        (codec("int4", grup=3), ["grup: ", "'group'?"]),
        (codec("int4", genrated=True), ["genrated: ", "'generated'?"]),
        (codec("fp8", bits=3), ["codec 'fp8'", "'bits'; it takes format, generated"]),
        (codec("int4", layer=[0]), ["layer: unknown key", "'layers'?"]),
        (codec("fp8", scale=2), ["scale = 2", '"head", "tensor" or 1']),
        (codec("fp8", scale=True), ["scale = True"]),
        (codec("turboquant", keys=5), ["keys = 5", "2, 3, 4 or 8"]),
        ({"codec": {"keys": "int8", "value": "int4"}}, ["codec.value", "keys, values"]),
        ({"codec": {"keys": "int9"}}, ["codec.keys", "'int9'", "'int8'?"]),
        ({"codec": {"keys": {"name": "int4", "groups": 8}}}, ["codec.keys: groups: ", "'group'?"]),
        ({"codec": {"values": {"name": "fp8", "scale": 2}}}, ["codec.values: scale = 2"]),
        ({"codec": {"keys": "int4", "group": 8}}, ["codec.group: ", "takes keys, values, "]),
        ({"codec": {"keys": {"name": "int4", "generated": True}}}, ["codec.keys.generated: "]),
        ({"codec": {"keys": {"name": "int4", "layers": [0]}}}, ["codec.keys.layers: ", "write codec.layers"]),
        (codec("hqq-int4", residual=2), ["codec 'hqq-int4'", "'residual'; it takes axis_key, axis_value"]),
        (policy("sliding", sink=4), ["sink: ", "'sinks'?"]),
        (policy("tova", sinks=4), ["policy 'tova'", "'sinks'; it takes none"]),
        # Types
        ({"selector": "snapkv", "window": "64", **HALF}, ["window = '64'", "integer"]),
        ({"selector": "snapkv", "window": 64.0, **HALF}, ["window = 64.0", "integer"]),
        ({"selector": "snapkv", "window": True, **HALF}, ["window = True", "integer"]),
        ({"selector": "expected_attention", "epsilon": "1", **HALF}, ["epsilon = '1'", "number"]),
        (codec("int4", group=[32, 64]), ["group = [32, 64]", "integer"]),
        (codec("int4", generated=1), ["generated = 1", "true or false"]),
        (policy("sliding", sinks="4"), ["sinks = '4'", "integer"]),
        (codec("fp8", skip_layers=["0"]), ["skip_layers = ['0']", "list"]),
        (codec("fp8", skip_layers=[True]), ["skip_layers = [True]", "list"]),
        (codec("fp8", skip_layers=0), ["skip_layers = 0", "list"]),
        ({"selector": "snapkv", "budget": "adakw", **HALF}, ["budget = 'adakw'", '"even" or "adakv"']),
        ({"selector": "recent", "budget": "adakv", **HALF}, ["selector 'recent'", "'budget'; it takes sinks"]),
        # Values
        ({"selector": "snapkv", "kernel": 4, **HALF}, ["kernel = 4", "odd"]),
        ({"selector": "snapkv", "kernel": 0, **HALF}, ["kernel = 0", "at least 1"]),
        ({"selector": "snapkv", "kernel": 2**40 + 1, **HALF}, ["kernel = 1099511627777", "at most 1,048,576"]),
        ({"selector": "recent", "sinks": -1, **HALF}, ["sinks = -1", "at least 0"]),
        ({"selector": "pyramidkv", "beta": 0, **HALF}, ["beta = 0", "at least 1"]),
        ({"selector": "random", "seed": -1, **HALF}, ["seed = -1", "at least 0"]),
        ({"selector": "expected_attention", "epsilon": float("nan"), **HALF}, ["epsilon = nan", "at least 0"]),
        ({"selector": "expected_attention", "future_positions": 0, **HALF}, ["future_positions = 0", "at least 1"]),
        ({**NUMERICS, "cache_dtype": "bfloat61"}, ["cache_dtype = 'bfloat61'", "'bfloat16'?"]),
        ({**NUMERICS, "prefill_chunk": 0}, ["prefill_chunk = 0", "at least 1"]),
        (codec("int4", group=0), ["group = 0", "at least 1"]),
        (codec("int4", residual=-1), ["residual = -1", "at least 0"]),
        (codec("hqq-int4", group=33), ["group = 33", "at least 2, a multiple of 2"]),
        (codec("hqq-int8", group=0), ["group = 0", "at least 1"]),
        (codec("hqq-int4", axis_value=2), ["axis_value = 2", "0 or 1"]),
        (policy("sliding", sinks=-1), ["sinks = -1", "at least 0"]),
        ({"codec": "fp8", "skip_layers": [0, 1, 0]}, ["skip_layers = [0, 1, 0]: names a layer twice"]),
        (codec("fp8", layers=[]), ["layers = []: names no layer"]),
        (codec("fp8", layers=[0], skip_layers=[1]), ["layers and skip_layers: write one"]),
        # Parts that do not go together
        ({"selector": "full", **HALF}, ['keep = "all"']),
        ({"selector": "numerics", **HALF}, ["'numerics'", 'keep = "all"']),
        ({**NUMERICS, "codec": "int4"}, ["'numerics'", "codec"]),
        ({"selector": "full", "codec": "int4", **HALF}, ['keep = "all"']),
        ({"selector": "full", "keep": "all", "skip_layers": [0]}, ["has layers", "leave layers out"]),
        ({**NUMERICS, "layers": [0]}, ["'numerics'", "leave layers"]),
        ({"selector": "snapkv", "budget": "adakv", **HALF, **codec("int4", generated=True)}, ["generated = true: codes all heads", "budget = 'adakv'"]),
        ({"selector": "snapkv", "budget": "adakv", **HALF, "codec": {"keys": "nvfp4"}}, ["codec: codes all heads", "budget = 'adakv'"]),
        ({"codec": {"keys": "int4", "values": "fp8", "generated": True}}, ["the last 128 keys and the last 0 values"]),
        ({"codec": {"values": "int8", "generated": True}}, ["the last 0 keys and the last 128 values"]),
    ],
)  # fmt: skip
def test_a_wrong_action_is_the_users_mistake(section: dict[str, Any], says: list[str]) -> None:
    line = refused(build_action, ActionSection(name="mine", **section))
    assert line.startswith("action 'mine': ")
    assert [part for part in says if part not in line] == [], line

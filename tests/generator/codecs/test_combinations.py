"""Codecs of keys beside codecs of values, and layers that stay exact: against their parts, and against real caches."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, assert_like_plain, eager_network, steps_of
from fixtures.refusals import refused
from oracles.plain_codecs import Numbers
from oracles.plain_generated import CodedStream
from oracles.plain_generator import plain_streams_rollout

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.holding import AsComputed, StoredBytes, checksum, in_words
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.checks.random_models import EOS_TOKENS, random_document, random_model
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.codecs.codec import EntryCodec
from kvdrift.generator.codecs.combined import KeysAndValues
from kvdrift.generator.codecs.generated import GeneratedEntries
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.identity import parts_sha256
from kvdrift.generator.selectors.layer_choice import LayerChoice
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.log.store import Unit
from kvdrift.schema.study import ActionSection

LENGTH, HORIZON, SEED, LAYERS = 45, 20, 3, 4
SMALL: dict[str, dict[str, int]] = {  # windows and groups that a prompt of 45 entries fills
    name: {"group": 8, "residual": 4} for name in ("int8", "int4", "int2", "rotated-int4")
}
PAIRS = [
    ("fp8", "int4"), ("int8", "q4_0"), ("turboquant-k8v4", "nvfp4"), ("identity", "turboquant-3bit"),
    ("mxfp4", "identity"), ("rotated-int4", "int2"), ("turboquant", "fp8"),
]  # fmt: skip


def action_of(name: str = "mine", **section: Any) -> Action:
    return build_action(ActionSection(name=name, **section))


def written(name: str) -> dict[str, Any]:
    return {"name": name, **SMALL.get(name, {})}


def layer_of(size: int = 32) -> PrefixLayer:
    key, value = torch.randn(2, 2, LENGTH, size, generator=torch.Generator().manual_seed(1))
    key[..., 1] += 30
    return PrefixLayer(key, value)


def generate(actions: list[Action], count: int = 3, **options: Any) -> list[Unit]:
    pending = [PendingUnit(action, 0, count) for action in actions]
    return generate_units(model(), "s", document(), pending, HORIZON, SEED, **options)


def model() -> Any:
    return random_model("llama", layers=LAYERS)


def document() -> Any:
    return random_document("combined", LENGTH)


# --- Keys by one codec, values by another ------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_numbers_and_bytes_are_those_of_the_two_codecs(keys: str, values: str) -> None:
    layer = layer_of()
    of_keys, of_values = (CODECS[name](**SMALL.get(name, {})) for name in (keys, values))
    both = KeysAndValues(of_keys, of_values)
    held, whole_keys, whole_values = both.hold(layer), of_keys.hold(layer), of_values.hold(layer)
    assert torch.equal(held.key, whole_keys.key)
    assert torch.equal(held.value, whole_values.value)
    parts = of_keys.stored_bytes(layer.key, "keys"), of_values.stored_bytes(layer.value, "values")
    counted = both.layer_bytes(layer)
    assert counted == StoredBytes(sum(part.payload for part in parts), sum(part.scales for part in parts))
    halves = [KeysAndValues(keys=of_keys).layer_bytes(layer), KeysAndValues(values=of_values).layer_bytes(layer)]
    assert sum(half.total for half in halves) == counted.total + layer.key.nbytes + layer.value.nbytes
    one = KeysAndValues(of_keys, of_keys)
    assert (one.layer_bytes(layer), torch.equal(one.hold(layer).value, whole_keys.value)) == (
        of_keys.layer_bytes(layer), True,
    )  # fmt: skip


def test_a_part_that_is_left_out_is_exact() -> None:
    layer = layer_of()
    for part, other in (("keys", "value"), ("values", "key")):
        action = action_of(codec={part: "int2"})
        assert isinstance(action.codec, KeysAndValues)
        assert torch.equal(getattr(action.codec.hold(layer), other), getattr(layer, other))
    assert action_of(codec={"keys": "int2"}).codec_name == "int2+exact"
    assert action_of(codec={"values": "int2"}).codec_name == "exact+int2"


def test_the_identity_covers_both_codecs_and_their_sides() -> None:
    codecs: list[Any] = [
        "int4", "int8", {"keys": "int4", "values": "int8"}, {"keys": "int8", "values": "int4"}, {"keys": "int4"},
        {"values": "int4"}, {"keys": "int4", "values": "int4"}, {"keys": {"name": "int4", "group": 64}},
    ]  # fmt: skip
    actions = [action_of(codec=codec) for codec in codecs]
    assert len({parts_sha256(action.parts) for action in actions}) == len(codecs)
    assert len({str(action.codec_parameters) + str(action.codec_name) for action in actions}) == len(codecs)
    twin = action_of(codec={"values": {"name": "int8"}, "keys": "int4"})
    assert twin == actions[2]
    assert parts_sha256(twin.parts) == parts_sha256(actions[2].parts)


# --- Generated entries -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shrunk(EntryCodec):
    """A codec that scales numbers: it has no ties, so no rounding shows."""

    summary: ClassVar[str] = "for tests"
    factor: float = 0.9

    def round_trip(self, numbers: torch.Tensor, part: str) -> torch.Tensor:  # noqa: ARG002
        return numbers * self.factor

    def stored_bytes(self, numbers: torch.Tensor, part: str) -> StoredBytes:  # noqa: ARG002
        return StoredBytes(numbers.numel(), 8)


@dataclass
class PlainShrunk:
    """Its plain twin, by which keys and values shrink apart, but for the layers in ``exact``."""

    factors: dict[str, float]
    exact: Collection[int] = ()
    together: int = 1
    residual: int = 0

    def see(self, part: Numbers, layer: int, name: str) -> None:
        """No scale of a prompt is needed."""

    def coded(self, part: Numbers, layer: int, name: str) -> Numbers:
        return part if layer in self.exact else part * np.float32(self.factors[name])


SHRINKING = KeysAndValues(Shrunk(0.8), Shrunk(0.7))
FACTORS = {"keys": 0.8, "values": 0.7}
UNLIKE = {"skip_layers": None, "layers": [1]}  # layers that no case has


def shrinking(*, generated: bool, **section: Any) -> Action:
    """Return an action that shrinks keys and values; ``section`` has its layers and its selector."""
    action = action_of(codec="identity", **section)
    return replace(action, codec=SHRINKING, generated=GeneratedEntries(SHRINKING) if generated else None)


@cache
def network() -> Any:
    return eager_network(layers=LAYERS)


@pytest.mark.parametrize(
    ("section", "exact"),
    [
        ({}, ()),
        ({"skip_layers": [0, -1]}, (0, 3)),
        ({"layers": [2], "selector": "snapkv", "keep": "1/2", "window": 4}, (0, 1, 3)),
        ({"skip_layers": [1], "selector": "pyramidkv", "keep": "1/2", "window": 4}, (1,)),
    ],
    ids=["whole", "ends", "snapkv", "pyramidkv"],
)
@pytest.mark.by_default("snapkv")
def test_generated_entries_are_coded_as_in_a_real_cache(section: dict[str, Any], exact: tuple[int, ...]) -> None:
    """Tokens are equal and distances differ by less than 1e-5; exact layers keep every entry, whatever the selector."""
    action = shrinking(generated=True, **section)
    (unit,) = generate([action], count=2)
    layers = Prompt(model(), document().tokens, 4, action.selector.statistics).layers
    kept = evict(
        layers, action.selector, action.retention.kept(LENGTH), action.holdings(LAYERS), action.chosen.left_out(LAYERS)
    ).indices  # fmt: skip
    tokens = document().tokens
    plain = plain_streams_rollout(
        CodedStream(network(), tokens, None).fork,
        CodedStream(network(), tokens, PlainShrunk(FACTORS, exact), kept).fork,  # type: ignore[arg-type]
        seed=SEED, document=document().doc, action=action.name, replicates=range(2), horizon=HORIZON,
        eos_tokens=EOS_TOKENS,
    )  # fmt: skip
    assert_like_plain(unit, plain)
    others = shrinking(generated=False, **section), shrinking(generated=True, **section | UNLIKE)
    for other in others:
        (unlike,) = generate([other], count=2)
        assert np.abs(steps_of(unit)["f"] - steps_of(unlike)["f"]).max() > 1e-3


# --- Layers ------------------------------------------------------------------------------------------------------------


def kept_hash(positions: torch.Tensor) -> str:
    return hashlib.sha256(positions.numpy().astype("<i4").tobytes()).hexdigest()


EVERYTHING = kept_hash(torch.arange(LENGTH).expand(2, -1))


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize(
    ("layers", "exact"),
    [({"skip_layers": [0, -1]}, (0, 3)), ({"layers": [0, -2]}, (1, 3)), ({"skip_layers": [2]}, (2,))],
)
@pytest.mark.by_default("layers0-exact0-True", "layers1-exact1-False")
def test_skipped_layers_are_exact_and_count_as_such(
    layers: dict[str, Any], exact: tuple[int, ...], *, generated: bool
) -> None:
    """The entries of an exact layer have the checksum of the prompt's own entries. Bytes are summed over layers."""
    codec = {"keys": "fp8", "values": "turboquant-4bit", "skip_layers": [], "generated": generated}
    some, everywhere, own = (
        action_of("some", codec={key: codec[key] for key in ("keys", "values", "generated")}, **layers),
        action_of("everywhere", codec=codec),
        action_of("own", codec={key: codec[key] for key in ("keys", "values", "generated")} | layers),
    )
    units = generate([some, everywhere, own, CONTROL], count=1)
    assert units[0].record["read_checksums"] == units[2].record["read_checksums"]
    assert parts_sha256(some.parts) == parts_sha256(own.parts) != parts_sha256(everywhere.parts)
    prompt = Prompt(model(), document().tokens, 0).layers
    computed = in_words([checksum(layer.key, layer.value) for layer in prompt])
    payload = scales = 0
    for number, layer in enumerate(prompt):
        sums = [unit.record["read_checksums"][number] for unit in units[:2]]
        assert (sums[0] == computed[number]) is (number in exact)
        assert (sums[0] == sums[1]) is (number not in exact)
        holding = AsComputed() if number in exact else some.codec
        assert holding is not None
        stored = holding.layer_bytes(PrefixLayer(layer.key, layer.value))
        payload, scales = payload + stored.payload, scales + stored.scales
    record = units[0].record
    assert (record["payload_bytes"], record["scale_bytes"], record["index_bytes"]) == (payload, scales, 0)
    assert record["kept_sha256"] == [EVERYTHING] * LAYERS
    assert not any(units[3].events["delta"].to_pylist())


@pytest.mark.parametrize("codec", [None, "fp8", {"name": "fp8", "generated": True}])
@pytest.mark.parametrize("selector", ["recent", "snapkv", "pyramidkv"])
@pytest.mark.by_default("recent-fp8", "snapkv-codec2", "pyramidkv-None")
def test_a_selector_keeps_everything_in_skipped_layers(selector: str, codec: Any) -> None:
    """In other layers it keeps what it keeps alone, but that budgets are shared among these layers."""
    options: dict[str, Any] = {"selector": selector, "keep": 20} | ({"window": 4} if selector != "recent" else {})
    some, plain = action_of("some", **options, skip_layers=[1], codec=codec), action_of("plain", **options)
    units = generate([some, plain], count=1)
    kept = some.layer_entries(20, LENGTH, LAYERS)
    assert kept[1] == LENGTH
    assert sum(kept) - kept[1] == 20 * (LAYERS - 1)
    record, alone = units[0].record, units[1].record["kept_sha256"]
    assert record["kept_sha256"][1] == EVERYTHING
    if selector != "pyramidkv":
        assert kept == [20, LENGTH, 20, 20]
        assert [record["kept_sha256"][number] for number in (0, 2, 3)] == [alone[number] for number in (0, 2, 3)]
    assert record["kept_entries"] == sum(kept) // LAYERS
    assert record["index_bytes"] == 2 * 4 * (sum(kept) - kept[1])
    entry = 2 * 2 * 16  # numbers of an entry in a layer: keys and values, heads, size
    width = 4 if codec is None else 1
    assert record["payload_bytes"] == entry * (kept[1] * 4 + (sum(kept) - kept[1]) * width)
    assert record["scale_bytes"] == (0 if codec is None else 2 * 2 * 2 * (LAYERS - 1))
    if codec is not None:
        prompt = Prompt(model(), document().tokens, 0).layers
        assert record["read_checksums"][1] == in_words([checksum(prompt[1].key, prompt[1].value)])[0]


def test_all_but_some_layers_are_as_the_others_are_named() -> None:
    """The layers are part of the identity, as they are written; the entries are the same."""
    twins = [
        action_of(f"twin{number}", selector="recent", keep=12, codec="fp8", **layers)
        for number, layers in enumerate(({"skip_layers": [0, 3]}, {"layers": [1, 2]}, {"layers": [-3, -2]}))
    ]
    units = generate(twins, count=1)
    for column in ("read_checksums", "kept_sha256", "payload_bytes", "scale_bytes", "index_bytes", "resident_bytes"):
        assert len({str(unit.record[column]) for unit in units}) == 1
    whole = action_of("whole", selector="recent", keep=12, codec="fp8")
    assert whole.parts == action_of("whole", selector="recent", keep=12, codec="fp8", skip_layers=[]).parts
    assert parts_sha256(whole.parts) not in {parts_sha256(twin.parts) for twin in twins}


def test_a_codecs_own_layers_hold_for_the_codec_alone() -> None:
    own = action_of(selector="recent", keep=12, codec={"name": "fp8", "skip_layers": [0]})
    (unit,) = generate([own], count=1)
    assert EVERYTHING not in unit.record["kept_sha256"]
    assert own.chosen.left_out(LAYERS) == frozenset()
    assert own.coded.left_out(LAYERS) == {0}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"codec": "fp8", "skip_layers": [4]}, "fp8: skip_layers = [4]: the model has 4 layers with full attention; 4 is none of -4 to 3"),
        ({"codec": "fp8", "layers": [0, -5]}, "fp8: layers = [0, -5]: the model has 4 layers with full attention; -5 is none of -4 to 3"),
        ({"codec": "fp8", "skip_layers": [0, 1, 2, 3]}, "fp8: all layers that there are of 4 stay exact, "),
        ({"codec": "turboquant-3bit"}, "turboquant-3bit: the first 2 and the last 2 layers of 4 stay exact, "),
        ({"codec": {"keys": "int8", "values": "turboquant-4bit"}}, "int8+turboquant-4bit: the first 2 and the last 2 layers of 4 "),
        ({"selector": "recent", "keep": 12, "layers": [7]}, "recent: layers = [7]: the model has 4 layers "),
    ],
)  # fmt: skip
def test_layers_that_the_model_lacks_are_refused(section: dict[str, Any], says: str) -> None:
    action = action_of(**section)
    assert refused(action.check_layer_numbers, LAYERS).startswith(f"action 'mine': {says}")
    assert refused(generate, [action]).startswith(f"action 'mine': {says}")


def test_a_layer_named_from_both_ends_counts_once() -> None:
    """-4 of 4 layers is layer 0; a list of ends, such as 0, 1, -2 and -1, suits models of few layers, too."""
    assert action_of(codec="fp8", skip_layers=[0, -4]).coded.left_out(LAYERS) == {0}
    assert action_of(codec="fp8", skip_layers=[0, 1, -2, -1]).coded.left_out(5) == {0, 1, 3, 4}


@pytest.mark.parametrize(("count", "exact"), [(5, {0, 1, 3, 4}), (6, {0, 1, 4, 5}), (30, {0, 1, 28, 29})])
def test_the_presets_of_turboquant_leave_two_layers_at_either_end_exact(count: int, exact: set[int]) -> None:
    for codec in ("turboquant", "turboquant-3bit", {"values": "turboquant-4bit"}):
        assert action_of(codec=codec).coded.left_out(count) == exact
        assert action_of(codec=codec, skip_layers=[]).coded.left_out(count) == frozenset()
        assert action_of(codec=codec, layers=[0]).coded.left_out(count) == set(range(1, count))
    assert LayerChoice(ends=2).left_out(3) == {0, 2}, "no more than half of the layers at each end, as in vLLM"
    assert isinstance(action_of(codec={"values": "turboquant-4bit"}).codec, KeysAndValues)

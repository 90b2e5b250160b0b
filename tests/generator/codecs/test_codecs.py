"""Codecs against plain loops, closed bounds of the errors of integers, and torch's quantizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.devices import SECOND, TwoDevices
from fixtures.own_codecs import MODULE as OWN
from fixtures.refusals import refused
from oracles import plain_codecs
from oracles.plain_codecs import Stored

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.codecs import CODECS, Codec
from kvdrift.generator.codecs.affine import float16_above, float16_below
from kvdrift.generator.codecs.hqq import HQQ
from kvdrift.generator.codecs.kivi import KIVI, Int2, Int4, Int8
from kvdrift.generator.codecs.rotated import RotatedInt4, hadamard
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.identity import parts_sha256, selector_sha256
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.footprint import Footprint
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import ActionSection


def without_exact(plain: Callable[..., tuple[Any, Any, Stored]], **options: Any) -> Callable[..., Any]:
    """Return a plain codec that leaves no number exact, and so needs no bytes of numbers."""
    return lambda key, value, _, **parameters: plain(key, value, **options, **parameters)


PLAIN: dict[str, Callable[..., tuple[Any, Any, Stored]]] = {
    "fp8": without_exact(plain_codecs.fp8),
    "nvfp4": without_exact(plain_codecs.nvfp4),
    **{name: without_exact(plain_codecs.blocks, kind=name) for name in plain_codecs.BLOCKS},
    **{name: without_exact(plain_codecs.turboquant, name=name) for name in plain_codecs.TURBOQUANT},
    "int8": partial(plain_codecs.kivi, bits=8),
    "int4": partial(plain_codecs.kivi, bits=4),
    "int2": partial(plain_codecs.kivi, bits=2),
    "rotated-int4": partial(plain_codecs.rotated, bits=4),
}


def layer_of(entries: int, size: int = 16, heads: int = 2, dtype: str = "float32", scale: float = 1.0) -> PrefixLayer:
    """Return random keys and values, with one channel of large keys and one constant channel."""
    generator = torch.Generator().manual_seed(entries * 1000 + size)
    key, value = torch.randn(2, heads, entries, size, generator=generator) * scale
    key[..., 1] += 30 * scale
    key[..., 2] = 0.3
    return PrefixLayer(key.to(DTYPES[dtype]), value.to(DTYPES[dtype]))


def action_of(**section: Any) -> Action:
    return build_action(ActionSection(name="mine", **section))


# --- What is read back, and its bytes --------------------------------------------------------------------------------


def test_every_codec_but_the_control_has_a_plain_twin() -> None:
    """A codec without a plain twin is compared with a library in ``test_quantized_cache.py``."""
    own = {name for name, kind in CODECS.items() if not issubclass(kind, HQQ)}
    assert set(PLAIN) == own - {"identity"}


@pytest.mark.parametrize(
    ("name", "entries", "size", "parameters"),
    [
        ("int4", 128, 16, {}), ("int4", 190, 16, {}), ("int8", 161, 16, {}), ("int2", 193, 16, {}),
        ("int8", 40, 16, {"group": 5, "residual": 3}), ("int4", 33, 16, {"group": 32, "residual": 0}),
        ("int2", 31, 16, {"group": 32, "residual": 0}), ("rotated-int4", 25, 16, {}),
        ("rotated-int4", 25, 16, {"group": 6, "residual": 4}),
        *(("fp8", 10, 24, {"format": form, "scale": scale}) for form in ("e4m3", "e5m2") for scale in ("head", "tensor", 1)),
        ("fp8", 1, 16, {}), ("nvfp4", 3, 64, {}), ("nvfp4", 4, 48, {}), ("mxfp4", 3, 64, {}), ("mxfp4", 5, 32, {}),
        ("q8_0", 3, 64, {}), ("q5_1", 3, 64, {}), ("q4_0", 3, 64, {}), ("q4_0", 4, 96, {}),
        ("turboquant", 5, 16, {}), ("turboquant", 5, 64, {"keys": 2, "values": 3, "norm_correction": False}),
        ("turboquant", 5, 8, {"keys": 3, "values": 2}), ("turboquant", 5, 24, {"keys": 8, "values": 8}),
        ("turboquant-k8v4", 5, 64, {}), ("turboquant-4bit", 4, 128, {}), ("turboquant-k3v4", 5, 64, {}),
        ("turboquant-3bit", 5, 64, {}), ("turboquant-3bit", 1, 4, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.by_default(
    "float32",
    "bfloat16-int4-190-16-parameters1",
    "float16-fp8-10-24-parameters9",
    "bfloat16-turboquant-5-16-parameters24",
)
def test_a_round_trip_is_the_plain_one_in_the_same_bytes(
    name: str, entries: int, size: int, parameters: dict[str, Any], dtype: str
) -> None:
    assert_plain(name, layer_of(entries, size, dtype=dtype), parameters)


def assert_plain(name: str, layer: PrefixLayer, parameters: dict[str, Any]) -> None:
    """Compare a layer's round trip and its bytes with those of the plain twin."""
    codec, dtype = CODECS[name](**parameters), layer.key.dtype
    key, value, stored = PLAIN[name](
        layer.key.float().numpy(), layer.value.float().numpy(),
        *([layer.key.itemsize]), **parameters
    )  # fmt: skip
    held = codec.hold(layer)
    for read, expected, numbers in ((held.key, key, layer.key), (held.value, value, layer.value)):
        wanted = torch.from_numpy(expected).to(dtype).float()
        assert read.dtype == dtype
        length = numbers.float().norm(dim=-1).max() if "turboquant" in name else 0  # rotations spread its roundings
        relative, absolute = 2e-6 if dtype == torch.float32 else 2**-7, max(1e-6, 2e-7 * float(length))
        assert torch.allclose(read.float(), wanted, rtol=relative, atol=absolute)
    counted = codec.layer_bytes(layer)
    assert (counted.payload, counted.scales) == (stored.payload, stored.scale_bytes)


@pytest.mark.parametrize("name", PLAIN)
def test_zeros_constants_ties_and_outliers_are_as_the_plain_one_has_them(name: str) -> None:
    """Entries of zeros, of one number, of multiples of 1/4 up to 6, of tiny numbers, and with one large number.

    No entry is so late that it stays exact. Multiples of 1/4 are no ties for rotated keys, but some of their
    coordinates vanish up to rounding, which is one.
    """
    parameters = {"group": 8, "residual": 0} if issubclass(CODECS[name], KIVI) else {}
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 1, 8, 32, generator=generator)
    for part in (key, value):
        part[:, 0], part[:, 1], part[:, 2] = 0, 3, -0.1
        if part is value or "turboquant" not in name:
            part[:, 3], part[:, 4] = torch.arange(-7, 25) / 4, -torch.arange(-7, 25) / 4
        part[:, 5] *= 1e-6
        part[:, 6, 9], part[:, 7, 0] = -6e4, 700
    assert_plain(name, PrefixLayer(key, value), parameters)
    zeros = torch.zeros(1, 16, 32)
    assert_plain(name, PrefixLayer(zeros, zeros), parameters)


@pytest.mark.parametrize(
    ("parameters", "pairs"),
    [
        (
            {"format": "e4m3", "scale": 1},
            [(17, 16), (19, 20), (-17, -16), (18.01, 18), (2**-10, 0), (3 * 2**-10, 2**-8), (-(2**-9), -(2**-9)),
             (447, 448), (464, 448), (-1e5, -448)],
        ),
        (
            {"format": "e5m2", "scale": 1},
            [(4.5, 4), (5.5, 6), (-5.5, -6), (2**-17, 0), (3 * 2**-17, 2**-15), (57343, 57344), (61440, 57344),
             (-1e5, -57344)],
        ),
    ],
)  # fmt: skip
def test_fp8_rounds_to_even_and_cuts_off(parameters: dict[str, Any], pairs: list[tuple[float, float]]) -> None:
    """The numbers follow from the formats: of e4m3 from 16 on every second one, subnormal ones in steps of 2^-9."""
    numbers, expected = (torch.tensor(column).view(1, 1, -1) for column in zip(*pairs, strict=True))
    held = CODECS["fp8"](**parameters).hold(PrefixLayer(numbers, -numbers))
    assert torch.equal(held.key, expected)
    assert torch.equal(held.value, -expected)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_e2m1_rounds_to_even(name: str) -> None:
    """The first entry sets nvfp4's scale of the layer to 1; the scale of a block whose largest number is 6 is 1."""
    pairs = [
        (0.25, 0), (0.2501, 0.5), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.01, 6), (6, 6),
        (0.74, 0.5), (1.26, 1.5), (1.74, 1.5), (2.51, 3), (3.49, 3), (4.99, 4),
    ]  # fmt: skip
    numbers, expected = (
        torch.tensor([*column, *(-number for number in column)]) for column in zip(*pairs, strict=True)
    )
    layer = torch.stack([torch.full((32,), 2688.0), numbers])[None]
    read = CODECS[name]().round_trip(layer, "keys")
    assert torch.equal(read[0, 1], expected)
    assert name == "mxfp4" or bool((read[0, 0] == 2688).all())
    above = torch.full((1, 1, 32), 7.9)
    assert bool((CODECS["mxfp4"]().round_trip(above, "keys") == 6).all()), "the scale of 4 to 8 is 1"


BLOCKS = ("q8_0", "q5_1", "q4_0", "mxfp4", "nvfp4")


@pytest.mark.parametrize(
    ("codec", "size", "says"),
    [
        *((name, 40, f"heads of 40 channels do not fill blocks of {16 if name == 'nvfp4' else 32}, in which {name} stores them") for name in BLOCKS),
        ("turboquant-3bit", 24, "heads of 24 channels have no Hadamard transform"),
        ("rotated-int4", 24, "heads of 24 channels have no Hadamard transform"),
        ({"keys": "turboquant", "values": "fp8"}, 24, "heads of 24 channels have no Hadamard transform"),
        ({"keys": "fp8", "values": "q4_0"}, 48, "heads of 48 channels do not fill blocks of 32"),
        ({"name": "q8_0", "rotated": True}, 96, "q8_0: llama.cpp rotates no heads of 96 channels"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_coded_are_refused(codec: Any, size: int, says: str) -> None:
    action = action_of(codec=codec)
    assert refused(action.check_heads, size).startswith(f"action 'mine': codec '{action.codec_name}': {says}")


@pytest.mark.parametrize(
    ("codec", "size"),
    [*((name, 96) for name in BLOCKS), ("turboquant-k8v4", 24), ({"values": "turboquant"}, 24)],
)
def test_heads_that_can_be_coded_are_accepted(codec: Any, size: int) -> None:
    action_of(codec=codec).check_heads(size)


@pytest.mark.parametrize("kind", [Int8, Int4, Int2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_integers_are_within_half_a_step(kind: type[KIVI], scale: float) -> None:
    """The step is (b - a) / (2^bits - 1) of the group, but for the rounding of scale and zero point to float16."""
    codec = kind(residual=32)
    layer = layer_of(7 * 32 + 5, size=64, scale=scale)
    held, levels = codec.hold(layer), 2**kind.bits - 1
    keys, values = layer.key[:, : 6 * 32], layer.value[:, : 6 * 32 + 5]
    exact = (held.key[:, keys.shape[1] :], layer.key[:, keys.shape[1] :])
    assert torch.equal(*exact)
    assert torch.equal(held.value[:, values.shape[1] :], layer.value[:, values.shape[1] :])
    for numbers, read in (
        (keys.unflatten(1, (-1, 32)).transpose(2, 3), held.key[:, : 6 * 32].unflatten(1, (-1, 32)).transpose(2, 3)),
        (values.unflatten(2, (-1, 32)), held.value[:, : 6 * 32 + 5].unflatten(2, (-1, 32))),
    ):
        least, most = numbers.aminmax(dim=-1, keepdim=True)
        tiny = 2.0**-24  # float16's smallest steps
        step = ((most - least + least.abs() * 2**-10 + tiny) / levels) * (1 + 2**-10) + tiny
        error = (read - numbers).abs()
        assert bool((error <= step / 2 + 1e-6 * numbers.abs()).all())
        assert float((error / step).max()) > 0.4, "the bound is sharp"


def test_rotated_vectors_are_within_half_a_step_in_length() -> None:
    layer = layer_of(60, size=64)
    held = RotatedInt4(group=64).hold(layer)
    for numbers, read in ((layer.key, held.key), (layer.value, held.value)):
        turned = hadamard(numbers)
        step = (turned.amax(-1) - turned.amin(-1)) / 15 * 1.01 + turned.abs().amax(-1) * 2**-10
        assert bool(((read - numbers).norm(dim=-1) <= step / 2 * 64**0.5).all())


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_hadamard_transform_is_scipys_and_its_own_inverse(size: int) -> None:
    vectors = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(size))
    matrix = torch.from_numpy(plain_codecs.hadamard(size) / np.sqrt(size)).float()
    assert torch.allclose(hadamard(vectors), vectors @ matrix, atol=1e-5)
    assert torch.allclose(hadamard(hadamard(vectors)), vectors, atol=1e-5)


def test_float16_is_rounded_one_way() -> None:
    numbers = torch.cat([torch.randn(2000) * 10.0**power for power in range(-9, 4)] + [torch.tensor([0.0, 65504.0])])
    below, above = float16_below(numbers), float16_above(numbers)
    assert bool((below <= numbers).all())
    assert bool((above >= numbers).all())
    expected = [plain_codecs.float16_not_above(number) for number in numbers.tolist()]
    assert below.tolist() == [float(number) for number in expected]


# --- Another library's quantizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Int8, Int4, Int2])
def test_values_are_as_torch_quantizes_them(kind: type[KIVI]) -> None:
    """torch's zero points are integers, so values agree if a group's zero point is a whole number of steps."""
    levels, size = 2**kind.bits - 1, 32
    generator = torch.Generator().manual_seed(kind.bits)
    first = torch.randint(-levels, 1, (40, 1), generator=generator)  # the zero point, in steps
    numbers = (torch.rand(40, size, generator=generator) * levels + first) / 4
    numbers[:, 0], numbers[:, 1] = first[:, 0] / 4, (first[:, 0] + levels) / 4  # the step is 1/4
    layer = PrefixLayer(torch.randn(1, 40, size, generator=generator), numbers[None])
    own = kind(residual=0).hold(layer).value[0]
    theirs = torch.fake_quantize_per_channel_affine(
        numbers, torch.full((40,), 0.25), (-first[:, 0]).to(torch.int32), 0, 0, levels
    )
    assert torch.allclose(own, theirs, atol=1e-6)


# --- As parts of actions ---------------------------------------------------------------------------------------------


def test_a_codec_is_part_of_the_row_and_the_identity() -> None:
    """Without a codec the identity is the selector's alone, as it was before there were codecs."""
    plain, coded, wide, whole = (
        action_of(selector="snapkv", keep="1/2"),
        action_of(selector="snapkv", keep="1/2", codec="int4"),
        action_of(selector="snapkv", keep="1/2", codec={"name": "int4", "group": 64}),
        action_of(codec="int4"),
    )
    rows = [action.row("s", prespecified=True) for action in (plain, coded, wide, whole)]
    assert [(row["codec"], row["codec_parameters"]) for row in rows] == [
        (None, None),
        ("int4", '{"group": 32, "residual": 128}'),
        ("int4", '{"group": 64, "residual": 128}'),
        ("int4", '{"group": 32, "residual": 128}'),
    ]
    assert (rows[3]["selector"], rows[3]["keep"]) == ("full", "all")
    assert parts_sha256(plain.parts) == selector_sha256(plain.selector)
    assert len({parts_sha256(action.parts) for action in (plain, coded, wide, whole)}) == 4
    assert coded == action_of(selector="snapkv", keep="1/2", codec={"name": "int4"})


@pytest.mark.parametrize(
    ("kept", "entries", "alike"),
    [(100, 300, False), (300, 300, True)],
)
def test_unlike_budgets_of_layers_are_not_held_to_equal_bytes(kept: int, entries: int, *, alike: bool) -> None:
    snapkv, pyramidkv = (action_of(selector=name, keep=kept, codec="int4") for name in ("snapkv", "pyramidkv"))
    ways = [action.decides_bytes(entries, 4) for action in (snapkv, pyramidkv)]
    assert (ways[0] == ways[1]) is alike
    bare = [action_of(selector=name, keep=kept).decides_bytes(entries, 4) for name in ("snapkv", "pyramidkv")]
    assert bare[0] == bare[1] != ways[0]


def own_action(folder: Path, text: str) -> Action:
    (folder / "my_codec.py").write_text(text)
    return build_action(ActionSection(name="mine", codec="my_codec:Mine"), folder)


def test_what_fails_in_a_run_has_its_line(tmp_path: Path) -> None:
    pending = [PendingUnit(own_action(tmp_path, OWN.replace("self.step).round()", "self.stepp).round()")), 0, 1)]
    work = random_model("llama"), "s", random_document("d", 150), pending, 2, 7
    line = refused(generate_units, *work, error=OperationError)
    assert line.startswith("codec Mine: AttributeError: ")
    assert line.endswith(f" ({tmp_path}/my_codec.py, line 18)")


@pytest.mark.parametrize(
    ("stored_bytes", "begin", "end"),
    [
        ("StoredBytes(-1)", "stored_bytes returned StoredBytes(payload=-1, scales=0); ", ""),
        ("int(numbers.sum())", "", "my_codec.py, line 21)"),
    ],
)
def test_bytes_that_a_codec_of_ones_own_cannot_say_are_one_line(
    tmp_path: Path, stored_bytes: str, begin: str, end: str
) -> None:
    """The bytes are also known from shapes alone, before a model is loaded."""
    codec = own_action(tmp_path, OWN.replace(OWN.rpartition("return ")[2], f"{stored_bytes}\n")).holding
    footprint = Footprint(ModelShape(3, 64, 96, 4, 2, 16, 96, "float32"), 0)
    line = refused(footprint.cache_bytes, [100] * 3, [codec] * 3, error=OperationError)
    assert line.startswith(f"codec Mine: {begin}")
    assert line.endswith(end)


def test_a_check_of_ones_own_codec_that_fails_is_one_line(tmp_path: Path) -> None:
    action = own_action(tmp_path, OWN + "    def check(self, size, part):\n        size / 0\n")
    line = refused(action.check_heads, 16)
    assert line.startswith("action 'mine': codec 'my_codec:Mine': ZeroDivisionError: ")
    assert line.endswith(", line 23)")


def test_the_source_of_ones_own_codec_counts(tmp_path: Path) -> None:
    texts = (OWN, OWN.replace("numel(), 1)", "numel(), 3)"))
    assert len({parts_sha256(own_action(tmp_path, text).parts) for text in texts}) == 2


# --- What they do to a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.by_default("float32")
def test_delta_falls_with_bits_and_the_control_of_codecs_is_exactly_zero(dtype: str) -> None:
    """The test uses the embedded model and f, which is measured along the reference's history and has little noise."""
    model, document, horizon = load_model(EMBEDDED_ID, dtype=dtype), make_document("needle", 384, 0, 7), 8
    kinds: dict[str, Codec] = {
        "identity": CODECS["identity"](), "int8": Int8(residual=0), "int4": Int4(residual=0), "int2": Int2(residual=0),
        "rotated-int4": RotatedInt4(), "fp8": CODECS["fp8"](),
    }  # fmt: skip
    actions = [replace(action_of(codec="int4"), name=name, codec_name=name, codec=kind) for name, kind in kinds.items()]
    units = generate_units(model, "s", document, [PendingUnit(action, 0, 4) for action in actions], horizon, 7)
    moved = {unit.record["action"]: float(unit.events["f"].to_numpy().mean()) for unit in units}
    assert moved["identity"] == 0.0
    assert moved["int8"] < moved["int4"] < moved["int2"]
    assert moved["int8"] < moved["fp8"]  # 3 bits of mantissa, and no group
    (control,) = (unit for unit in units if unit.record["action"] == "identity")
    assert max(control.events["delta"].to_pylist()) == 0.0
    assert control.record["scale_bytes"] == 0
    assert control.record["payload_bytes"] == document.prompt_tokens * model.shape.entry_bytes
    for unit in units:
        stored = sum(unit.record[f"{part}_bytes"] for part in ("payload", "scale", "index", "metadata"))
        suffix = model.shape.entry_bytes * horizon * 4
        assert unit.record["resident_bytes"] == stored + suffix


@pytest.mark.parametrize("name", [name for name in CODECS if not name.startswith("hqq")])
def test_a_layer_of_another_device_comes_back_on_it(name: str) -> None:
    """All numbers of a codec lie on the layer's device, where nothing of the CPU can be read."""
    layer, codec = layer_of(160, size=64), CODECS[name]()
    expected = codec.hold(layer)
    with TwoDevices():
        held = codec.hold(PrefixLayer(layer.key.to(SECOND), layer.value.to(SECOND)))
        for read, wanted in ((held.key, expected.key), (held.value, expected.value)):
            assert read.device == SECOND
            assert torch.equal(read.cpu(), wanted)

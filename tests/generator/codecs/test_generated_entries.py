"""Codecs of generated entries: against a real cache for every stream, and to the bit whatever is shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_RECENT, assert_like_plain, assert_near, eager_network, steps_of
from fixtures.refusals import refused
from oracles.plain_codecs import BLOCKS, TURBOQUANT
from oracles.plain_generated import CodedStream, PlainCoder
from oracles.plain_generator import plain_streams_rollout

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.cache_rules import StreamEntries, attend_with_weights
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.checks.random_models import EOS_TOKENS, random_document, save_random_model
from kvdrift.generator.codecs import CODECS, Codec
from kvdrift.generator.codecs.codec import ScaledCodec
from kvdrift.generator.codecs.fp8 import FP8
from kvdrift.generator.codecs.generated import GeneratedEntries
from kvdrift.generator.codecs.hqq import HQQ
from kvdrift.generator.codecs.kivi import KIVI
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.identity import parts_sha256
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.log.store import Unit
from kvdrift.schema.study import ActionSection
from kvdrift.schema.study.described import described_action
from kvdrift.schema.tables import PLAIN, SWRB

HORIZON, LENGTH, SEED = 28, 45, 3
# Of 45 entries in groups of 8, five begin a group that three generated ones complete; of 32, thirteen and nineteen. One
# window is longer than the prompt.
CASES: dict[str, dict[str, Any]] = {
    "int8": {"group": 8, "residual": 7}, "int4": {"group": 8, "residual": 0}, "int2": {"group": 32, "residual": 3},
    "int4-late": {"group": 4, "residual": 50}, "rotated-int4": {"residual": 0}, "rotated-int4-late": {"residual": 5},
    "fp8": {}, "fp8-layer": {"format": "e5m2", "scale": "tensor"}, "nvfp4": {},
    **{name: {} for name in (*BLOCKS, *TURBOQUANT)},
}  # fmt: skip
SMOOTH: dict[str, dict[str, int]] = {
    "blurred": {"group": 8, "residual": 7}, "blurred-late": {"group": 32, "residual": 0},
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", CASES)


@dataclass(frozen=True)
class Blurred(KIVI):
    """A codec that moves numbers halfway to the mean of their group: near numbers stay near, so no rounding shows."""

    summary: ClassVar[str] = "for tests"
    bits: ClassVar[int] = 8

    def round_trip(self, numbers: torch.Tensor, part: str) -> torch.Tensor:
        before, back = max(numbers.shape[1] - self.residual, 0), numbers.clone()
        if part == "values":
            for some in torch.split(back[:, :before], self.group, dim=-1):
                some.add_(some.mean(-1, keepdim=True)).div_(2)
        elif whole := before - before % self.group:
            groups = back[:, :whole].unflatten(1, (-1, self.group))
            back[:, :whole] = ((groups + groups.mean(2, keepdim=True)) / 2).flatten(1, 2)
        return back


def codec_of(name: str) -> str:
    return name.removesuffix("-late").removesuffix("-layer")


def action_of(name: str, **selection: Any) -> Action:
    codec = {"name": codec_of(name), **CASES.get(name, {}), "generated": True, "skip_layers": []}
    if name not in SMOOTH:
        return build_action(ActionSection(name=f"{name}{len(selection)}", codec=codec, **selection))
    own = Blurred(**SMOOTH[name])
    action = build_action(ActionSection(name=f"{name}{len(selection)}", codec="int8", **selection))
    return replace(action, codec=own, generated=GeneratedEntries(own))


def generate(
    actions: list[Action], sharing: SharingOptions = SHARE_ALL, count: int = 6, estimator: str = PLAIN,
    horizon: int = HORIZON,
) -> list[Unit]:  # fmt: skip
    pending = [PendingUnit(action, 0, count, estimator) for action in actions]
    return generate_units(model(), "s", document(), pending, horizon, SEED, sharing)


@cache
def model() -> LoadedModel:
    """A random-weight model whose heads of 32 channels fill a block of every codec."""
    with TemporaryDirectory() as folder:
        return load_model(str(save_random_model(Path(folder), "llama", head_dim=32)))


def document() -> Any:
    return random_document(f"d{LENGTH}", LENGTH)


@cache
def stream_of(name: str | None, selector: str | None = None) -> CodedStream:
    """Return a plain stream at the end of the prompt; the kept entries are the generator's own choice."""
    kept = None
    if selector is not None:
        action = action_of(str(name), selector=selector, keep="1/2", window=4)
        layers = Prompt(model(), document().tokens, 4, action.selector.statistics).layers
        kept = evict(layers, action.selector, action.retention.kept(LENGTH)).indices
    coder = None if name is None else PlainCoder(codec_of(name), **{"residual": 0, **(CASES | SMOOTH)[name]})
    return CodedStream(eager_network(head_dim=32), document().tokens, coder, kept)


def test_every_codec_but_the_control_has_a_case() -> None:
    coding = {name for name, kind in CODECS.items() if not issubclass(kind, HQQ)}  # which refuses it
    assert {codec_of(name) for name in CASES} == coding - {"identity"}


# --- Against a real cache ----------------------------------------------------------------------------------------------


def rolled_out(name: str, count: int, **chosen: Any) -> tuple[Unit, Any]:
    """Return a unit, and the tokens that real caches draw."""
    action = action_of(name, **chosen)
    (unit,) = generate([action], count=count)
    plain = plain_streams_rollout(
        stream_of(None).fork, stream_of(name, chosen.get("selector")).fork, seed=SEED, document=document().doc,
        action=action.name, replicates=range(count), horizon=HORIZON, eos_tokens=EOS_TOKENS,
    )  # fmt: skip
    return unit, plain


@pytest.mark.parametrize(
    ("name", "selector"), [("blurred", None), ("blurred-late", None), ("blurred", "snapkv"), ("blurred", "pyramidkv")]
)
@pytest.mark.by_default("blurred-pyramidkv")
def test_streams_equal_a_cache_that_codes_what_leaves_its_window(name: str, selector: str | None) -> None:
    """Tokens are equal, and delta and f differ by less than 1e-5, as with the plain twin of evictions."""
    chosen = {} if selector is None else {"selector": selector, "keep": "1/2", "window": 4}
    unit, plain = rolled_out(name, 2, **chosen)
    assert_like_plain(unit, plain)
    (prompt_alone,) = generate([replace(action_of(name, **chosen), generated=None)], count=2)
    assert np.abs(steps_of(unit)["f"] - steps_of(prompt_alone)["f"]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if codec_of(name) == name])
def test_a_codec_equals_a_cache_that_codes_what_leaves_its_window(name: str) -> None:
    """Tokens are equal, and most distances differ by less than 1e-5.

    Keys and values of the two differ by about 1e-6, so a few numbers are rounded to the other side of a tie. This shows
    if attention is only on their entry.
    """
    unit, plain = rolled_out(name, 1)
    steps = steps_of(unit)
    assert np.array_equal(steps["x_token"], plain.x_token)
    assert np.array_equal(steps["y_token"], plain.y_token)
    apart = np.abs(steps["delta"] - plain.delta)
    assert (apart < 1e-5).mean() > 0.8
    assert apart.max() < 2e-3
    (prompt_alone,) = generate([replace(action_of(name), generated=None)], count=1)
    assert np.abs(steps["f"] - steps_of(prompt_alone)["f"]).max() > 2e-3


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.by_default("blurred-late")
def test_branches_start_from_what_a_stream_was_at_the_branch(name: str) -> None:
    """Distances of scan and branch equal those of real caches along the same histories."""
    (unit,) = generate([action_of(name)], estimator=SWRB, count=3)
    rows = unit.events.to_pylist()
    early = 0
    for replicate in range(3):
        scan = [row for row in rows if row["replicate"] == replicate and row["kind"] == "scan"]
        branch = [row for row in rows if row["replicate"] == replicate and row["kind"] == "branch"]
        tokens = [row["x_token"] for row in scan if not row["x_eos"]]
        assert_distances(name, tokens, tokens, [row["delta"] for row in scan[: len(tokens) + 1]], 0)
        if not branch:
            continue
        start = branch[0]["t"] - 1
        early += len(tokens) > start + 1
        x, y = (tokens[:start] + [row[side] for row in branch] for side in ("x_token", "y_token"))
        until = next((at for at, row in enumerate(branch) if row["x_eos"] or row["y_eos"]), len(branch))
        assert_distances(name, x, y, [row["delta"] for row in branch][: until + 1], start)
    assert early, "a scan went on after its branch, whose state must then be the earlier one"


def assert_distances(name: str, x: list[int], y: list[int], wanted: list[float], start: int) -> None:
    """Distances at positions ``start``, ... (from 0) of two histories."""
    reference, compressed = stream_of(None).fork(), stream_of(name).fork()
    p, q = reference.first_distribution, compressed.first_distribution
    for at in range(start + len(wanted)):
        if at:
            p, q = reference.advance(x[at - 1]), compressed.advance(y[at - 1])
        if at >= start:
            assert abs(0.5 * np.abs(p - q).sum() - wanted[at - start]) < 1e-5, at


@NAMES
@pytest.mark.by_default("int4-late", "fp8", "q4_0", "turboquant-3bit")
def test_a_step_reads_what_the_codec_reads_back_of_the_whole_cache(name: str) -> None:
    """Prompt and suffix as if they were a prompt, to float32's last bits; then once more from the end of the prompt."""
    action = action_of(name)
    codec, group = action.codec, 2  # query heads of a KV head
    assert codec is not None
    assert action.generated is not None
    generator = torch.Generator().manual_seed(5)
    prompt = [
        PromptLayer(*torch.randn(2, 2, entries, 32, generator=generator), torch.empty(0), 1.0) for entries in (45, 38)
    ]
    held = [codec.hold(PrefixLayer(layer.key, layer.value)) for layer in prompt]
    rule = action.generated.rule(prompt, [everything(layer) for layer in prompt], held, (), HORIZON)
    caches = [(layer.key, layer.value) for layer in held]
    exact = torch.randn(2, 2, 3, 2, HORIZON, 32, generator=generator)  # [layers, keys or values, streams, ...]
    queries = torch.randn(HORIZON, 3, 2, group, 32, generator=generator)
    slots = torch.tensor([2, 0])
    for last in (11, HORIZON - 1):
        suffixes = [[part.clone() for part in layer] for layer in exact]
        for length in range(1, last + 1):
            for own, there in zip(exact, suffixes, strict=True):
                for part in (0, 1):
                    there[part][:, :, length - 1] = own[part][:, :, length - 1]
            rule.before_step(caches, suffixes, [slots, slots], length)
            for number, (layer, own) in enumerate(zip(prompt, exact, strict=True)):
                entries = entries_of(number, queries[length], caches[number], suffixes[number], length, slots)
                for row, slot in enumerate(slots):
                    wanted = plainly(codec, layer, own[:, slot], queries[length, slot], length)
                    found = rule.attend(entries, torch.empty(0))[0] if rule.replaces(length) else usually(entries)
                    assert torch.allclose(found[row], wanted, atol=1e-5), (length, number)


def everything(layer: PromptLayer) -> torch.Tensor:
    return torch.arange(layer.key.shape[1]).expand(2, -1)


def entries_of(number: int, query: Any, prompt: Any, suffix: Any, length: int, slots: Any) -> StreamEntries:
    own = (part[slots][:, :, :length] for part in suffix)
    return StreamEntries(number, query[slots], *prompt, *own, 0.25)


def usually(entries: StreamEntries) -> torch.Tensor:
    return attend_with_weights(entries, torch.zeros(1, 1, 1))[0]


def plainly(codec: Codec, layer: PromptLayer, own: torch.Tensor, query: torch.Tensor, length: int) -> torch.Tensor:
    """Attend to a prompt and a suffix without its last entry, as read back, [KV heads, group, size]."""
    before = PrefixLayer(*(
        torch.cat([part, more[:, : length - 1]], 1) for part, more in zip((layer.key, layer.value), own, strict=True)
    ))  # fmt: skip
    if isinstance(codec, ScaledCodec):  # at the scales of the prompt, whose largest numbers stand for what is above
        axes = (1, 2) if codec == FP8() else (0, 1, 2)
        bounds = [part.abs().amax(axes, keepdim=True) for part in (layer.key, layer.value)]
        before = PrefixLayer(
            *(part.clamp(-most, most) for part, most in zip((before.key, before.value), bounds, strict=True))
        )
    back = codec.hold(before)
    key, value = (
        torch.cat([part, more[:, length - 1 : length]], 1)
        for part, more in zip((back.key, back.value), own, strict=True)
    )
    return (query @ key.transpose(1, 2) * 0.25).softmax(-1) @ value


def test_large_numbers_are_cut_at_the_scale_of_the_prompt() -> None:
    """With fp8 a cache has one stored scale; the prompt's entries are read back as the codec reads them."""
    layer = Prompt(model(), document().tokens, 1).layers[0]
    codec, kept = CODECS["fp8"](), torch.arange(0, LENGTH, 2).expand(2, -1)
    own = PrefixLayer(layer.key[:, ::2], layer.value[:, ::2])
    coding: Any = GeneratedEntries(codec).rule([layer], [kept], [codec.hold(own)], (), HORIZON).coding  # type: ignore[attr-defined]
    key, value = coding.read_back(own.key[None, None], own.value[None, None], [0])
    assert torch.equal(key[0, 0], codec.hold(own).key)
    assert torch.equal(value[0, 0], codec.hold(own).value)
    large, _ = coding.read_back(own.key[None, None] * 9, own.value[None, None], [0])
    assert torch.equal(large[0, 0].abs().amax((1, 2)), key[0, 0].abs().amax((1, 2)))


# --- What holds to the bit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [PLAIN, pytest.param(SWRB, marks=pytest.mark.slow)])
def test_savings_and_company_leave_events_as_they_are(estimator: str) -> None:
    """Coded entries follow streams that fork, move, are shared or parked; the next prompt is exact again."""
    actions = [action_of(name) for name in ("int8", "rotated-int4-late", "fp8")] + [HALF_RECENT, CONTROL]
    whole = generate(actions, estimator=estimator, count=3)
    nothing = SharingOptions(share_streams=False, share_prompt_reads=False)
    for unit, twin in zip(whole, generate(actions, nothing, estimator=estimator, count=3), strict=True):
        assert unit.record["batch_deviation"] == 0.0
        assert unit.events.equals(twin.events)
    assert not any(whole[-1].events["delta"].to_pylist())
    for action, unit in list(zip(actions, whole, strict=True))[:-2:2]:
        (alone,) = generate([action], estimator=estimator, count=2)
        assert alone.events.equals(unit.events.slice(0, len(alone.events)))


def test_both_estimators_of_one_action_share_its_cache() -> None:
    """Coupled rollouts are decoded first; branches then start from a prompt that was coded to its end."""
    action = action_of("int8")
    pending = [PendingUnit(action, 0, 2, estimator) for estimator in (PLAIN, SWRB)]
    both = generate_units(model(), "s", document(), pending, HORIZON, SEED)
    for unit in both:
        (alone,) = generate([action], count=2, estimator=unit.record["estimator"])
        assert alone.events.equals(unit.events)


def test_beside_fused_operations_tokens_are_the_same() -> None:
    names = ("int8", "int4-late", "rotated-int4", "fp8", "q4_0", "turboquant-3bit")
    actions = [action_of(name) for name in names] + [HALF_RECENT, CONTROL]
    for unit, fused in zip(
        generate(actions, count=2), generate(actions, SharingOptions(fused=True), count=2), strict=True
    ):
        assert_near(unit, fused)


def test_the_control_of_codecs_is_exactly_zero() -> None:
    (unit,) = generate([action_of("identity")], count=2)
    assert not steps_of(unit)["delta"].any()
    assert not steps_of(unit)["f"].any()


def test_bytes_are_those_of_the_prompt() -> None:
    actions = [action_of(name) for name in CASES]
    twins = [replace(one, name=f"{one.name}-prompt", generated=None) for one in actions]
    units = generate([*actions, *twins], count=1, horizon=9)
    for coded, prompt_alone in zip(units[: len(CASES)], units[len(CASES) :], strict=True):
        for column in ("payload_bytes", "scale_bytes", "index_bytes", "metadata_bytes", "resident_bytes"):
            assert coded.record[column] == prompt_alone.record[column], column


# --- What a study names, and what is recorded ------------------------------------------------------------------------


def test_generated_is_part_of_the_identity_only_where_it_is_set() -> None:
    plain, said, generated = (
        build_action(ActionSection(name="a", codec={"name": "int4", **more}))
        for more in ({}, {"generated": False}, {"generated": True})
    )
    assert plain == said
    assert parts_sha256(plain.parts) == parts_sha256(said.parts) != parts_sha256(generated.parts)
    rows = [action.row("s", prespecified=True) for action in (said, generated)]
    assert [row["codec_parameters"] for row in rows] == [
        '{"group": 32, "residual": 128}', '{"generated": true, "group": 32, "residual": 128}'
    ]  # fmt: skip
    assert described_action(rows[1]) == "int4 (generated entries too, groups of 32, the last 128 exact)"
    assert plain.decides_bytes(9, 2) == generated.decides_bytes(9, 2)


def test_a_codec_of_ones_own_must_be_derived_from_one_that_can(tmp_path: Path) -> None:
    for module, base in (("kivi", "Int4"), ("codec", "Codec")):
        (tmp_path / f"of_{module}.py").write_text(
            "from dataclasses import dataclass\n"
            f"from kvdrift.generator.codecs.{module} import {base}\n"
            f"@dataclass(frozen=True)\nclass Mine({base}):\n    summary = 'mine'\n"
            "    def round_trip(self, numbers, part):\n        return numbers\n"
            "    def stored_bytes(self, numbers, part):\n        return None\n"
        )

    def built(name: str) -> Action:
        return build_action(ActionSection(name="a", codec={"name": name, "generated": True}), tmp_path)

    assert built("of_kivi:Mine").generated is not None
    line = refused(built, "of_codec:Mine")
    assert "generated = true" in line
    assert "codec Mine" in line

"""All families of ``fixtures.families`` on small random models in float32: one matrix, a line for a new family there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_RECENT, HALF_SNAPKV, Steps, assert_near, steps_of
from fixtures.families import FAMILIES, TOWERS, saved_family, saved_tower
from fixtures.refusals import refused
from oracles.plain_generator import load_eager
from transformers import AutoModelForImageTextToText, DynamicCache

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.holding import AsComputed
from kvdrift.generator.attention.parts import LayerTerms
from kvdrift.generator.checks.random_models import random_document
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.generation.units import generate_together
from kvdrift.generator.selectors import SELECTORS, Full, Selector, SnapKV
from kvdrift.generator.selectors.expected_attention import ExpectedAttention
from kvdrift.generator.selectors.kvpress import KVPress
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.transformer import loading
from kvdrift.generator.transformer import model_checks as proofs
from kvdrift.generator.transformer.files.configuration import position_switch
from kvdrift.generator.transformer.footprint import local_footprint
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.generator.transformer.model_checks import check_model
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.log.units.unit import Unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.tables import SWRB

HORIZON, SEED = 16, 3
HALF_KNORM = Action("knorm-half", "knorm", SELECTORS["knorm"](), Retention.parse("1/2"))
CAPPED = {"gemma2"}
# Layers without RoPE, other pairs of channels, parts of heads, or angles that are not those of whole heads.
NOT_BY_HALVES = {
    "glm4", "glm4-moe", "smollm3", "cohere2", "exaone4", "gpt-oss", "qwen3-next", "qwen3.5", "qwen3.5-moe",
}  # fmt: skip
ACTIONS = [HALF_RECENT, HALF_SNAPKV, CONTROL]
SEVERAL = ("gemma2", "gpt-oss", "falcon-h1")  # soft caps, sinks and states; the others are among the long checks


class Looking(SnapKV):
    """A selector that looks at queries and does not know of caps."""

    applies_softcap = False


every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True, scope="module")
def own_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No proof of before counts, and none is left on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@cache
def model_of(family: str) -> LoadedModel:
    """A family's model; that it loads is its proof: two streams that part, and an evicted cache, as transformers has."""
    return load_model(str(saved_family(family)))


def generated(family: str, pending: list[PendingUnit], length: int = 150, horizon: int = HORIZON) -> list[Unit]:
    return generate_units(model_of(family), "s", random_document(f"d{length}", length), pending, horizon, SEED)


def greedy_tokens(network: Any, tokens: Sequence[int], count: int, ends: Sequence[int]) -> list[int]:
    """The tokens that transformers' own ``generate`` draws."""
    given = torch.tensor([tokens])
    with torch.inference_mode():
        found: Any = network.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, pad_token_id=0,
            eos_token_id=list(ends),
        )  # fmt: skip
    drawn: list[int] = found[0, len(tokens) :].tolist()
    return drawn


def assert_forecast(folder: Path, dtype: str, record: dict[str, Any], fixed: int) -> None:
    """The footprint counts what a unit that keeps 75 of 150 entries has stored, and what is never evicted."""
    footprint = local_footprint(str(folder), dtype)
    assert footprint is not None
    stored = sum(record[name] for name in ("payload_bytes", "scale_bytes", "index_bytes", "metadata_bytes"))
    layers = footprint.shape.evictable_layers
    assert footprint.cache_bytes([75] * layers, [AsComputed()] * layers, indexed=range(layers)) == stored
    assert footprint.shape.fixed_bytes(150) == record["fixed_bytes"] == fixed


def bits(units: list[Unit]) -> list[bytes]:
    return [column.tobytes() for unit in units for column in steps_of(unit).values()]


@every_family
@pytest.mark.by_default("falcon-h1")
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    """Two prompts, longer than every window; a continuation leaves the prompt's windows."""
    network, model = load_eager(saved_family(family)), replace(model_of(family), sampling=Sampling(temperature=0.0))
    for length in (48, 97):
        document = random_document(f"greedy{length}", length)
        (unit,) = generate_units(model, "s", document, [PendingUnit(CONTROL, 0, 1)], 48, SEED)
        found = greedy_tokens(network, document.tokens, 48, model.eos_tokens)
        ours: Steps = steps_of(unit)
        assert ours["y_token"][0][: len(found)].tolist() == found
        assert ours["x_token"][0][: len(found)].tolist() == found


@every_family
@pytest.mark.by_default(*SEVERAL, "phi3-long")
def test_the_control_is_exactly_zero_and_eviction_is_not(family: str) -> None:
    *evicted, control = map(steps_of, generated(family, [PendingUnit(action, 0, 2) for action in ACTIONS]))
    assert not control["delta"].any()
    assert not control["f"].any()
    assert np.array_equal(control["x_token"], control["y_token"])
    for steps in evicted:
        assert not steps["delta"][:, 0].any()
        assert steps["delta"].any()


@every_family
@pytest.mark.by_default(*SEVERAL, "phi3-long")
def test_what_selectors_may_need_to_know_is_found(family: str) -> None:
    traits = model_of(family).traits
    assert traits.turned_by_halves is (family not in NOT_BY_HALVES)
    assert traits.softcap == (50.0 if family in CAPPED else None)


@every_family
@pytest.mark.by_default("falcon-h1")
def test_events_do_not_depend_on_what_is_asked_at_once(family: str) -> None:
    """Bitwise, if rows do not depend on other rows, which is tested; resumed replicates are equal, too."""
    whole = generated(family, [PendingUnit(action, 0, 4) for action in ACTIONS])
    first = ACTIONS[0]
    single = [unit for action in ACTIONS for unit in generated(family, [PendingUnit(action, 0, 4)])]
    resumed = generated(family, [PendingUnit(first, 0, 2)]), generated(family, [PendingUnit(first, 2, 2)])
    joined = [
        np.concatenate([steps_of(part[0])[name] for part in resumed]).tobytes() for name in steps_of(whole[0])
    ]  # fmt: skip
    model = model_of(family)
    if model.batch_deviation == 0.0:
        assert bits(single) == bits(whole)
        assert joined == bits(whole[:1])
    else:
        assert 0 < model.batch_deviation < 1e-5
        for one, other in zip(single, whole, strict=True):
            assert np.abs(steps_of(one)["delta"][:, :4] - steps_of(other)["delta"][:, :4]).max() < 1e-4


@every_family
@pytest.mark.by_default("falcon-h1")
def test_two_documents_side_by_side_are_each_alone(family: str) -> None:
    work = [(random_document(f"d{n}", n), [PendingUnit(action, 0, 2) for action in ACTIONS]) for n in (150, 171)]
    alone = [generate_units(model_of(family), "s", one, pending, HORIZON, SEED) for one, pending in work]
    for one, other in zip(generate_together(model_of(family), "s", work, HORIZON, SEED), alone, strict=True):
        for mine, own in zip(one, other, strict=True):
            off = np.abs(steps_of(mine)["delta"] - steps_of(own)["delta"]).max()
            assert off == 0 if model_of(family).batch_deviation == 0.0 else off < 1e-4


@every_family
@pytest.mark.by_default("gpt-oss")
def test_selectors_codecs_and_policies(family: str) -> None:
    """Every part that the family supports works; other parts are refused by name."""
    half = Retention.parse("1/2")
    actions = [Action(name, name, SELECTORS[name](), half) for name in SELECTORS if name != "full"]
    wide = {"mxfp4", "q8_0", "q5_1", "q4_0"}  # their blocks are wider than these heads
    codecs = [name for name in CODECS if not name.startswith("hqq") and name not in wide]
    actions += [Action(name, "full", Full(), Retention(None), name, CODECS[name]()) for name in codecs]
    actions += [
        Action(name, "full", Full(), Retention.parse("80"), policy_name=name, policy=kind())
        for name, kind in POLICIES.items()
    ]
    lacking = []
    for action in actions:
        try:
            (unit,) = generated(family, [PendingUnit(action, 0, 2)], horizon=6)
        except InputError as error:
            assert "this model" in str(error)  # noqa: PT017 - some are refused, and are listed below
            lacking.append(action.name)
            continue
        delta = steps_of(unit)["delta"]
        assert np.isfinite(delta).all()
        assert not delta[:, 0].any()
        assert action.name == "identity" or delta.any() or family == "cohere2"
    assert lacking == (["expected_attention"] if family in NOT_BY_HALVES else [])


@every_family
@pytest.mark.by_default("gpt-oss", "qwen3.5")
def test_fused_attention_has_the_terms_of_a_layer(family: str) -> None:
    """Steps begun ahead, given up, forked and parked give the events of plain steps, also where layers have states.

    Where rows of plain steps depend on each other, as those of experts do, residual branching finds it in the control.
    """
    asked = [PendingUnit(action, 0, 3) for action in ACTIONS]
    asked += [PendingUnit(action, 0, 3, SWRB) for action in ACTIONS[:2]]
    document = random_document("d150", 150)
    fused = generate_units(model_of(family), "s", document, asked, HORIZON, SEED, SharingOptions(fused=True))
    for one, other in zip(fused, generated(family, asked), strict=True):
        assert_near(one, other)


# --- Bytes of windows -------------------------------------------------------------------------------------------------


def test_a_window_holds_its_own_entries_whatever_is_evicted() -> None:
    """Two of the model's four layers hold 39 entries, as transformers' cache does; the other two keep half of 150."""
    (half, control) = generated("gemma3", [PendingUnit(HALF_RECENT, 0, 1), PendingUnit(CONTROL, 0, 1)])
    entry = 2 * 2 * 16 * 4  # keys and values of a layer, float32
    assert half.record["payload_bytes"] == 2 * entry * (39 + 75)
    assert control.record["payload_bytes"] == 2 * entry * (39 + 150)
    assert half.record["kept_entries"] == 75
    assert control.record["fixed_bytes"] == 2 * entry * 39
    assert len(half.record["kept_sha256"]) == 2
    assert_forecast(saved_family("gemma3"), "float32", half.record, 2 * entry * 39)
    assert half.record["resident_bytes"] - half.record["payload_bytes"] > 2 * entry * HORIZON


# --- States of hybrids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "qwen3.5", "falcon-h1"])
@pytest.mark.by_default("falcon-h1-float32", "lfm2-bfloat16")
def test_states_are_counted_as_they_lie_in_memory(family: str, dtype: str) -> None:
    """States count once in the cache, and once for each stream; a layer with only a state keeps no entries."""
    model = load_model(str(saved_family(family)), dtype=dtype)
    units = [PendingUnit(action, 0, 1) for action in (HALF_RECENT, CONTROL)]
    half, control = generate_units(model, "s", random_document("d150", 150), units, HORIZON, SEED)
    with torch.inference_mode():
        cache = DynamicCache(config=model.network.config)
        network = load_eager(saved_family(family)).to(model.network.dtype)
        network(torch.tensor([random_document("d150", 150).tokens]), past_key_values=cache)
    own = [
        state.nbytes
        for layer in cache.layers
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for state in states.values()
        if state is not None
    ]
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    entries = sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
    assert model.shape.state_bytes == sum(own) > 0
    assert control.record["payload_bytes"] == entries + sum(own)
    assert half.record["payload_bytes"] == entries // 2 + sum(own)
    assert control.record["fixed_bytes"] == sum(own) >= model.shape.layer_state_bytes
    assert len(half.record["kept_sha256"]) == len(held)
    assert_forecast(saved_family(family), dtype, half.record, sum(own))
    assert model.shape.entry_bytes * 150 == entries


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_the_states_after_a_prompt_are_those_of_transformers(family: str) -> None:
    """The streams of every action begin with the reference's states, whatever the action evicts."""
    model, document = model_of(family), random_document("d150", 150)
    prepared = model.prepare(document, [HALF_RECENT, HALF_KNORM], HORIZON)
    first, *others = (cache.states for cache in prepared.caches.caches)
    assert first is not None
    assert all(states is first for states in others)
    cache = DynamicCache(config=model.network.config)
    with torch.inference_mode():
        load_eager(saved_family(family))(torch.tensor([document.tokens]), past_key_values=cache)
    for (kind, layer, number), state in first.by_place.items():
        whole = vars(cache.layers[layer])["conv_states" if kind == "convolution" else "recurrent_states"][number]
        assert (state - whole).norm() < 1e-4 * whole.norm()


def test_streams_of_parked_histories_keep_their_states() -> None:
    """Residual branching parks streams and goes on with them, which rows without a stream must not touch."""
    model, document = model_of("qwen3.5"), random_document("d150", 150)
    pending = [PendingUnit(HALF_RECENT, 0, 5, estimator=SWRB), PendingUnit(HALF_KNORM, 0, 3, estimator=SWRB)]
    together = generate_units(model, "s", document, pending, HORIZON, SEED)
    for unit, one in zip(together, pending, strict=True):
        (alone,) = generate_units(model, "s", document, [one], HORIZON, SEED)
        for name in ("kind", "t", "x_token", "y_token"):
            assert alone.events[name].equals(unit.events[name])
        columns = (some.events["delta"].fill_null(0).to_numpy() for some in (alone, unit))
        np.testing.assert_allclose(*columns, atol=1e-5)  # rows of a delta net may depend on those beside them


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5", "falcon-h1"])
def test_kernels_that_are_not_installed_are_not_told_of(
    family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning that transformers gives once in a process may come again, and does not; other warnings are heard."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    chooser = logging.getLogger("transformers.integrations.hub_kernels")
    monkeypatch.setattr(chooser, "disabled", False)  # whatever another test of this process has made of it
    monkeypatch.setattr(chooser, "handlers", [caplog.handler])
    with caplog.at_level("WARNING", chooser.name):
        generated(family, [PendingUnit(HALF_RECENT, 0, 1)], length=48, horizon=2)
        chooser.warning("a kernel is broken")
    assert {record.getMessage() for record in caplog.records} == {"a kernel is broken"}


# --- Language models of multimodal checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.by_default("gemma3", "mistral3")
def test_a_language_model_is_taken_out_of_a_multimodal_checkpoint(name: str) -> None:
    """The rest of the checkpoint is not loaded; greedy tokens equal those of the whole checkpoint."""
    folder = saved_tower(name)
    model = load_model(str(folder))
    assert type(model.network).__name__.endswith("ForCausalLM")
    assert not [part for part, _ in model.network.named_modules() if "vision" in part or "visual" in part]
    document = random_document("greedy97", 97)
    greedy = replace(model, sampling=Sampling(temperature=0.0))
    half, control = generate_units(
        greedy, "s", document, [PendingUnit(action, 0, 1) for action in (HALF_RECENT, CONTROL)], HORIZON, SEED
    )
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found = greedy_tokens(whole, document.tokens, HORIZON, model.eos_tokens)
    assert steps_of(control)["y_token"][0][: len(found)].tolist() == found
    assert not steps_of(control)["delta"].any()
    assert half.record["kept_entries"] == 48
    assert check_model(str(folder), dtype="float32", revision=None)  # its proof is remembered
    assert local_footprint(str(folder), "float32") is not None


# --- RoPE whose frequencies depend on the length ----------------------------------------------------------------------


def test_a_continuation_where_rope_switches_is_refused() -> None:
    """The switch is after 40 positions: prompts that end before it with all that follows, or after it, are taken."""
    model = model_of("phi3-long")
    for length in (24, 41):
        model.prepare(random_document(f"d{length}", length), [CONTROL], HORIZON)
    for length in (25, 40):
        line = refused(model.prepare, random_document(f"d{length}", length), [CONTROL], HORIZON)
        assert "after 40 positions" in line
        assert "at most 24 tokens" in line
    assert position_switch(str(saved_family("phi3-long"))) == 40
    assert model.pairs_at_once == 0


def test_chunks_of_a_long_prompt_have_its_frequencies() -> None:
    """A chunk before the switch is rotated as in one pass over the whole prompt."""
    tokens = random_document("d97", 97).tokens
    parts, whole = (Prompt(model_of("phi3-long"), tokens, window=0, at_once=size) for size in (16, 97))
    for one, other in zip(parts.layers, whole.layers, strict=True):
        assert (one.key - other.key).norm() < 1e-5 * other.key.norm()


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "without", "layer"), [("olmo3", "window", 0), ("gpt-oss", "sinks", 0)])
def test_a_model_that_gives_something_else_is_refused_by_its_layer(
    family: str, without: str, layer: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model is like an attention with unknown terms: the error names the layer, and the refusal is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    terms = LayerTerms

    def forgetful(window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> LayerTerms:
        return terms(None if without == "window" else window, softcap, None if without == "sinks" else sinks)

    monkeypatch.setattr("kvdrift.generator.attention.interface.LayerTerms", forgetful)
    folder = saved_family(family)
    problem = refused(load_model, str(folder)).partition("not supported: ")[2]
    assert problem.startswith(f"attention of layer {layer} differs ")
    assert proofs.results() == {str(folder): problem}
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("selector", "family", "what"),
    [
        (ExpectedAttention(), "smollm3", "halves"), (ExpectedAttention(), "cohere2", "halves"),
        (Looking(), "gemma2", "soft cap of 50"), (KVPress("KnormPress", (), None, ()), "gpt-oss", "'gpt_oss'"),
    ],
)  # fmt: skip
def test_a_selector_that_a_family_cannot_give_is_refused_alone(selector: Selector, family: str, what: str) -> None:
    name = type(selector).__name__
    action = Action("half", name, selector, Retention.parse("1/2"))
    line = refused(generated, family, [PendingUnit(action, 0, 1)])
    assert line.startswith(f"action 'half': selector {name}: ")
    assert what in line


def test_a_proof_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, made = saved_family("mistral"), []
    forward = loading.reference_forward
    monkeypatch.setattr(loading, "reference_forward", lambda *given: made.append(given) or forward(*given))
    for _ in range(2):
        load_model(str(folder))
    assert len(made) == 1
    assert list(proofs.results().values()) == [None]
    with monkeypatch.context() as later:  # what another version proved is not said of this one
        later.setattr(proofs, "version", lambda _: "5.24.0")
        assert proofs.results() == {}
    (tmp_path / "kvdrift" / "proofs.json").write_text("{")
    load_model(str(folder))
    assert len(made) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "multi-head latent attention (MLA) is not supported"),
        ({"text_config": {"model_type": "deepseek_v3"}, "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}, "multi-head latent attention (MLA) is not supported"),
        ({"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2}, "2 layers that read the entries of other layers (num_kv_shared_layers) are not supported"),
        ({"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv"] * 2}, "a model without full attention is not supported: no entry could be evicted"),
    ],
)  # fmt: skip
def test_what_a_configuration_tells_is_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changes))
    (tmp_path / "model.safetensors").touch()
    assert refused(load_model, str(tmp_path)).startswith(f"model.id = '{tmp_path}': {message}")

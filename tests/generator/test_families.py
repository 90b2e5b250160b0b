"""All families of ``fixtures.families`` on small random models in float32: one matrix, a line for a new family there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_RECENT, HALF_SNAPKV, Steps, steps_of
from fixtures.families import FAMILIES, saved_family
from fixtures.random_models import random_document
from oracles.plain_generator import load_eager
from transformers import LlamaConfig

from generator.actions import Action
from generator.attention.holding import AsComputed
from generator.attention.layer_terms import LayerTerms
from generator.codecs import CODECS
from generator.generation import PendingUnit, generate_units
from generator.generation.units import generate_together
from generator.selectors import SELECTORS, Full, Selector, SnapKV
from generator.selectors.expected_attention import ExpectedAttention
from generator.selectors.kvpress import KVPress
from generator.selectors.policies import POLICIES
from generator.transformer import loading
from generator.transformer.files import remembered_proofs as proofs
from generator.transformer.footprint import local_footprint
from generator.transformer.loading import load_model
from generator.transformer.model import LoadedModel
from log.units.unit import Unit
from schema.errors import InputError
from schema.retention import Retention
from schema.sampling import SamplingLaw

HORIZON, SEED = 16, 3
HALF_KNORM = Action("knorm-half", "knorm", SELECTORS["knorm"](), Retention.parse("1/2"))
CAPPED = {"gemma2"}
SEVERAL = ("mistral", "qwen3-moe", "gemma2", "gpt-oss")  # of each kind one; the others are among the long checks
OTHERS = [pytest.param(name, marks=() if name in SEVERAL else pytest.mark.slow) for name in FAMILIES]

every_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", OTHERS)


@pytest.fixture(autouse=True, scope="module")
def own_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No proof of before counts, and none is left on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def model_of(family: str) -> LoadedModel:
    """A family's model; that it loads is its proof: two streams that part, and an evicted cache, as transformers has."""
    return load_model(str(saved_family(family)))


def generated(family: str, pending: list[PendingUnit], length: int = 150, horizon: int = HORIZON) -> list[Unit]:
    return generate_units(model_of(family), "s", random_document(f"d{length}", length), pending, horizon, SEED)


def actions_of(family: str) -> list[Action]:
    """Return two actions that evict, and the control; Knorm stands in for SnapKV, which refuses models with a soft cap."""
    return [HALF_RECENT, HALF_KNORM if family in CAPPED else HALF_SNAPKV, CONTROL]


def bits(units: list[Unit]) -> list[bytes]:
    return [column.tobytes() for unit in units for column in steps_of(unit).values()]


@every_family
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    """Three prompts, longer than every window; a continuation leaves the prompt's windows."""
    network, model = load_eager(saved_family(family)), replace(model_of(family), law=SamplingLaw(temperature=0.0))
    for length in (48, 60, 97):
        document = random_document(f"greedy{length}", length)
        (unit,) = generate_units(model, "s", document, [PendingUnit(CONTROL, 0, 1)], 48, SEED)
        tokens = torch.tensor([document.tokens])
        with torch.inference_mode():
            found = network.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=48, pad_token_id=0,
                eos_token_id=list(model.eos_tokens),
            )[0, length:].tolist()  # fmt: skip
        ours: Steps = steps_of(unit)
        assert ours["y_token"][0][: len(found)].tolist() == found
        assert ours["x_token"][0][: len(found)].tolist() == found


@every_family
def test_the_control_is_exactly_zero_and_eviction_is_not(family: str) -> None:
    *evicted, control = map(steps_of, generated(family, [PendingUnit(action, 0, 2) for action in actions_of(family)]))
    assert not control["delta"].any()
    assert not control["f"].any()
    assert np.array_equal(control["x_token"], control["y_token"])
    for steps in evicted:
        assert not steps["delta"][:, 0].any()
        assert steps["delta"].any()


@some_families
def test_events_do_not_depend_on_what_is_asked_at_once(family: str) -> None:
    """Bitwise if rows do not depend on those beside them, which is found out; resumed replicates are the same, too."""
    whole = generated(family, [PendingUnit(action, 0, 4) for action in actions_of(family)])
    first = actions_of(family)[0]
    single = [unit for action in actions_of(family) for unit in generated(family, [PendingUnit(action, 0, 4)])]
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


@some_families
def test_two_documents_side_by_side_are_each_alone(family: str) -> None:
    work = [
        (random_document(f"d{n}", n), [PendingUnit(action, 0, 2) for action in actions_of(family)]) for n in (150, 171)
    ]
    alone = [generate_units(model_of(family), "s", one, pending, HORIZON, SEED) for one, pending in work]
    for one, other in zip(generate_together(model_of(family), "s", work, HORIZON, SEED), alone, strict=True):
        for mine, own in zip(one, other, strict=True):
            off = np.abs(steps_of(mine)["delta"] - steps_of(own)["delta"]).max()
            assert off == 0 if model_of(family).batch_deviation == 0.0 else off < 1e-4


@some_families
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_temperatures(family: str, temperature: float) -> None:
    model = replace(model_of(family), law=SamplingLaw(temperature=temperature))
    units = generate_units(
        model,
        "s",
        random_document("d150", 150),
        [PendingUnit(action, 0, 2) for action in actions_of(family)],
        HORIZON,
        SEED,
    )
    assert not steps_of(units[-1])["delta"].any()


@some_families
def test_selectors_codecs_and_policies(family: str) -> None:
    """Each that the family can take; what it cannot is refused by name."""
    half = Retention.parse("1/2")
    actions = [Action(name, name, SELECTORS[name](), half) for name in SELECTORS if name != "full"]
    codecs = [name for name in CODECS if not name.startswith("hqq")]
    actions += [Action(name, "full", Full(), Retention(None), name, CODECS[name]()) for name in codecs]
    actions += [
        Action(name, "full", Full(), Retention.parse("80"), policy_name=name, policy=kind())
        for name, kind in POLICIES.items()
    ]
    refused = []
    for action in actions:
        try:
            (unit,) = generated(family, [PendingUnit(action, 0, 2)], horizon=6)
        except InputError as error:
            assert "this model" in str(error)  # noqa: PT017 - some are refused, and are listed below
            refused.append(action.name)
            continue
        delta = steps_of(unit)["delta"]
        assert np.isfinite(delta).all()
        assert not delta[:, 0].any()
        assert action.name == "identity" or delta.any() or family == "cohere2"
    assert ("snapkv" in refused) == (family in CAPPED)


# --- Bytes of windows -------------------------------------------------------------------------------------------------


def test_a_window_holds_its_own_entries_whatever_is_evicted() -> None:
    """Two of the model's four layers hold 39 entries, as transformers' cache does; the other two keep half of 150."""
    (half, control) = generated("gemma3", [PendingUnit(HALF_RECENT, 0, 1), PendingUnit(CONTROL, 0, 1)])
    entry = 2 * 2 * 16 * 4  # keys and values of a layer, float32
    assert half.record["payload_bytes"] == 2 * entry * (39 + 75)
    assert control.record["payload_bytes"] == 2 * entry * (39 + 150)
    assert half.record["kept_entries"] == 75
    assert len(half.record["kept_sha256"]) == 2
    footprint = local_footprint(str(saved_family("gemma3")), "float32")
    assert footprint is not None
    record = half.record
    stored = sum(record[name] for name in ("payload_bytes", "scale_bytes", "index_bytes", "metadata_bytes"))
    assert footprint.cache_bytes(75, AsComputed(), indexed=True) == stored
    assert half.record["resident_bytes"] - half.record["payload_bytes"] > 2 * entry * HORIZON


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "without", "layer"), [("olmo3", "window", 0), ("gpt-oss", "sinks", 0)])
def test_a_model_that_gives_something_else_is_refused_by_its_layer(
    family: str, without: str, layer: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As an attention would that has terms we know nothing of: the layer is named, and remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    terms = LayerTerms

    def forgetful(window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> LayerTerms:
        return terms(None if without == "window" else window, softcap, None if without == "sinks" else sinks)

    monkeypatch.setattr("generator.attention.interface.LayerTerms", forgetful)
    folder = saved_family(family)
    with pytest.raises(InputError, match=rf"not supported: layer {layer} differs from transformers' own") as refused:
        load_model(str(folder))
    assert proofs.results() == {str(folder): str(refused.value).partition("not supported: ")[2]}
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("selector", "family", "message"),
    [
        (ExpectedAttention(), "smollm3", "selector ExpectedAttention: needs layers that rotate whole heads by halves"),
        (ExpectedAttention(), "cohere2", "selector ExpectedAttention: needs layers that rotate whole heads by halves"),
        (SnapKV(), "gemma2", "selector SnapKV: computes attention itself, without the soft cap of 50"),
        (KVPress("KnormPress", (), None, ()), "gpt-oss", "selector kvpress:KnormPress: kvpress takes llama, mistral"),
    ],
)
def test_a_selector_that_a_family_cannot_give_is_refused_alone(selector: Selector, family: str, message: str) -> None:
    action = Action("half", "half", selector, Retention.parse("1/2"))
    with pytest.raises(InputError) as refused:
        generated(family, [PendingUnit(action, 0, 1)])
    assert str(refused.value).startswith(message)


def test_a_proof_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, made = saved_family("mistral"), []
    forward = loading.own_forward
    monkeypatch.setattr(loading, "own_forward", lambda *given: made.append(given) or forward(*given))
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
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 64}}, "RoPE of type 'longrope' is not supported"),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "attention of type 'linear_attention' is not supported"),
        ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "attention of type"),
    ],
)  # fmt: skip
def test_what_a_configuration_tells_is_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    content = LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict() if "rope_parameters" in changes else {}
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError) as refused:
        load_model(str(tmp_path))
    assert str(refused.value).startswith(f"model.id = '{tmp_path}': {message}")

"""Actions with weights of their own: compared with transformers' forward pass of both models; 0 with equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.common_actions import assert_like_plain, plain_twin, steps_of
from fixtures.refusals import refused
from fixtures.study_files import load_study
from oracles.plain_generator import keep_all, keep_recent, keep_snapkv, load_eager
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from kvdrift.generator.actions import build_actions
from kvdrift.generator.checks.random_models import random_document, save_random_model
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.generation.units import generate_together
from kvdrift.generator.transformer.files.text_ends import model_files
from kvdrift.generator.transformer.other_weights.model import ModelWithOthers, load_transformer
from kvdrift.generator.transformer.other_weights.named import check_shared, identities
from kvdrift.log.store import Unit
from kvdrift.schema.study import Study
from kvdrift.schema.tables import PLAIN, SWRB

DOCUMENTS = (random_document("d150", 150), random_document("d140", 140))
HORIZON, COUNT = 12, 5
NONE_SHARED = SharingOptions(share_streams=False)
STUDY = """
[study]
name = "weights"
horizon = 12
seed = 3

[model]
id = "./reference"

[[documents]]
source = "jsonl"
path = "prompts.jsonl"
length = 200
stratum = "any"
development = 2
evaluation = 2

{actions}

[plan]
baseline = "{baseline}"
primary = ["mismatch"]
"""
NEAR = """
[[actions]]
name = "near"
weights = "./near"

[[actions]]
name = "near-snapkv"
weights = "near"
selector = "snapkv"
keep = "1/2"

[[actions]]
name = "recent"
selector = "recent"
keep = "1/2"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, its weights with a little noise, and a model of other sizes with the same vocabulary."""
    made = tmp_path_factory.mktemp("models")
    save_random_model(made / "reference", "qwen2")
    save_random_model(made / "near", "qwen2")
    file = made / "near" / "model.safetensors"
    tensors, random = load_file(file), torch.Generator().manual_seed(1)
    noisy = {name: one + 0.02 * torch.randn(one.shape, generator=random) for name, one in tensors.items()}
    save_file(noisy, file, {"format": "pt"})
    save_random_model(made / "pruned", "llama", seed=4, layers=1, num_key_value_heads=1, num_attention_heads=2)
    return made


def study_of(folder: Path, actions: str = NEAR) -> Study:
    baseline = actions.partition('name = "')[2].partition('"')[0]
    file = folder / "weights.toml"
    file.write_text(STUDY.format(actions=actions, baseline=baseline))
    return load_study(file)


def generated(study: Study, estimator: str = PLAIN, model: Any = None, sharing: Any = None) -> dict[str, Unit]:
    """The units of the first document, with the control."""
    pending = [
        PendingUnit(one, 0, COUNT, PLAIN if one.control else estimator)
        for one in build_actions(study)
    ]  # fmt: skip
    given = [] if sharing is None else [sharing]
    units = generate_units(model or load_transformer(study), "s", DOCUMENTS[0], pending, HORIZON, 3, *given)
    return {unit.record["action"]: unit for unit in units}


def bits(unit: Unit) -> list[bytes]:
    return [unit.events[name].to_numpy().tobytes() for name in ("t", "x_token", "y_token", "delta", "f")]


@pytest.mark.parametrize(
    ("action", "chooser", "other"),
    [
        ("near", keep_all(), "near"),
        ("near-snapkv", keep_snapkv(75), "near"),
        ("recent", keep_recent(75), None),
    ],
)
@pytest.mark.by_default("near-snapkv")
def test_each_side_is_transformers_own_forward_pass_of_its_weights(
    folder: Path, action: str, chooser: Any, other: str | None
) -> None:
    """At all positions, the first among them, along histories that the twin draws by itself."""
    unit = generated(study_of(folder))[action]
    network = load_eager(folder / "reference")
    second = None if other is None else load_eager(folder / other)
    assert_like_plain(unit, plain_twin(network, DOCUMENTS[0], action, chooser, COUNT, HORIZON, other=second))


def test_a_pair_may_part_at_the_first_token(folder: Path) -> None:
    """A model of other sizes: delta and f of position 1 are the distance of the two prompts' distributions."""
    study = study_of(folder, '[[actions]]\nname = "pruned"\nweights = "./pruned"\n')
    units = generated(study)
    distributions = [
        load_eager(folder / name)(torch.tensor([DOCUMENTS[0].tokens])).logits[0, -1].double().softmax(-1)
        for name in ("reference", "pruned")
    ]
    distance = float(1 - torch.minimum(*distributions).sum().detach())
    steps = steps_of(units["pruned"])
    assert distance > 0.1
    np.testing.assert_allclose(steps["delta"][:, 0], distance, atol=1e-5)
    np.testing.assert_array_equal(steps["delta"][:, 0], steps["f"][:, 0])
    assert (steps["x_token"][:, 0] != steps["y_token"][:, 0]).any()
    assert not steps_of(units["full"])["delta"].any()
    # One layer with one KV head against two of two: a quarter of the entries' bytes, and files of other sizes.
    one, full = units["pruned"].record, units["full"].record
    assert (4 * one["payload_bytes"], one["kept_entries"]) == (full["payload_bytes"], full["kept_entries"])
    for name, record in (("pruned", one), ("reference", full)):
        assert record["weight_bytes"] == (folder / name / "model.safetensors").stat().st_size


@pytest.mark.parametrize("estimator", [PLAIN, SWRB])
def test_the_references_own_weights_change_no_bit(folder: Path, estimator: str) -> None:
    """Equal weights prefill and decode separately: exactly 0 alone, and with a selector the action's own events."""
    plain = '[[actions]]\nname = "recent"\nselector = "recent"\nkeep = "1/2"\n'
    same = f'{plain}weights = "./reference"\n[[actions]]\nname = "same"\nweights = "reference"\n'
    model = load_transformer(study_of(folder, same))
    assert isinstance(model, ModelWithOthers)
    assert model.models == [model]
    units, expected = generated(study_of(folder, same), estimator, model), generated(study_of(folder, plain), estimator)
    assert bits(units["recent"]) == bits(expected["recent"])
    assert any(np.frombuffer(bits(units["recent"])[3], np.float32))
    assert not any(np.frombuffer(column, np.float32).any() for column in bits(units["same"])[3:])


@pytest.mark.parametrize("estimator", [PLAIN, SWRB])
@pytest.mark.by_default(SWRB)
def test_what_is_shared_and_what_is_decoded_beside_change_no_bit(folder: Path, estimator: str) -> None:
    study = study_of(folder)
    model, actions = load_transformer(study), build_actions(study)
    whole = generated(study, estimator, model)
    apart = generated(study, estimator, model, NONE_SHARED)
    work = [
        (document, [PendingUnit(one, 0, COUNT, estimator) for one in own])
        for document, own in zip(DOCUMENTS[::-1], (actions[:2], actions[:3]), strict=True)
    ]
    twin = next(iter(model.twins(1, lambda: None)))
    _, beside = generate_together(twin, "s", work, HORIZON, 3)
    for unit in beside:
        assert bits(unit) == bits(whole[unit.record["action"]]) == bits(apart[unit.record["action"]])


def test_an_identity_follows_the_files_of_its_own_weights(tmp_path: Path) -> None:
    for name in ("reference", "near"):
        save_random_model(tmp_path / name, "qwen2", seed=len(name))
    study = study_of(tmp_path)
    actions = build_actions(study)

    def found() -> dict[str, Any]:
        identity = identities(study, model_files(study))
        return {action.name: identity(action) for action in actions}

    before, model = found(), load_transformer(study)
    assert before == {action.name: model.identity(action) for action in actions}
    assert len({one.weights_sha256 for one in before.values()}) == 1
    save_random_model(tmp_path / "near", "qwen2", seed=9)
    after = found()
    assert {name for name in before if after[name] != before[name]} == {"near", "near-snapkv"}


def test_weights_with_other_tokens_are_refused(tmp_path: Path) -> None:
    """A folder without a tokenizer goes with the reference's; equal tokens may lie in unequal files."""
    study = study_of(tmp_path, '[[actions]]\nname = "own"\nweights = "./own"\n')
    save_random_model(tmp_path / "reference", "qwen2")
    save_random_model(tmp_path / "own", "qwen2", vocab_size=80)
    begins = "action 'own': its weights have"
    assert refused(check_shared, study, fetch=False).startswith(
        f"{begins} a vocabulary of 80, those of the reference 96:"
    )
    save_random_model(tmp_path / "own", "qwen2")
    (tmp_path / "own" / "generation_config.json").write_text('{"eos_token_id": [17, 7]}')
    line = refused(check_shared, study, fetch=False)
    assert line.startswith("action 'own': its weights end a text also at tokens [7], ")
    assert "eos = [5, 17, 40, 7] under [study]" in line
    chosen = study.model_copy(update={"study": study.study.model_copy(update={"eos": [5, 7]})})
    check_shared(chosen, fetch=False)
    (tmp_path / "own" / "generation_config.json").write_text('{"eos_token_id": 17}')  # of the reference's
    check_shared(study, fetch=False)
    words = {f"w{token}": token for token in range(96)}
    _tokenizer(words).save_pretrained(tmp_path / "reference")
    check_shared(study, fetch=False)
    _tokenizer(words, "a template").save_pretrained(tmp_path / "own")
    check_shared(study, fetch=False)
    _tokenizer({**words, "w3": 4, "w4": 3}).save_pretrained(tmp_path / "own")
    assert refused(check_shared, study, fetch=False).startswith(f"{begins} the tokenizer ")
    assert refused(load_transformer, study).startswith(f"{begins} the tokenizer ")


def _tokenizer(words: dict[str, int], template: str | None = None) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer  # noqa: PLC0415 - of this helper alone
    from tokenizers.models import WordLevel  # noqa: PLC0415

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))  # noqa: S106 - a word
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        ("./gone", "action 'own': weights = './gone': no such folder"),
        ("gone", "action 'own': weights = 'gone': no such folder in {folder}, and no Hugging Face id, OWNER/NAME"),
        ("./empty", "action 'own': weights = './empty': the folder has no config.json"),
        ("./bare", "action 'own': weights = './bare': the folder has no weights (*.safetensors), or not all"),
    ],
)
def test_weights_that_cannot_be_loaded_are_told_by_their_action(tmp_path: Path, weights: str, line: str) -> None:
    save_random_model(tmp_path / "reference", "qwen2")
    save_random_model(tmp_path / "bare", "qwen2")
    (tmp_path / "bare" / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    study = study_of(tmp_path, f'[[actions]]\nname = "own"\nweights = "{weights}"\n')
    assert refused(load_transformer, study) == line.format(folder=tmp_path)


def test_a_noise_floor_has_the_references_weights(folder: Path) -> None:
    study = study_of(folder, '[[actions]]\nname = "own"\nweights = "near"\nselector = "numerics"\nkeep = "all"\n')
    assert refused(build_actions, study).startswith("action 'own': 'numerics' ")

"""Events under other laws than the full softmax: against transformers' ``generate``, and against the plain twin."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.common_actions import (
    CONTROL,
    HALF_RECENT,
    HALF_SNAPKV,
    assert_like_plain,
    plain_twin,
    steps_of,
)
from oracles.plain_generator import (
    greedy_tokens,
    keep_all,
    keep_recent,
    keep_snapkv,
    load_eager,
)

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import random_document, random_model, save_random_model
from kvdrift.generator.documents.registry import stratum_documents
from kvdrift.generator.generation import PendingUnit, StudySampling, generate_together, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID, model_folder
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.document import PreparedPrompt
from kvdrift.log.store import Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.study import DocumentsSection
from kvdrift.schema.tables import SWRB

ACTIONS = (HALF_SNAPKV, HALF_RECENT)
GREEDY = Sampling(0.0)


@cache
def embedded() -> tuple[Any, Any]:
    """The embedded model, as ours and as transformers' eager one."""
    folder = model_folder(EMBEDDED_ID, None)
    assert folder is not None
    return load_model(EMBEDDED_ID), load_eager(folder)


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_that_transformers_generates(count: int) -> None:
    """Documents are decoded on the whole cache, and on the halves that SnapKV and recency keep."""
    model, network = embedded()
    horizon, diverged = 20, 0
    section = DocumentsSection(
        source="embedded", tasks=["needle", "variable_tracking"], length=384, development=2, evaluation=20
    )
    documents = stratum_documents(section, 7, lambda: None)["evaluation"]
    assert len(documents) == 20
    for document in documents[:count]:
        pending = [PendingUnit(action, 0, 2) for action in (*ACTIONS, CONTROL)]
        snapkv, recent, control = generate_units(replace(model, sampling=GREEDY), "s", document, pending, horizon, 3)
        half = document.prompt_tokens // 2
        wanted = [
            greedy_tokens(network, document.tokens, chooser, horizon)
            for chooser in (keep_all(), keep_snapkv(half), keep_recent(half))
        ]
        filled = [[*tokens, *[model.eos_tokens[0]] * (horizon - len(tokens))] for tokens in wanted]
        assert steps_of(control)["y_token"].tolist() == [filled[0]] * 2
        for unit, tokens in ((snapkv, filled[1]), (recent, filled[2])):
            steps = steps_of(unit)
            assert steps["x_token"].tolist() == [filled[0]] * 2
            assert steps["y_token"].tolist() == [tokens] * 2
            assert np.array_equal(steps["delta"], steps["x_token"] != steps["y_token"]), "a greedy law is one token"
            assert set(np.unique(steps["f"])) <= {0.0, 1.0}
            diverged += steps["delta"].any()
    assert diverged > count / 2, "there is something to tell apart"


@pytest.mark.parametrize(
    ("sampling", "vocabulary"),
    [
        (GREEDY, 97), (Sampling(0.7, 0.9), 97), (Sampling(1.5, 0.8, 12), 97),
        pytest.param(Sampling(0.7, 0.9), 5000, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_events_equal_plain(sampling: Sampling, vocabulary: int, tmp_path: Path) -> None:
    """Laws differ by less than 1e-5, unless a token is at the very edge of a truncation, as in ``test_generator``."""
    folder = save_random_model(tmp_path / "model", "llama", vocab_size=vocabulary)
    document, count, horizon = random_document("d150", 150), 1 if vocabulary > 97 else 4, 6
    chooser = keep_snapkv(75)
    plain = plain_twin(load_eager(folder), document, "snapkv-half", chooser, count, horizon, sampling=sampling)
    model = replace(load_model(str(folder)), sampling=sampling)
    (unit,) = generate_units(model, "s", document, [PendingUnit(HALF_SNAPKV, 0, count)], horizon, 3)
    assert_like_plain(unit, plain)
    assert (plain.x_token != plain.y_token).any()
    assert json.loads(unit.record["versions"])["sampling"] == sampling.words


def test_the_default_law_is_not_recorded() -> None:
    """Replicates of a greedy law share all their streams: a law takes one evaluation, whatever K is."""
    document, pending = random_document("d150", 150), [PendingUnit(HALF_SNAPKV, 0, 8)]
    model = random_model("llama")
    (whole,) = generate_units(model, "s", document, pending, 6, 3)
    (greedy,) = generate_units(replace(model, sampling=GREEDY), "s", document, pending, 6, 3)
    assert "sampling" not in json.loads(whole.record["versions"])
    assert greedy.record["kernel_evaluations"] <= 3 * 5 < whole.record["kernel_evaluations"]


def test_several_samplings_from_one_prefill_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are generated side by side, with both estimators and a policy; units share a document's prefill evenly."""
    model, prefilled = random_model("llama"), []
    prefill = PreparedPrompt.__init__
    monkeypatch.setattr(
        PreparedPrompt, "__init__", lambda self, *given: (prefilled.append(given[1].doc), prefill(self, *given))[1]
    )
    laws = [StudySampling(f"s-t{law.temperature}", law) for law in (Sampling(0.7, 0.9), GREEDY, FULL_SOFTMAX)]
    documents = [random_document(name, length) for name, length in (("d140", 140), ("d150", 150))]
    tova = Action("tova", "full", Full(), Retention(40), policy=POLICIES["tova"]())

    def pending(of: StudySampling | None) -> list[PendingUnit]:
        coupled = [PendingUnit(action, 0, 3, of=of) for action in (HALF_SNAPKV, tova, CONTROL)]
        return [*coupled, PendingUnit(HALF_SNAPKV, 1, 2, SWRB, of=of)]

    several = generate_together(
        model, "s", [(one, [unit for of in laws for unit in pending(of)]) for one in documents], 6, 3
    )
    assert prefilled == ["d140", "d150"]
    made = {_named(unit): unit for units in several for unit in units}
    assert len(made) == 2 * 3 * 4
    for of in laws:
        for document in documents:
            for unit in generate_units(replace(model, sampling=of.sampling), of.study, document, pending(None), 6, 3):
                other = made[_named(unit)]
                assert other.events.equals(unit.events)
                measured = dict.fromkeys(("prefill_seconds", "decode_seconds"))
                assert other.record | measured == unit.record | measured
    shares: dict[tuple[str, str], set[float]] = {}
    for unit in made.values():
        shares.setdefault((unit.record["doc"], unit.record["action"]), set()).add(unit.record["prefill_seconds"])
    assert all(len(own) == 1 for own in shares.values())


def _named(unit: Unit) -> tuple[str, ...]:
    return tuple(unit.record[name] for name in ("study", "doc", "action", "estimator"))

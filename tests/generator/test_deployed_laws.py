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
from fixtures.random_models import random_document, random_model, save_random_model
from oracles.plain_generator import greedy_tokens, keep_all, keep_recent, keep_snapkv, load_eager

from generator.documents.registry import stratum_documents
from generator.generation import PendingUnit, generate_units
from generator.transformer.loading import load_model
from generator.transformer.local_folders import EMBEDDED_ID, model_folder
from schema.sampling import SamplingLaw
from schema.study import DocumentsSection

ACTIONS = (HALF_SNAPKV, HALF_RECENT)
GREEDY = SamplingLaw(0.0)


@cache
def embedded() -> tuple[Any, Any]:
    """The embedded model, as ours and as transformers' eager one."""
    folder = model_folder(EMBEDDED_ID, None)
    assert folder is not None
    return load_model(EMBEDDED_ID), load_eager(folder)


def test_greedy_tokens_are_those_that_transformers_generates() -> None:
    """Of 20 documents on the whole cache, and on the halves that SnapKV and recency keep of it."""
    model, network = embedded()
    horizon, parted = 20, 0
    section = DocumentsSection(
        source="embedded", tasks=["needle", "variable_tracking"], length=384, development=2, evaluation=20
    )
    documents = stratum_documents(section, 7, lambda: None)["evaluation"]
    assert len(documents) == 20
    for document in documents:
        pending = [PendingUnit(action, 0, 2) for action in (*ACTIONS, CONTROL)]
        snapkv, recent, control = generate_units(replace(model, law=GREEDY), "s", document, pending, horizon, 3)
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
            parted += steps["delta"].any()
    assert parted > 10, "there is something to tell apart"


@pytest.mark.parametrize(
    ("law", "vocabulary"),
    [(GREEDY, 97), (SamplingLaw(0.7, 0.9), 97), (SamplingLaw(1.5, 0.8, 12), 97), (SamplingLaw(0.7, 0.9), 5000)],
)
def test_events_equal_plain(law: SamplingLaw, vocabulary: int, tmp_path: Path) -> None:
    """Laws part by less than 1e-5, unless a token is at the very edge of what is left out, as in ``test_generator``."""
    folder = save_random_model(tmp_path / "model", "llama", vocab_size=vocabulary)
    document, count, horizon = random_document("d150", 150), 1 if vocabulary > 97 else 4, 6
    chooser = keep_snapkv(75)
    plain = plain_twin(load_eager(folder), document, "snapkv-half", chooser, count, horizon, law=law)
    model = replace(load_model(str(folder)), law=law)
    (unit,) = generate_units(model, "s", document, [PendingUnit(HALF_SNAPKV, 0, count)], horizon, 3)
    assert_like_plain(unit, plain)
    assert (plain.x_token != plain.y_token).any()
    assert json.loads(unit.record["versions"])["law"] == law.words


def test_the_default_law_is_not_recorded() -> None:
    """And the replicates of a greedy one share all of their streams: a law takes one evaluation, whatever K is."""
    document, pending = random_document("d150", 150), [PendingUnit(HALF_SNAPKV, 0, 8)]
    model = random_model("llama")
    (whole,) = generate_units(model, "s", document, pending, 6, 3)
    (greedy,) = generate_units(replace(model, law=GREEDY), "s", document, pending, 6, 3)
    assert "law" not in json.loads(whole.record["versions"])
    assert greedy.record["kernel_evaluations"] <= 3 * 5 < whole.record["kernel_evaluations"]

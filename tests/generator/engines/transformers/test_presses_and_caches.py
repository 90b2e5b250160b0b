"""Presses and caches through the engine ``transformers``, bit for bit against a plain loop of kvpress and transformers.

``make kvpress`` and ``make quantizers`` install what the marked tests need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.families import saved_family
from fixtures.presses import DRAWING, written
from fixtures.refusals import refused
from numpy.typing import NDArray
from oracles.plain_transformers import plain_logits
from transformers import AutoModelForCausalLM, QuantizedCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.transformers import presses
from kvdrift.generator.engines.transformers.engine import Side, Transformers
from kvdrift.generator.engines.transformers.sessions import TransformersSession
from kvdrift.generator.selectors.kvpress import load_kvpress
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER
from kvdrift.schema.errors import InputError, OperationError

ENTRIES, STEPS = 192, 12
PROMPT = make_document("needle", ENTRIES, 0, 3).tokens
TEXT, OTHER = np.random.default_rng(5).integers(4, 250, (2, STEPS)).tolist()


@cache
def network(attention: str = "sdpa") -> Any:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, attn_implementation=attention).eval()
    model.config.head_dim = 32  # some presses ask for it, and a configuration of Qwen2 has none
    return model


def side_of(folder: Path | None = None, **settings: Any) -> Side:
    return Transformers().side("kvdrift/tiny", settings, "action 'mine'", folder)


def engine_logits(side: Side, *, beside: bool = False, forked: int | None = None) -> NDArray[np.float32]:
    """Return the logits after the prompt and each token of TEXT: of a stream alone, beside another, or forked.

    The stream is the last row of its calls: kvpress itself would mask entries in the first row alone.
    """
    session = side.open(Room(len(PROMPT), 4, STEPS + 1))
    rows = [session.prefill(PROMPT)]
    streams = [*([session.fork()] if beside else []), session.fork()]
    for number, token in enumerate(TEXT):
        if number == forked:
            streams = [streams[0], session.fork(streams[0])]
        rows.append(session.step(streams, [OTHER[number], token][-len(streams) :])[-1])
    session.close()
    return np.stack(rows)


def same_bits(side: Side, make_press: Callable[[], Any] | None = None, **loop: Any) -> None:
    expected = plain_logits(network(), PROMPT, TEXT, make_press, **loop)
    for case in ({}, {"beside": True}, {"forked": 5}):
        np.testing.assert_array_equal(engine_logits(side, **case), expected, err_msg=str(case))


# --- Caches of transformers ------------------------------------------------------------------------------------------


def test_the_reference_is_transformers_own_loop_bit_for_bit() -> None:
    same_bits(side_of(rows=1))


def test_a_static_cache_gets_the_room_of_a_stream() -> None:
    most = len(PROMPT) + STEPS + 1
    same_bits(side_of(rows=1, cache="StaticCache"), make_cache=lambda: StaticCache(network().config, most))


QUANTO = "QuantizedCache(backend='quanto', nbits=4, q_group_size=32)"


@pytest.mark.parametrize(
    "settings", [{}, {"cache": "StaticCache"}, pytest.param({"cache": QUANTO}, marks=pytest.mark.quantizers)]
)
def test_rows_change_logits_by_rounding_alone(settings: dict[str, Any]) -> None:
    side, alone = side_of(**settings), engine_logits(side_of(**settings, rows=1))
    assert side._trial == (32, "")
    for case in ({}, {"beside": True}, {"forked": 5}):
        np.testing.assert_allclose(engine_logits(side, **case), alone, atol=2e-4)  # float32 over 3 layers


@pytest.mark.quantizers
@pytest.mark.parametrize(
    "options", ["'quanto', nbits=4", "'quanto', nbits=2", "'hqq', nbits=4", "'hqq', nbits=2", "'fp8'"]
)
def test_a_quantized_cache_is_transformers_own_bit_for_bit(options: str) -> None:
    written = f"QuantizedCache(backend={options}{'' if 'fp8' in options else ', q_group_size=32'})"
    made = eval(f"dict({written.removeprefix('QuantizedCache(')}")  # noqa: S307 - of this test's own text
    same_bits(side_of(rows=1, cache=written), make_cache=lambda: QuantizedCache(config=network().config, **made))


@pytest.mark.quantizers
def test_a_cache_that_quantizes_rows_together_is_decoded_one_by_one() -> None:
    rows, note = side_of(
        cache="QuantizedCache(backend='hqq', nbits=4, axis_key=0, axis_value=0, q_group_size=32)"
    )._trial
    assert rows == 1
    assert "one stream a call" in note


# --- Presses of kvpress ----------------------------------------------------------------------------------------------


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    yield


def taken() -> list[str]:
    try:
        return [name for name, reason in presses.listed() if reason is None]
    except Exception:  # noqa: BLE001 - without kvpress its tests are not run
        return ["none"]


@pytest.mark.kvpress
@pytest.mark.parametrize("name", taken())
def test_a_press_is_kvpress_own_loop_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = "eager" if name == "ObservedAttentionPress" else "sdpa"
    side = side_of(rows=1, press=written(name), attention=attention)
    model = network(attention)
    make_press = lambda: eval(written(name), vars(load_kvpress()))  # noqa: S307, E731 - of this test's own text
    seeds = [7] * (1 + STEPS) if name in DRAWING else []
    if seeds:
        monkeypatch.setattr(TransformersSession, "_seeded", lambda *_: seeded(7))
    expected = plain_logits(model, PROMPT, TEXT, make_press, seeds=seeds)
    assert np.abs(expected[1:] - plain_logits(model, PROMPT, TEXT)[1:]).max() > 0.01, "the press does nothing"
    for case in ({}, {"beside": True}, {"forked": 5}):
        np.testing.assert_array_equal(engine_logits(side, **case), expected, err_msg=str(case))


@pytest.mark.kvpress
@pytest.mark.parametrize(
    "name", ["SnapKVPress", "AdaKVPress", "KVzipPress", "KeyRerotationPress", "ThinKPress", "DMSPress"]
)
def test_rows_of_a_press_change_logits_by_rounding_alone(name: str) -> None:
    side, alone = side_of(press=written(name)), engine_logits(side_of(press=written(name), rows=1))
    assert side._trial == (32, "")
    for case in ({"beside": True}, {"forked": 5}):
        np.testing.assert_allclose(engine_logits(side, **case), alone, atol=5e-4)  # float32, and a fake key of -1e5


@pytest.mark.kvpress
def test_presses_that_cannot_run_are_refused_with_the_reason() -> None:
    reasons = {name: reason for name, reason in presses.listed() if reason is not None}
    assert set(reasons) == {
        "BasePress", "ScorerPress", "DuoAttentionPress", "ExpectedAttentionStatsPress", "FastKVzipPress", "FinchPress",
        "KVzapPress", "LUKVPress", "QFilterPress", "RestoreKVPress",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert reason in refused(side_of, press=f"{name}()")


@pytest.mark.kvpress
def test_attention_is_wrapped_around_calls_alone() -> None:
    before = dict(ALL_ATTENTION_FUNCTIONS)
    engine_logits(side_of(press=written("AdaKVPress")))
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


@pytest.mark.kvpress
@pytest.mark.parametrize("name", ["AdaKVPress", "DMSPress"])
def test_masks_in_eager_attention_are_refused(name: str) -> None:
    """AdaKVPress says so itself; DMSPress would silently leave out nothing."""
    with pytest.raises((InputError, OperationError), match="eager"):
        engine_logits(side_of(press=written(name), attention="eager"))


@pytest.mark.kvpress
def test_a_press_on_a_model_with_windows_is_refused() -> None:
    folder = saved_family("gemma3")
    line = refused(Transformers().side, str(folder), {"press": written("SnapKVPress")}, "action 'mine'")
    assert "layers with a window" in line


@pytest.mark.kvpress
@pytest.mark.parametrize(("name", "share"), [("AdaKVPress", 0.5), ("ThinKPress", 0.75), ("KeyRerotationPress", 0.5)])
def test_bytes_leave_out_masked_entries_and_channels_of_zeros(name: str, share: float) -> None:
    held = []
    for settings in ({"press": written(name)}, {}):
        session = side_of(**settings).open(Room(len(PROMPT), 1, 1))
        session.prefill(PROMPT)
        held.append(session.prompt_bytes())
    assert held[0] == share * held[1]  # type: ignore[operator]


@pytest.mark.kvpress
def test_a_press_that_acts_while_decoding_has_a_peak() -> None:
    session = side_of(press=written("DecodingPress")).open(Room(len(PROMPT), 1, STEPS))
    session.prefill(PROMPT)
    stream = session.fork()
    for token in TEXT:
        session.step([stream], [token])
    entry = 3 * 2 * 2 * 32 * 4  # layers, keys and values, KV heads, channels, bytes
    assert session.read_back["rows"] == 1
    assert session.peak_bytes() == (len(PROMPT) + 3) * entry  # evicts at the fourth token

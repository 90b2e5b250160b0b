"""What a study file may say of presses, caches and patches, and what happens around them: refusals, identities, bytes.

The tests take a cache and patches of their own, so that they need no package but transformers.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.engine_study import study_text
from fixtures.refusals import refused
from fixtures.study_files import load_study
from transformers.models.qwen2 import modeling_qwen2

from kvdrift.generator.actions import build_actions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.engines.transformers.engine import Side, Transformers, _probed
from kvdrift.generator.engines.transformers.entries import held_bytes
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.schema.errors import OperationError
from kvdrift.schema.tables import SWRB

OWN = '''"""A cache and patches of a user."""

from contextlib import contextmanager

from transformers import DynamicCache
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

FORWARD = Qwen2RMSNorm.forward


class Sliding(DynamicCache):
    def __init__(self, window=64):
        super().__init__()
        self.window = window

    def update(self, key, value, layer, *arguments, **options):
        keys, values = super().update(key, value, layer, *arguments, **options)
        self.layers[layer].keys = keys[:, :, -self.window :]
        self.layers[layer].values = values[:, :, -self.window :]
        return keys, values


class Counting(DynamicCache):
    calls = 0

    def update(self, key, value, layer, *arguments, **options):
        Counting.calls += 1
        return super().update(key * (1 + Counting.calls / 1000), value, layer, *arguments, **options)


class Mixing(DynamicCache):
    def update(self, key, value, layer, *arguments, **options):
        return super().update(key - key.mean(dim=0) * (key.shape[0] > 1), value, layer, *arguments, **options)


class Failing(DynamicCache):
    def update(self, key, value, layer, *arguments, **options):
        raise RuntimeError("no room")


def scaled(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.05


def of_class(model):
    Qwen2RMSNorm.forward = lambda self, states: 1.01 * FORWARD(self, states)


@contextmanager
def for_a_while(model):
    of_class(model)
    try:
        yield
    finally:
        Qwen2RMSNorm.forward = FORWARD


def failing(model):
    return model.nothing
'''
SLIDING = 'settings = { cache = "mine.Sliding(window=96)" }'
PROMPT = make_document("needle", 192, 0, 3).tokens


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


def side_of(folder: Path | None = None, **settings: Any) -> Side:
    return Transformers().side("kvdrift/tiny", settings, "action 'mine'", folder)


def after_steps(side: Side, tokens: tuple[int, ...] = (5, 9, 17)) -> np.ndarray:
    session = side.open(Room(len(PROMPT), 2, len(tokens)))
    session.prefill(PROMPT)
    stream = session.fork()
    return np.stack([session.step([stream], [token])[0] for token in tokens])


# --- What is refused, in one line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"cache": "DynamicCach()"}, ("cache = 'DynamicCach()'", "did you mean 'DynamicCache'")),
        ({"cache": "mine.Slidin(window=3)"}, ("mine.py", "'Slidin'", "did you mean 'Sliding'")),
        ({"cache": "mine.Sliding(windw=3)"}, ("Sliding", "'windw'", "did you mean 'window'")),
        ({"cache": "theirs.Sliding()"}, ("no module 'theirs'",)),
        ({"cache": "mine.scaled()"}, ("'scaled'", "Cache")),
        ({"cache": "os.system('x')"}, ("'system'", "Cache")),
        ({"cache": "mine.Sliding(window=len('a'))"}, ("'len'", "transformers")),
        ({"cache": "mine.Sliding(window=2**9)"}, ("'2 ** 9'", "literal")),
        ({"cache": "mine.Sliding(window=3"}, ("write a class with literals",)),
        ({"cache": "7"}, ("write a class with literals",)),
        ({"cache": "QuantizedCache(backend='quanto', **{})"}, ("NAME=VALUE",)),
        ({"patch": "mine.scaled"}, ("module:function",)),
        ({"patch": "mine:scale"}, ("mine.py", "'scale'", "did you mean 'scaled'")),
        ({"dtype": "float31"}, ("float31", "float32")),
        ({"rows": 33}, ("rows = 33", "1 to 32")),
        ({"windw": 3}, ("unknown setting 'windw'",)),
    ],
)
def test_a_setting_that_names_nothing_is_refused_with_the_nearest_name(
    settings: dict[str, Any], parts: tuple[str, ...], folder: Path
) -> None:
    line = refused(side_of, folder, **settings)
    assert line.startswith("action 'mine'") or "mine.py" in line
    assert all(part in line for part in parts), line


def test_an_error_in_a_users_class_or_patch_is_one_line_with_its_place(folder: Path) -> None:
    place = next(number for number, line in enumerate(OWN.splitlines(), start=1) if "no room" in line)
    line = refused(after_steps, side_of(folder, cache="mine.Failing"), error=OperationError)
    assert f"no room ({folder / 'mine.py'}, line {place})" in line
    place = next(number for number, line in enumerate(OWN.splitlines(), start=1) if "model.nothing" in line)
    line = refused(after_steps, side_of(folder, patch="mine:failing"))
    assert f"{folder / 'mine.py'}, line {place})" in line


def test_a_patch_that_moves_the_reference_is_refused(folder: Path) -> None:
    before = modeling_qwen2.Qwen2RMSNorm.forward
    try:
        assert "moves the reference" in refused(after_steps, side_of(folder, patch="mine:of_class"))
    finally:
        modeling_qwen2.Qwen2RMSNorm.forward = before


def test_a_cache_that_keeps_state_elsewhere_is_refused(folder: Path) -> None:
    assert "keep the state" in refused(after_steps, side_of(folder, cache="mine.Counting"))


# --- What a side computes --------------------------------------------------------------------------------------------


def test_a_users_cache_is_equal_to_its_own_entries(folder: Path) -> None:
    whole = side_of(folder, cache="mine.Sliding(window=500)")
    np.testing.assert_array_equal(after_steps(whole), after_steps(side_of()))
    assert np.abs(after_steps(side_of(folder, cache="mine.Sliding(window=64)")) - after_steps(whole)).max() > 0.1


def test_rows_that_depend_on_each_other_are_decoded_one_by_one(folder: Path) -> None:
    rows, note = side_of(folder, cache="mine.Mixing")._trial
    assert (rows, "others beside a stream" in note) == (1, True)


@pytest.mark.parametrize("patch", ["scaled", "for_a_while"])
def test_a_patch_changes_its_own_side_alone(patch: str, folder: Path) -> None:
    reference, side = side_of(), side_of(folder, patch=f"mine:{patch}")
    before = _probed(reference._network)
    assert np.abs(after_steps(side) - after_steps(reference)).max() > 0.01
    assert reference._network is side._network
    assert torch.equal(_probed(reference._network), before)


# --- What a side records ---------------------------------------------------------------------------------------------


def test_bytes_and_kept_entries_follow_the_cache(folder: Path) -> None:
    session = side_of(folder, cache="mine.Sliding(window=64)").open(Room(len(PROMPT), 2, 4))
    session.prefill(PROMPT)
    entry = 3 * 2 * 2 * 32 * 4  # layers, KV heads, keys and values, channels, bytes
    assert (session.prompt_bytes(), session.kept_entries()) == (64 * entry, 64)
    kept = session.kept()
    assert kept is not None
    np.testing.assert_array_equal(kept.counts, np.tile(2 * (np.arange(len(PROMPT)) >= len(PROMPT) - 64), (3, 1)))


def test_an_identity_follows_options_and_every_defining_file(folder: Path) -> None:
    code = side_of(folder, cache="mine.Sliding(window=64)").code
    assert code["cache"] == "Sliding(window=64)"
    assert {"mine.py", "transformers.cache_utils", "transformers.models.qwen2.modeling_qwen2"} <= set(code)
    (folder / "mine.py").write_text(OWN.replace("-self.window :", "-self.window - 1 :"))
    changed = side_of(folder, cache="mine.Sliding(window=64)").code
    assert {name for name in code if code[name] != changed[name]} == {"mine.py"}
    patched = side_of(folder, patch="mine:scaled").code
    assert patched["mine.py"] == changed["mine.py"]


def test_bytes_of_masks_on_entries_that_are_not_stored_as_computed_are_unknown() -> None:
    packed = SimpleNamespace(layers=[SimpleNamespace(packed=torch.zeros(2, 3, 5), keys=None, values=None)])
    mask = [torch.zeros(4, dtype=torch.int64)] * 3
    assert held_bytes(packed, [None]) == 120
    assert held_bytes(packed, [mask]) is None


def test_a_press_cache_or_patch_computes_as_the_reference_does(folder: Path) -> None:
    engine, reference = Transformers(), side_of()
    for name, value in (("attention", "eager"), ("dtype", "bfloat16")):
        side = side_of(folder, **{"cache": "mine.Sliding", name: value})
        line = refused(engine.check_beside, reference, side, "action 'mine'")
        assert f'{name} = "{value}"' in line
        engine.check_beside(reference, side_of(folder, **{name: value}), "action 'mine'")


def test_residual_branching_forks_and_parks_streams(folder: Path) -> None:
    """In rows and one by one: the same scans and branches, token for token but where rounding decides."""
    text = study_text("presses", 'engine = "transformers"\nid = "kvdrift/tiny"\n#rows', SLIDING, of="sliding")
    tokens = []
    for rows in ("", "settings = { rows = 1 }"):
        (folder / "study.toml").write_text(text.replace("#rows", rows))
        study = load_study(folder / "study.toml")
        pending = [PendingUnit(action, 0, 2, SWRB) for action in build_actions(study) if action.name == "sliding"]
        (unit,) = generate_units(engine_model(study), "presses", make_document("needle", 200, 0, 3), pending, 8, 3)
        assert set(unit.events["kind"].to_pylist()) == {"scan", "branch"}
        tokens.append(unit.events["x_token"].to_pylist())
    assert len(tokens[0]) == len(tokens[1])
    assert np.mean(np.array(tokens[0]) == np.array(tokens[1])) > 0.9


def test_one_by_one_the_floor_is_exactly_0(folder: Path) -> None:
    model = 'engine = "transformers"\nid = "kvdrift/tiny"\nsettings = { rows = 1 }'
    (folder / "study.toml").write_text(study_text("presses", model, SLIDING, of="sliding"))
    study = load_study(folder / "study.toml")
    pending = [PendingUnit(action, 0, 2) for action in build_actions(study) if action.name in {"floor", "sliding"}]
    made = engine_model(study)
    assert made.batch_deviation == 0.0
    units = generate_units(made, "presses", make_document("needle", 200, 0, 3), pending, 8, 3)
    worst = {unit.record["action"]: max(unit.events["delta"].to_pylist()) for unit in units}
    assert worst["floor"] == 0.0
    assert worst["sliding"] > 0.1


def test_a_missing_quantizer_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "optimum-quanto":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("kvdrift.generator.engines.transformers.engine.version", missing)
    line = refused(side_of, cache="QuantizedCache('quanto', nbits=4)")
    assert "optimum-quanto" in line
    assert "[quantizers]" in line

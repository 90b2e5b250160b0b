"""The kernel floor that a study of llama.cpp has by default: the reference's cache by another kernel."""

from __future__ import annotations

import pytest

from kvdrift.flows.material import checked_actions
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import Study

CONTENT = {
    "study": {"name": "floors", "horizon": 4},
    "documents": [{"source": "embedded", "tasks": ["needle"], "length": 384, "development": 2, "evaluation": 2}],
    "plan": {"baseline": "a", "primary": ["mismatch"], "documents": 2, "replicates": 2},
}


def study(model: dict[str, object], *actions: dict[str, object]) -> Study:
    return Study.model_validate({**CONTENT, "model": {"id": "x", **model}, "actions": list(actions)})


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        (None, {"flash_attention": False}),
        ({"type_k": "q8_0"}, {"flash_attention": False}),
        ({"flash_attention": False}, {"flash_attention": True}),
        ({"type_k": "q8_0", "type_v": "q8_0"}, None),
    ],
)
def test_it_is_flash_attention_the_other_way_unless_quantized_values_need_it(
    settings: dict[str, object] | None, kernel: dict[str, object] | None
) -> None:
    """ggml-org/llama.cpp 28524 and 10378: quantized values without flash attention open no context."""
    made = study({"engine": "llama.cpp", "settings": settings}, {"name": "a", "settings": {"type_k": "q4_0"}})
    floors = {action.name: (action.selector, action.settings) for action in made.actions if action.name != "a"}
    assert floors == {"floor": ("numerics", None)} | ({"kernel-floor": ("numerics", kernel)} if kernel else {})
    assert made.estimated == ["a"]
    assert Study.model_validate(made.model_dump()).actions == made.actions


def test_a_study_file_may_choose_another_kernel() -> None:
    own = {"name": "kernel-floor", "settings": {"rows": 64}}
    made = study({"engine": "llama.cpp"}, {"name": "a", "settings": {"type_k": "q4_0"}}, own)
    assert [(one.name, one.settings) for one in made.actions[1:]] == [("kernel-floor", {"rows": 64}), ("floor", None)]


def test_of_servers_it_is_a_server_that_the_user_starts() -> None:
    model = {"engine": "http", "url": "http://127.0.0.1:1"}
    action = {"name": "a", "url": "http://127.0.0.1:2"}
    assert [one.name for one in study(model, action).actions] == ["a", "floor"]
    made = study(
        model, action, {"name": "kernel-floor", "url": "http://127.0.0.1:3", "settings": {"started": "-fa off"}}
    )
    assert [(one.name, one.selector) for one in made.actions[1:]] == [
        ("kernel-floor", "numerics"),
        ("floor", "numerics"),
    ]
    with pytest.raises(InputError, match=r"actions\[1\]\.url: missing"):
        study(model, action, {"name": "kernel-floor", "settings": {"started": "-fa off"}})


def test_floors_are_nothing_to_compare_an_action_with() -> None:
    plan = {**CONTENT["plan"], "primary": ["gap"]}
    actions = [{"name": "a", "settings": {"type_k": "q4_0"}}]
    one = Study.model_validate(
        {**CONTENT, "model": {"id": "x", "engine": "llama.cpp"}, "actions": actions, "plan": plan}
    )
    assert len(one.actions) == 3
    with pytest.raises(InputError, match=r"plan\.primary.* one action"):
        checked_actions(one)


@pytest.mark.parametrize(("key", "value", "engine"), [("settings", {}, "llama.cpp"), ("url", "http://a:1", "http")])
def test_a_key_of_an_engine_names_that_engine(key: str, value: object, engine: str) -> None:
    action = {"name": "a", "selector": "recent", "keep": "1/2", key: value}
    with pytest.raises(InputError, match=rf'actions\[0\]\.{key}: .*engine = "{engine}"'):
        study({}, action)

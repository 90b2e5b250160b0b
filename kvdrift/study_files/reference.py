"""The page ``docs/study-file.md``, written from the schema by ``make docs``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvdrift.generator.codecs import CODECS
from kvdrift.generator.documents.registry import SOURCES
from kvdrift.generator.selectors import SELECTORS, default_parameters
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.schema.study import CONTROL_ACTION, FINITE_STATE
from kvdrift.schema.study.reading import toml
from kvdrift.study_files.commented import Heading, headings, kind
from kvdrift.study_files.new_study import new_study, own_decoder

_INTRODUCTION = """\
# The study file

Written by `make docs` from the schema, which `kvdrift run` reads study files by.

A study file is [TOML](https://toml.io). `kvdrift init` writes a file with a comment to each key, and
`kvdrift run STUDY.toml --dry-run` forecasts its work, time and memory. An unknown key is an error that names the
nearest known key.

Paths are relative to the study file's folder, wherever the command runs: files of prompts, a model's folder, your own
modules. `~` is your home folder. A store knows a model by its `id` as written in the file, so keep the `id` when you
move the file. The paths of prompts and tables may change, since a store knows their content.
Commands that take only a store, such as `kvdrift report`, look for a model's tokenizer relative to the working folder.

The settings that decide events are fixed once the first event is stored: `[study]` except `store_prompts`, `[model]`
except `mixed_gpus`, `url`, `requests` and the path of `tables`, and in `[[documents]]` everything except the counts,
`path` and `exclude`. `[windows]` is fixed too. Documents, replicates and actions may be added later;
`kvdrift run --redo` takes a changed action, and `--replan` a changed plan.
"""

_SEVERAL_TEMPERATURES = """\
`temperature = [0.0, 0.7, 1.0]` makes one study for each temperature in one store. The studies share documents, actions
and the prefill of their prompts. Their names are the study's name and the temperature: `NAME-t0`, `NAME-t0.7`,
`NAME-t1`. Events equal those of a study with this name and temperature alone. `top_p` and `top_k` apply to temperatures
above 0.
"""


_FINITE_SOURCE = f"""\
### source = {toml(FINITE_STATE)}

For finite-state models only: every system is a document. The section takes no `tasks`, `length`, `path` or `exclude`.
"""

_SWEEPS = """\
`keep = ["1/8", "1/4", "1/2"]` makes one action for each value, named by the sweep's name and the value: `snapkv@1/8`. A
list of codecs does the same, and both lists together make every combination: `snapkv@1/8@int4`. Plans, gates and
`--redo` name the single actions. An action that is written with the name `snapkv@1/8` is the same action as that of the
sweep, so a sweep may begin as one action and grow.
"""


_PARTS: tuple[tuple[str, dict[str, type[Any]], tuple[str, str, str]], ...] = (
    (
        """\
### Selectors and their parameters

Every further key of an action is a parameter of its selector; in parentheses are defaults.
[selectors.md](selectors.md) has the formulas, and [adding-a-selector.md](adding-a-selector.md) custom selectors.
An action of a finite-state system has only its `name`.
""",
        {name: made for name, made in SELECTORS.items() if name != CONTROL_ACTION},
        ("selector", "kept entries", "parameters"),
    ),
    (
        """\
### Codecs and their parameters

Parameters stand in the codec's table, as in `codec = { name = "int4", group = 64 }`. [codecs.md](codecs.md) has the
formulas, and [adding-a-codec.md](adding-a-codec.md) custom codecs. Every codec of the table except those of HQQ also
takes `generated` (`false`): whether generated entries are coded, too, when they leave the window.
""",
        CODECS,
        ("codec", "stored form of entries", "parameters"),
    ),
    (
        """\
### Decode-time policies and their parameters

Parameters stand in the policy's table, as in `policy = { name = "sliding", sinks = 8 }`; `keep` is then the most
entries that a step reads. [policies.md](policies.md) has the formulas, and
[adding-a-policy.md](adding-a-policy.md) custom policies.
""",
        POLICIES,
        ("policy", "entries that a step reads", "parameters"),
    ),
)


def study_reference() -> str:
    """Return the page: every section with its keys, the document sources and the selectors."""
    parts = [_INTRODUCTION]
    for name, heading in headings().items():
        parts.append(f"## {heading.title}\n\n{heading.meaning}\n")
        if name == "model":
            parts.append("Several `[[model]]` sections make one study for each model, all in one store.\n")
        parts.append(_keys(heading))
        if name == "study":
            parts.append(_SEVERAL_TEMPERATURES)
        if name == "documents":
            parts += [*map(_source, SOURCES), _FINITE_SOURCE]
        if name == "actions":
            parts += [_SWEEPS, *(f"{text}\n{_of_parts(known, head)}" for text, known, head in _PARTS)]
    parts.append(f"## An example\n\nThe file that `kvdrift init` writes without options:\n\n```toml\n{_example()}```\n")
    return "\n".join(parts)


def _keys(heading: Heading) -> str:
    rows = [
        (f"`{name}`", kind(key), key.get("unit", ""), _default(key), key["description"])
        for name, key in heading.keys.items()
    ]
    return _table(("key", "value", "unit", "default", "meaning"), rows)


def _default(key: dict[str, Any]) -> str:
    if key["needed"]:
        return "required"
    return "" if key["default"] is None else f"`{toml(key['default'])}`"


def _source(name: str) -> str:
    source = SOURCES[name]
    keys = [f"`{key}`{' (required)' if key in source.needs else ''}" for key in source.takes]
    generated = [task for task in source.tasks if task in source.generated]
    read = [task for task in source.tasks if task not in source.generated]
    lines = [
        f"### source = {toml(name)}",
        "",
        f"- {source.summary}",
        f"- optional keys of this source: {', '.join(keys) or 'none'}",
        *([f"- tasks whose prompts kvdrift makes: {_listed(generated)}"] if generated else []),
        *([f"- tasks whose prompts are read from files: {_listed(read)}"] if read else []),
    ]
    return "\n".join(lines) + "\n"


def _of_parts(known: dict[str, type[Any]], head: tuple[str, str, str]) -> str:
    return _table(head, [(f"`{name}`", made.summary, _parameters(made)) for name, made in known.items()])


def _parameters(made: type[Any]) -> str:
    defaults = {name: "none" if value is None else toml(value) for name, value in default_parameters(made).items()}
    return ", ".join(f"`{name}` ({value})" for name, value in defaults.items())


def _example() -> str:
    path = Path("my-study.toml")
    return new_study(path, own_decoder(EMBEDDED_ID, [], path.absolute().parent), None, [], None, None)[0]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    print(study_reference(), end="")  # noqa: T201 - it writes a page

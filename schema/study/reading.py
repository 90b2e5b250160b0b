"""Read study files, and expand their lists: sweeps into one action for each member, temperatures into one study each.

Paths in a study file are relative to the file's own folder. Studies of several temperatures differ only in name and
sampling.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvdrift.schema.errors import InputError, reading
from kvdrift.schema.location import check_regular, straight
from kvdrift.schema.retention import Retention
from kvdrift.schema.study.actions import name_of_codec
from kvdrift.schema.study.design import PlanSection
from kvdrift.schema.study.section import MOST_LISTED, explained, missing
from kvdrift.schema.study.whole import Study, check_distinct

SWEPT: Final = ("keep", "codec")
"""The keys of an action that may be lists, in the order of their values in a member's name."""

SIGN: Final = "@"
"""The sign before each value in a member's name."""

_TRUNCATING: Final = ("top_p", "top_k")
_ONE_OF_SEVERAL: Final = re.compile(r"(.+)-t\d[\d.e-]*")


def of_each_member(content: dict[str, Any]) -> dict[str, Any]:
    """Return a study file's content, which need not be valid, with one action for each member of a sweep in its place.

    The action NAME with ``keep = ["1/8", "1/4"]`` becomes ``NAME@1/8`` and ``NAME@1/4``; with a list of codecs too, an
    action for each combination, as in ``NAME@1/8@int4``.
    """
    actions = content.get("actions")
    if not isinstance(actions, list):
        return content
    made = [member for number, action in enumerate(actions) for member in _members(action, f"actions[{number}]")]
    if len(made) > max(MOST_LISTED, len(actions)):
        raise InputError(f"actions: lists of keep and codec make {len(made):,} actions; write at most {MOST_LISTED}")
    return content | {"actions": made}


def families(actions: list[str]) -> dict[str, list[str]]:
    """Return the members of each sweep, by its name, in the order of ``actions``; sweeps of one member are left out.

    If both ``keep`` and ``codec`` are lists, the actions with the same codec are a sweep of their own.
    """
    sweeps: dict[str, list[str]] = {}
    for action in actions:
        parts = action.split(SIGN)
        if len(parts) > 1:
            sweeps.setdefault(SIGN.join([parts[0], *parts[2:]]), []).append(action)
    return {name: members for name, members in sweeps.items() if len(members) > 1}


def _members(action: Any, where: str) -> list[Any]:
    """Return the actions that one section makes: itself, or an action for each combination of its lists' values."""
    if not isinstance(action, dict):
        return [action]
    swept = [key for key in SWEPT if isinstance(action.get(key), list)]
    if not swept or not isinstance(action.get("name"), str):
        return [action]
    labels = [_labels(action[key], key, f"{where}.{key}") for key in swept]
    members = []
    for chosen in itertools.product(*(zip(labels[at], action[key], strict=True) for at, key in enumerate(swept))):
        name = SIGN.join([action["name"], *(label for label, _ in chosen)])
        values = {key: value for key, (_, value) in zip(swept, chosen, strict=True)}
        members.append(action | values | {"name": name})
    return members


def _labels(listed: list[Any], key: str, where: str) -> list[str]:
    """Return the part of each member's name that stands for its value."""
    if not listed:
        raise InputError(f"{where} = []: has no value; write one, or several as in {_EXAMPLES[key]}")
    labels = [_label(value, key, f"{where}[{place}]") for place, value in enumerate(listed)]
    check_distinct(where, labels)
    return labels


def _label(value: Any, key: str, where: str) -> str:
    if key == "keep":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InputError(f'{where} = {value!r}: write an integer, or an exact fraction such as "1/2"')
        try:
            Retention.parse(value)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return str(value).replace(" ", "")
    name = name_of_codec(value) if isinstance(value, str | dict) else None
    if not name:
        raise InputError(f'{where} = {value!r}: write a codec\'s name, or {{ name = "int4", group = 64 }}')
    return name


_EXAMPLES: Final = {"keep": '["1/8", "1/4", "1/2"]', "codec": '["int8", "int4"]'}


def of_each_temperature(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a study file's content, which need not be valid, once for each of its temperatures.

    The study NAME at temperature 0.7 is called ``NAME-t0.7``. Temperature 0 takes the most probable token, so its study
    gets no keys that truncate the distribution.
    """
    section = content.get("study")
    listed = section.get("temperature") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(listed, list):
        return [content]
    if not listed:
        raise InputError("study.temperature = []: has no temperature; write one, or several as in [0.0, 0.7, 1.0]")
    if len(listed) > MOST_LISTED:
        raise InputError(
            f"study.temperature: {len(listed):,} temperatures, each of which is a study; write at most {MOST_LISTED}"
        )
    check_distinct("study.temperature", listed)
    return [content | {"study": _section_of(section, temperature)} for temperature in listed]


def _section_of(section: dict[str, Any], temperature: Any) -> dict[str, Any]:
    """Return section ``[study]`` for one temperature; the schema refuses a temperature that is no number."""
    changed = section | {"temperature": temperature}
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        return changed
    if not temperature:
        changed = {key: value for key, value in changed.items() if key not in _TRUNCATING}
    name = section.get("name")
    return changed | {"name": name_at_temperature(name, temperature)} if isinstance(name, str) else changed


def name_at_temperature(study: str, temperature: float) -> str:
    """Return a study's name at one of several temperatures: NAME-t and the temperature in its shortest form."""
    number = repr(float(temperature)).removesuffix(".0").replace("+", "")
    return f"{study}-t{number}"


def name_of_all(study: str) -> str | None:
    """Return ``NAME`` for a study's name such as ``NAME-t0.7``; None if the name does not end in a temperature."""
    match = _ONE_OF_SEVERAL.fullmatch(study)
    return match and match[1]


_READ_PATHS = ("path", "exclude")  # of [[documents]]


def load_studies(path: Path, folder: Path | None = None) -> list[Study]:
    """Read and validate a study file; return one study for each model and temperature, model by model.

    Paths in the file are relative to ``folder``, in which its modules are found too; by default the file's own folder.

    Raises:
        InputError: The file cannot be read or is not valid; the line names the file, the field and, for an unknown
            key, the nearest known one.
    """
    content, folder = read_content(path), (path.parent if folder is None else folder).absolute()
    with reading(f"{path}: cannot be read as a study file"):
        return _studies_of(path, content, folder)


def _studies_of(path: Path, content: dict[str, Any], folder: Path) -> list[Study]:
    try:
        content = _with_baseline(of_each_member(_with_absolute_paths(content, folder)))
        models = content.get("model")
        several = models if isinstance(models, list) and models else [models]
        contents = of_each_temperature(content)
        _check_count(len(several) * len(contents))
        studies = [
            Study.model_validate(content_of_one if model is None else content_of_one | {"model": model})
            for model in several
            for content_of_one in contents
        ]
        check_distinct("models", [study.model.id for study in studies[:: len(contents)]])
        for study in studies:
            study.of_file(folder, content["study"]["name"], several_models=len(several) > 1)
            if study.model.tables is not None:
                _from_folder(folder, study.model.tables, "model.tables")  # settings have it as it is written
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {explained(error.errors(), Study)}") from None
    return studies


def _with_baseline(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with a study's only action as its baseline; a study with several actions must name one."""
    plan, actions = content.get("plan"), content.get("actions")
    if not isinstance(plan, dict) or not isinstance(actions, list) or "baseline" in plan:
        return content
    names = [action["name"] for action in actions if isinstance(action, dict) and isinstance(action.get("name"), str)]
    if len(actions) == len(names) == 1:
        return content | {"plan": plan | {"baseline": names[0]}}
    unknown = set(plan).difference(PlanSection.model_fields)
    raise InputError(missing(PlanSection, "plan", "baseline", unknown, *names[:1]))


def _check_count(studies: int) -> None:
    if studies > MOST_LISTED:
        raise InputError(f"model: {studies:,} studies, one for each model and temperature; write at most {MOST_LISTED}")


def read_content(path: Path) -> dict[str, Any]:
    """Return the content of a study file as written, without validation."""
    check_regular(path)
    if not path.exists():
        raise InputError(f"{path}: no such study file")
    with reading(f"{path}: not valid TOML"):
        return tomllib.loads(path.read_text(encoding="utf-8"))


def _with_absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content with absolute paths in its sections of documents; the schema refuses malformed sections."""
    documents = content.get("documents")
    if not isinstance(documents, list):
        return content
    made = []
    for number, part in enumerate(documents):
        names = [name for name in _READ_PATHS if isinstance(part, dict) and isinstance(part.get(name), str)]
        paths = {name: _from_folder(folder, part[name], f"documents[{number}].{name}") for name in names}
        made.append(part | paths if names else part)
    return content | {"documents": made}


def _from_folder(folder: Path, written: str, where: str) -> str:
    """Return, as an absolute path, a path that a study file names; refuse one that only the working folder has."""
    path = expanded(written)
    beside = folder / path
    if not beside.exists() and path.exists():
        raise InputError(
            f"{where} = '{written}': paths begin at the study file's folder, {folder}; write "
            f"'{os.path.relpath(path.absolute(), folder)}'"
        )
    return straight(beside)


def expanded(written: str) -> Path:
    """Return a path with ``~`` replaced by the home folder; unchanged if there is no such user."""
    try:
        return Path(written).expanduser()
    except RuntimeError:
        return Path(written)


def toml(value: Any) -> str:
    """Write a value as TOML: texts, numbers, lists and truth values as JSON has them, and a table on one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {toml(item)}' for key, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_table(heading: str, values: dict[str, Any]) -> str:
    """Write a table's heading and its keys, a line each; keys without a value are left out."""
    lines = [f"{_key(name)} = {toml(value)}" for name, value in values.items() if value is not None]
    return "\n".join([heading, *lines]) + "\n"


def _key(key: str) -> str:
    return key if key.isidentifier() else json.dumps(key)

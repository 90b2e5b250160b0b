"""``kvdrift list``: list names that a study file or a query can use, the keys of study files, or shipped studies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift import completion
from kvdrift.options import JsonOption
from kvdrift.schema.errors import InputError, nearest

if TYPE_CHECKING:
    from kvdrift.generator.selectors.custom.parts import PartKind


def list_(
    what: Annotated[
        str, typer.Argument(metavar="|".join(completion.LISTED), help="What to list.", autocompletion=completion.kinds)
    ],
    as_json: JsonOption = False,
) -> None:
    """List the names that a study file or a query can use, all keys of a study file, or the shipped studies.

    Examples:
        kvdrift list selectors
        kvdrift list policies
        kvdrift list views
        kvdrift list keys
    """
    listers = {
        "selectors": _selectors, "codecs": _codecs, "policies": _policies, "tasks": _tasks, "views": _views,
        "models": _models, "presses": _presses, "quantities": _quantities, "keys": _keys, "examples": _examples,
    }  # fmt: skip
    if what not in listers:
        raise InputError(f"list {what}: {nearest(what, listers)}")
    rows = listers[what]()
    if as_json:
        typer.echo(json.dumps({what: [{"name": name, "meaning": text} for name, text in rows]}, ensure_ascii=False))
        return
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")


def _selectors() -> list[tuple[str, str]]:
    from kvdrift.generator.selectors import SELECTOR_KIND
    from kvdrift.generator.selectors.kvpress import PREFIX, PRESSES, KVPress

    rows = _of_kind(SELECTOR_KIND)
    return [*rows, (f"{PREFIX}NAME", f"{KVPress.summary}, with its options: {', '.join(PRESSES)}")]


def _codecs() -> list[tuple[str, str]]:
    from kvdrift.generator.actions import CODEC_KIND

    return _of_kind(CODEC_KIND)


def _policies() -> list[tuple[str, str]]:
    from kvdrift.generator.selectors.policies import POLICY_KIND

    return _of_kind(POLICY_KIND)


def _of_kind(part: PartKind[Any]) -> list[tuple[str, str]]:
    """List a kind's classes in the package and in entry points, and the form in which a study names a user's class."""
    rows = [(name, _described(kind)) for name, kind in part.known.items()]
    for name in part.entry_points:
        try:
            _, source = part.entry_point(name)
            if name in part.known:
                text = f"not usable: kvdrift has a {part.noun} of this name; rename the entry point of {source}"
            else:
                text = f"{_described(part.find(name)[0])}; of {source}"
        except InputError as error:
            text = f"not usable: {error}"
        rows.append((name, text))
    return [*rows, ("MODULE:CLASS", "a custom class, in a module beside the study file or in an installed module")]


def _described(kind: type[Any]) -> str:
    from kvdrift.generator.selectors.custom.parts import default_parameters

    parameters = [f"{key} = {value}" for key, value in default_parameters(kind).items()]
    return "; ".join([kind.summary, *parameters, *([kind.paper] if kind.paper else [])])


def _tasks() -> list[tuple[str, str]]:
    from kvdrift.generator.documents.registry import SOURCES
    from kvdrift.schema.study import FINITE_STATE

    rows = []
    for name, source in SOURCES.items():
        rows.append((name, source.summary))
        rows += [
            (f"{name}: {task}", "made by kvdrift from the study's seed" if task in source.generated else "from files")
            for task in source.tasks
        ]
    rows.append((FINITE_STATE, "the systems of a finite-state model, each system a document; no tasks, no length"))
    return rows


def _views() -> list[tuple[str, str]]:
    from kvdrift.sql.catalog import describe_views

    return [(view.view, f"{view.description} ({', '.join(view.columns)})") for view in describe_views()]


def _models() -> list[tuple[str, str]]:
    from kvdrift.generator.transformer.files.local_folders import (
        ARCHITECTURES,
        EMBEDDED_ID,
        cached_models,
        has_local_weights,
    )
    from kvdrift.generator.transformer.model_checks import results
    from kvdrift.schema.study import FINITE_STATE

    rows = [
        (EMBEDDED_ID, "the embedded model: retrieves records from prompts of the embedded source, no download"),
        (
            "a local folder",
            f"config.json and weights: {', '.join(ARCHITECTURES)} with full attention are known by family",
        ),
        ("a Hugging Face id", "the same families; other causal models of transformers are proven when they are loaded"),
    ]
    proofs = results()
    for name, problem in proofs.items():
        rows.append(
            (name, f"{'proven' if problem is None else 'refused'} on this machine{f': {problem}' if problem else ''}")
        )
    for name, architecture in cached_models().items():
        if name not in proofs:
            missing = "" if has_local_weights(name) else ", without its weights"
            known = "" if architecture in ARCHITECTURES else ", not proven yet"
            rows.append((name, f"in the Hugging Face cache: {architecture}{missing}{known}"))
    families = 'family = "mixture" with an alphabet, or tables = FILE'
    return [
        *rows,
        (f'kind = "{FINITE_STATE}"', f"systems whose next-token distributions are known for every history: {families}"),
    ]


def _presses() -> list[tuple[str, str]]:
    from kvdrift.generator.engines.transformers.presses import fast, listed
    from kvdrift.schema.study import TRANSFORMERS

    here = f'runs with engine = "{TRANSFORMERS}"'
    return [(name, f"cannot run: it {reason}" if reason else f"{here}{fast(name)}") for name, reason in listed()]


def _quantities() -> list[tuple[str, str]]:
    from kvdrift.stats.endpoints import decidable_quantities
    from kvdrift.stats.quantities import PAIR_QUANTITIES

    decidable = decidable_quantities()
    return [
        (
            quantity.name,
            f"{quantity.meaning} ({quantity.scale.sign}"
            + (f", one for each {quantity.axis}" if quantity.axis else "")
            + (f"; gate: higher is {quantity.higher.value})" if quantity.name in decidable else ")"),
        )
        for quantity in PAIR_QUANTITIES.values()
    ]


def _keys() -> list[tuple[str, str]]:
    from kvdrift.schema.study.reading import toml
    from kvdrift.study_files.commented import headings, kind

    rows = []
    for heading in headings().values():
        for name, key in heading.keys.items():
            values = f"{kind(key)} in {key['unit']}" if "unit" in key else kind(key)
            default = "" if key.get("default") is None else f"; by default {toml(key['default'])}"
            rows.append((f"{heading.title} {name}", f"{key['description'].removesuffix('.')} ({values}{default})"))
    return rows


def _examples() -> list[tuple[str, str]]:
    from kvdrift.study_files.examples import examples

    return [*examples().items()]

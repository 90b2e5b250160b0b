"""``kvdrift list``: what can be named in a study file or a query."""

from __future__ import annotations

from dataclasses import fields

from schema.errors import InputError, nearest


def listing(what: str) -> str:
    """A line per selector, task, view or model kind; InputError for anything else."""
    listers = {"selectors": _selectors, "tasks": _tasks, "views": _views, "models": _models}
    if what not in listers:
        raise InputError(f"list {what}: {nearest(what, listers)}")
    rows = listers[what]()
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _selectors() -> list[tuple[str, str]]:
    from generator.selectors import SELECTORS

    return [
        (name, selector.summary + "".join(f"; {f.name} = {f.default}" for f in fields(selector)))  # type: ignore[arg-type]
        for name, selector in SELECTORS.items()
    ]


def _tasks() -> list[tuple[str, str]]:
    from generator.sources import SOURCES

    rows = []
    for name, source in SOURCES.items():
        rows.append((name, source.summary))
        rows += [
            (f"{name}: {task}", "made here, from a seed" if source.makes(task) else "from files")
            for task in source.tasks
        ]
    return rows


def _views() -> list[tuple[str, str]]:
    from sql.catalog import describe_views

    return [(view.view, f"{view.description} ({', '.join(view.columns)})") for view in describe_views()]


def _models() -> list[tuple[str, str]]:
    from generator.models import ARCHITECTURES, EMBEDDED_ID

    return [
        (EMBEDDED_ID, "the embedded model: retrieves records from prompts of the embedded source, no download"),
        ("a local folder", f"config.json and weights of {', '.join(ARCHITECTURES)}"),
        ("a Hugging Face id", "the same architectures, as transformers finds them"),
    ]

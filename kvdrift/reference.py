"""The page ``docs/commands.md``, written from the commands themselves by ``make docs``."""

from __future__ import annotations

import typer.main

from kvdrift.command import app

_WIDTH = 100


def reference() -> str:
    """Return the help of every command as a Markdown page."""
    group = typer.main.get_command(app)
    lines = ["# Commands", "", "Written by `make docs` from the commands' own help.", ""]
    with group.make_context("kvdrift", [], resilient_parsing=True) as context:
        commands = {name: group.get_command(context, name) for name in group.list_commands(context)}  # type: ignore[attr-defined]
        for name, command in commands.items():
            with command.make_context(
                name, [], parent=context, resilient_parsing=True, max_content_width=_WIDTH, terminal_width=_WIDTH
            ) as help_context:
                text = "\n".join(line.rstrip() for line in command.get_help(help_context).strip().splitlines())
            lines += [f"## {name}", "", "```text", text, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - it writes a page

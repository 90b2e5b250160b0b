"""Exit codes of the command when it fails."""

from __future__ import annotations

INTERRUPTED = 130  # the shell's code for a program that SIGINT ended


def failure_code(arguments: list[str]) -> int:
    """Return the exit code of a failure: 1, or 4 for ``gate``, whose 1 means "worse"."""
    return 4 if arguments[:1] == ["gate"] else 1

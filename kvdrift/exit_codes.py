"""Exit codes of the command when it fails."""

from __future__ import annotations

INTERRUPTED = 130  # the shell's code for a program that SIGINT ended
_FAILURE = 1
_NO_ANSWER = 4  # a failure of ``kvdrift gate``, whose code 1 is an answer


def failure_code(arguments: list[str]) -> int:
    """Return the exit code of a failure: 1, or 4 for ``gate``, whose 1 means "worse"."""
    return _NO_ANSWER if arguments[:1] == ["gate"] else _FAILURE

"""How the command ends where it fails."""

from __future__ import annotations

INTERRUPTED = 130  # as of a program that SIGINT ended
_FAILURE = 1
_NO_ANSWER = 4  # a failure of ``kvdrift gate``, where 1 is an answer


def failure_code(arguments: list[str]) -> int:
    """Return the exit code of a failure: 1, but of ``gate`` 4, since a failure is not the answer "worse"."""
    return _NO_ANSWER if arguments[:1] == ["gate"] else _FAILURE

"""Admit callers of the service, and make their errors: every failed call is one logged line and one Flight error.

A call costs memory before anybody can check it: gRPC receives its message, which Arrow allows to be of any length,
before it calls the gate, and pyarrow passes on none of gRPC's limits. So a service with TLS recognizes its callers in
the handshake (``token_certificate``), and the gate refuses others before Flight copies their message.
"""

from __future__ import annotations

import hmac
import logging
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyarrow import flight

from kvdrift.generator.service.protocol import LENGTH_HEADER, ErrorKind, ErrorMessage
from kvdrift.schema.errors import InputError, KvdriftError

log = logging.getLogger("kvdrift.serve")

MOST_CALLS = 64
"""The most calls at once, including calls that wait for the model."""

_FOLDERS_OF_A_PATH = re.compile(r"(?<![\w/.…])/(?!/)(?:[^\s/'\",;()]+/)+")
_SERVED = ("DO_GET", "DO_ACTION", "LIST_ACTIONS", "LIST_FLIGHTS")


class _Admission(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow is untyped
    """A call under way, which is counted until its end."""

    def __init__(self, free: threading.Semaphore) -> None:
        self._free = free

    def call_completed(self, _exception: Exception | None) -> None:
        self._free.release()


class Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks every call and its ``authorization`` header before its handler runs.

    Callers must send the token as ``authorization: Bearer TOKEN``; None admits everyone. A caller may announce a ticket
    of at most ``max_request_bytes``.
    """

    def __init__(self, token: str | None, max_request_bytes: int) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_request_bytes = max_request_bytes
        self._free = threading.BoundedSemaphore(MOST_CALLS)

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> _Admission:
        """Refuse a call of another method, with a wrong token or an overlong ticket, or beyond ``MOST_CALLS``."""
        method = info.method.name
        if method not in _SERVED:
            raise refusal("not part of this service", method.lower(), "a caller")
        if (reason := self._reason(headers.get("authorization", ()))) is not None:
            raise refusal(reason, method.lower(), "a caller", flight.FlightUnauthenticatedError)
        announced = headers.get(LENGTH_HEADER, ("0",))[0][:18]
        if announced.isdecimal() and (line := too_long(int(announced), self._max_request_bytes)) is not None:
            raise refusal(line, method.lower(), "a caller")
        if not self._free.acquire(blocking=False):
            raise unavailability(f"{MOST_CALLS} calls are under way")
        return _Admission(self._free)

    def _reason(self, given: Sequence[str]) -> str | None:
        """Return why a call with these headers is refused; None if it is admitted."""
        if self._expected is None:
            return None
        if not given:
            return "a token is required: kvdrift run --token-file FILE"
        return None if hmac.compare_digest(given[0].encode(), self._expected) else "the token is wrong"


def answered(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler so that its errors become Flight errors, which name the caller's address in the log."""

    @wraps(handler)
    def call(self: Any, context: flight.ServerCallContext, *arguments: Any) -> Any:
        method, peer = handler.__name__, unquote(context.peer())
        try:
            return handler(self, context, *arguments)
        except InputError as error:
            raise refusal(str(error), method, peer) from None
        except Exception as error:  # noqa: BLE001 - a service outlives any error of a request
            raise failure(error, method, peer) from None

    return call


def too_long(length: int, most: int) -> str | None:
    """Return why a ticket of ``length`` bytes is refused; None if it is short enough."""
    return f"the request has {length} bytes, more than {most}" if length > most else None


def refusal(
    line: str, method: str, peer: str, kind: Callable[..., flight.FlightError] = flight.FlightServerError
) -> flight.FlightError:
    """Log a caller's mistake and return its Flight error."""
    log.warning("refused %s from %s: %s", method, peer, _one_line(line))
    return _flight_error(kind, ErrorKind.REFUSED, line)


def failure(error: Exception, method: str, peer: str) -> flight.FlightError:
    """Log work that failed in the service and return its Flight error."""
    line = str(error) if isinstance(error, KvdriftError) else f"{type(error).__name__}: {error}"
    log.error("failed %s from %s: %s", method, peer, _one_line(line))
    return _flight_error(flight.FlightServerError, ErrorKind.FAILED, line)


def unavailability(line: str) -> flight.FlightError:
    """Return the Flight error of a service that cannot take a request now."""
    return _flight_error(flight.FlightUnavailableError, ErrorKind.UNAVAILABLE, line)


def _flight_error(flight_kind: Callable[..., flight.FlightError], kind: ErrorKind, line: str) -> flight.FlightError:
    line = _one_line(_without_folders(line))
    return flight_kind(line, extra_info=ErrorMessage(kind=kind, line=line).encoded())


def _without_folders(line: str) -> str:
    """Return a line without the folders of paths, for callers; the log keeps the whole paths."""
    known = {*sys.path, sys.prefix, str(Path.home()), str(Path.cwd()), tempfile.gettempdir()} - {"", "/"}
    for folder in sorted(known, key=len, reverse=True):  # those with spaces in their names, too
        line = line.replace(f"{folder.rstrip('/')}/", "…/")
    return _FOLDERS_OF_A_PATH.sub("…/", line)


def _one_line(text: str) -> str:
    """Return a caller's text as one short line without control characters, safe for the log."""
    line = re.sub(r"[^\x20-\x7e\u00a1-\ud7ff\ue000-\uffff]+", " ", text)
    return line if len(line) <= 300 else line[:299] + "…"

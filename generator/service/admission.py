"""Who may call the service, and the errors that callers get: every failed call is one logged line and one Flight error.

Flight looks at a call in two places. The gate sees its headers before its handler runs; the handler knows the caller's
address. So the gate notes what is wrong with a call, and ``admitted`` raises it in the handler.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any
from urllib.parse import unquote

from pyarrow import flight

from generator.service.protocol import ErrorKind, ErrorMessage
from schema.errors import InputError, KvdriftError

log = logging.getLogger("kvdrift.serve")

GATE = "gate"
"""Name of the gate among the server's middleware."""

_SERVED = ("DO_GET", "DO_ACTION", "LIST_ACTIONS", "LIST_FLIGHTS")


class _Admission(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow is untyped
    """Why the gate does not admit a call, or None."""

    def __init__(self, reason: str | None) -> None:
        self.reason = reason


class Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Looks at every call and at its ``authorization`` header.

    Args:
        token: What callers must present as ``authorization: Bearer TOKEN``; None admits everyone.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> _Admission:
        """Refuse a call of another method before its caller can hold it open; note a wrong token for the handler."""
        if info.method.name not in _SERVED:
            raise refusal("not part of this service", info.method.name.lower(), "a caller")
        if self._expected is None:
            return _Admission(None)
        given = [value.encode() for value in headers.get("authorization", ())]
        if not given:
            return _Admission("a token is required: kvdrift run --token-file FILE")
        return _Admission(None if hmac.compare_digest(given[0], self._expected) else "the token is wrong")


def admitted(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler so that only admitted callers reach it and its errors become Flight errors."""

    @wraps(handler)
    def call(self: Any, context: flight.ServerCallContext, *arguments: Any) -> Any:
        method, peer = handler.__name__, unquote(context.peer())
        if (reason := context.get_middleware(GATE).reason) is not None:
            raise refusal(reason, method, peer, flight.FlightUnauthenticatedError)
        try:
            return handler(self, context, *arguments)
        except InputError as error:
            raise refusal(str(error), method, peer) from None
        except Exception as error:  # noqa: BLE001 - a service outlives any error of a request
            raise failure(error, method, peer) from None

    return call


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
    line = _one_line(line)
    return flight_kind(line, extra_info=ErrorMessage(kind=kind, line=line).encoded())


def _one_line(text: str) -> str:
    """Return text of a caller as one short line without control characters, which cannot forge a line of the log."""
    line = re.sub(r"[^\x20-\x7e\u00a1-\ud7ff\ue000-\uffff]+", " ", text)
    return line if len(line) <= 300 else line[:299] + "…"

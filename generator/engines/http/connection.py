"""Send requests to one server, with time-outs, waits for a lost server, and a limit on concurrent requests.

This module does not know what requests mean. After a lost server is back, its report of itself is compared with the
earlier report, since another server may have taken its place.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import httpx

from kvdrift.generator.engines.engine import settings_of
from kvdrift.schema.errors import InputError, OperationError, nearest

LLAMA_SERVER: Final = "llama-server"
VLLM: Final = "vllm"
SGLANG: Final = "sglang"
OPENAI: Final = "openai"
APIS: Final = (LLAMA_SERVER, VLLM, SGLANG, OPENAI)

_MOST_VOCABULARY, _MOST_SECONDS = 1 << 22, 86_400


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one side's server."""

    api: str = LLAMA_SERVER  # the server's interface, one of ``APIS``. "openai" gives tokens at temperature 0 only
    started: str = ""  # how the server was started, in the user's words, since no server reports all of it
    vocabulary: int = 0  # V, the number of tokens; 0 if the server or its processor reports it
    ahead: int = 32  # with "openai", the number of tokens that the server writes in a request
    processor: bool = False  # with "vllm", whether the server has ``kvdrift.vllm:Distributions``

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> ServerSettings:
        """Return the settings, with the values that a study file gives."""
        bounds = {"vocabulary": (0, _MOST_VOCABULARY), "ahead": (1, 1 << 16)}
        made = settings_of(cls, settings, where, "servers", bounds)
        if made.api not in APIS:
            raise InputError(f"{where}: api = '{made.api}': {nearest(made.api, APIS)}")
        if not made.vocabulary and made.api != LLAMA_SERVER and not made.processor:
            raise InputError(
                f"{where}: vocabulary: missing; {made.api} does not report its number of tokens: write the "
                "vocab_size of the model's config.json"
            )
        if made.processor and made.api != VLLM:
            raise InputError(f"{where}: processor = true: kvdrift's processor belongs to api = '{VLLM}'")
        return made

    @property
    def requested(self) -> dict[str, Any]:
        """The server's interface, and the settings that differ from their defaults, by name."""
        return {name: value for name, value in asdict(self).items() if name == "api" or value != _DEFAULTS[name]}


_DEFAULTS: Final = asdict(ServerSettings())


@dataclass(frozen=True)
class Requests:
    """Limits on requests to servers; they do not change the answers."""

    at_once: int = 0  # the most requests of a server at once; 0 for the number of llama-server's slots, else 8
    timeout: int = 300  # seconds to wait for an answer
    patience: int = 600  # seconds to wait for a server that is gone or still loads its model

    @classmethod
    def of(cls, requests: Mapping[str, Any]) -> Requests:
        """Return the limits, with the values that a study file gives under ``model.requests``."""
        bounds = {"at_once": (0, 4096), "timeout": (1, _MOST_SECONDS), "patience": (0, _MOST_SECONDS)}
        return settings_of(cls, requests, "model.requests", "servers", bounds)


KEY: Final = "KVDRIFT_SERVER_KEY"
"""The environment variable with the key that servers may require; the key is stored nowhere."""

_BUSY: Final = (429, 502, 503, 504)  # answers of a server that loads its model, or of a proxy before it
_CONNECT, _PAUSE, _LONGEST_PAUSE = 10.0, 0.1, 2.0  # seconds
_ALIVE = 5.0  # seconds between requests for a server's health, while an answer of the server is awaited
_HERE: Final = ("127.0.0.1", "localhost", "::1")
_WORDS = 300  # characters quoted of a server's refusal
_DEFAULT_AT_ONCE = 8

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class LostServerError(Exception):
    """A server was gone, and is back; its caches of streams are lost."""


class Connection:
    """Requests to the server at an address, within limits; the path ``health`` answers once the server is ready.

    ``on_return`` is called when the server is back; it raises an error if another server is there. ``received`` counts
    the bytes of all answers so far.
    """

    def __init__(self, url: str, requests: Requests, health: str) -> None:
        self.url, self._requests, self._health = url.rstrip("/"), requests, health
        self.timeout = requests.timeout
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f'url = "{url}": write an address such as "http://127.0.0.1:8080"')
        key = os.environ.get(KEY)
        try:
            here = httpx.URL(self.url).host in _HERE
            self._client = httpx.Client(
                base_url=self.url,
                timeout=httpx.Timeout(requests.timeout, connect=_CONNECT),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                limits=httpx.Limits(max_connections=None),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise InputError(f'url = "{url}": {error}') from None
        if key and self.url.startswith("http://") and not here:
            raise InputError(f"{self.url}: {KEY} would cross a network unencrypted; write an address with https://")
        weakref.finalize(self, self._client.close)
        self.on_return: Callable[[], None] = lambda: None
        self._returning = threading.RLock()  # the check of a server that is back makes requests, too
        self.received = 0
        self._known = False  # whether the server has answered at all
        self._losses = 0
        self._failing: dict[str, float] = {}  # of each path that is not answered: since when it is not

    def ask(self, path: str, body: Any = None) -> Any:
        """Send a request and return the answer's JSON; repeat it if the server is gone and comes back.

        The path is relative to the server's address. A body is posted as JSON; without one the request is a GET.
        """
        return self.patiently(lambda: self.ask_once(path, body))

    def ask_once(self, path: str, body: Any = None, *, waits: bool = False) -> Any:
        """Send a request as ``ask`` does, but once; with ``waits`` the answer may take as long as the server is alive.

        Raises:
            LostServerError: The server was gone, and is back.
            InputError: No server has answered yet, or the server refuses the request.
            OperationError: The server fails, stays away, or answers without JSON.
        """
        losses = self._losses
        answer = self._answered(path, body, waits=waits)
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            self.check_alive(losses)  # a server whose engine has died answers 500, and ends
            raise OperationError(f"{self.url}{path}: answered {answer.status_code}: {answer.text[:_WORDS]}")
        if answer.is_error:
            raise InputError(f"{self.url}{path}: refused with {answer.status_code}: {answer.text[:_WORDS]}")
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise OperationError(f"{self.url}{path}: the answer is no JSON: {answer.text[:80]!r}") from None

    def optional(self, path: str, body: Any = None) -> httpx.Response:
        """Return the answer of a path that not every server has; it may be an error."""
        return self.patiently(lambda: self._answered(path, body))

    def optional_object(self, path: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON object of a path that not every server has; {} if the answer is an error or no object."""
        answer = self.optional(path, body)
        try:
            content = {} if answer.is_error else answer.json()
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def check_alive(self, losses: int | None = None) -> None:
        """Wait for a server that is gone; ``losses`` is how often it had been when a request was sent.

        Raises:
            LostServerError: The server was gone, and is back.
            OperationError: The server stays away.
        """
        losses = self._losses if losses is None else losses
        if why := self._gone():
            self._wait(losses, why)
            raise LostServerError

    @staticmethod
    def patiently(request: Callable[[], _Found]) -> _Found:
        """Make a request and return its result; if the server is lost meanwhile, repeat the request once it is back."""
        while True:
            with suppress(LostServerError):
                return request()

    def at_once(self, items: Sequence[_Item], function: Callable[[_Item], _Found], most: int = 0) -> list[_Found]:
        """Apply ``function``, which makes requests, to all items concurrently; return the results in the items' order.

        ``most`` is the number of items that the server can work on at once; 0 if unknown.
        """
        threads = min(self._requests.at_once or most or _DEFAULT_AT_ONCE, len(items))
        if threads <= 1:
            return [function(item) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, items))

    def _answered(self, path: str, body: Any, *, waits: bool = False) -> httpx.Response:
        losses = self._losses
        try:
            answer = self._awaited(path, body, None if waits else self.timeout)
        except httpx.TransportError as error:
            if not self._known:
                raise InputError(f"{self.url}: no server answers there: {_words(error)}") from None
            self._check_failing(path, _words(error))
            self._wait(losses, _words(error))
            self._failing.setdefault(path, time.monotonic())
            raise LostServerError from None
        if answer.status_code in _BUSY:
            self._wait(losses, f"it answered {answer.status_code}")
            raise LostServerError
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise InputError(
                f"{self.url}{path}: refused with {answer.status_code}; set the environment variable {KEY} to the "
                "server's key"
            )
        self._known = True
        self._failing.pop(path, None)
        self.received += len(answer.content)
        return answer

    def _check_failing(self, path: str, why: str) -> None:
        """Raise an error if a server that is ready has answered no request for too long."""
        if time.monotonic() - self._failing.get(path, math.inf) > self._requests.patience:
            raise OperationError(
                f"{self.url}{path}: for {self._requests.patience} s, no request has been answered within "
                f"{self._requests.timeout} s ({why}), though the server is ready; its log may state the reason; write "
                "a longer timeout under model.requests, or fewer requests at_once"
            )

    def _awaited(self, path: str, body: Any, seconds: float | None) -> httpx.Response:
        """Return the answer to a request, unless the server dies: one that is shut down may keep the connection."""
        answers = queue.SimpleQueue[httpx.Response | httpx.TransportError]()

        def send() -> None:
            try:
                limits = httpx.Timeout(seconds, connect=_CONNECT)
                answers.put(self._client.request("GET" if body is None else "POST", path, json=body, timeout=limits))
            except httpx.TransportError as error:
                answers.put(error)

        threading.Thread(target=send, daemon=True).start()
        while True:
            try:
                answer = answers.get(timeout=_ALIVE)
            except queue.Empty:
                if self._known and (why := self._gone()):
                    raise httpx.ReadError(why) from None
                continue
            if isinstance(answer, httpx.TransportError):
                raise answer
            return answer

    def _gone(self) -> str:
        """Return the reason why a server counts as gone; "" if the server is alive, even if it is busy."""
        try:
            answer = self._client.get(self._health, timeout=_CONNECT)
        except httpx.ReadTimeout:
            return ""
        except httpx.TransportError as error:
            return _words(error)
        return f"its {self._health} answered {answer.status_code}" if answer.is_server_error else ""

    def _wait(self, losses: int, why: str) -> None:
        """Wait until the server is ready, and call ``on_return``; one thread does both for all that lost the server.

        ``losses`` is the number of earlier losses when the request was sent; ``why`` says in errors how that failed.
        """
        with self._returning:
            if self._losses != losses:
                return  # another thread has waited
            end, pause = time.monotonic() + self._requests.patience, _PAUSE
            while not self._ready():
                if time.monotonic() > end:
                    raise OperationError(
                        f"{self.url}: the server has been gone for {self._requests.patience} s ({why}); start it "
                        "again, and run the same command: it goes on"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._known = True
            self.on_return()
            self._losses += 1

    def _ready(self) -> bool:
        try:
            return self._client.get(self._health).is_success
        except httpx.TransportError:
            return False


def _words(error: httpx.TransportError) -> str:
    return " ".join(str(error).split()) or type(error).__name__

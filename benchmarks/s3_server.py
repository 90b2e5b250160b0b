"""An S3 server for writes: moto's, in a process of its own, with errors and delays on demand.

The server runs as ``python -m benchmarks.s3_server``, since delta-rs holds Python's lock while it waits for an answer.
It prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

BUCKET = "laboratory"
CONTROL = "/control"  # GET: the requests and the bytes sent so far; POST: the trouble to make from now on
ERRORS = {500: ("500 Internal Server Error", "InternalError"), 503: ("503 Slow Down", "SlowDown")}


class S3Server:
    """A bucket's URL, the options to reach it, and control over the answers."""

    def __init__(self, port: int) -> None:
        self._endpoint = f"http://127.0.0.1:{port}"
        self.url = f"s3://{BUCKET}"
        self.environment = {
            "AWS_ENDPOINT_URL": self._endpoint, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "something", "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def counts(self) -> Counter[str]:
        """The numbers of answered requests by method, of ``refused`` ones, and of puts ``there already``."""
        return self._told("counts")

    def sent(self) -> Counter[str]:
        """The bytes of each object that were sent, by the object's path, which begins with the bucket."""
        return self._told("sent")

    def _told(self, what: str) -> Counter[str]:
        with urlopen(self._endpoint + CONTROL) as answer:  # noqa: S310 - our own server
            return Counter(json.loads(answer.read())[what])

    def trouble(self, *, every: int = 0, at: int = 0, status: int = 503, seconds: float = 0.0) -> None:
        """From now on answer all requests late and some with an error; without arguments, stop doing so.

        Args:
            every: One of this many requests is answered with an error.
            at: The single request, counted from now on, that is answered with an error.
            status: The error's code, 500 or 503.
            seconds: The delay of all answers.
        """
        asked = json.dumps({"every": every, "at": at, "status": status, "seconds": seconds}).encode()
        with urlopen(Request(self._endpoint + CONTROL, data=asked)):  # noqa: S310 - our own server
            pass


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serve an empty bucket while the block runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.s3_server"],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            yield S3Server(int(process.stdout.readline()))
        finally:
            process.kill()


class Troubled:
    """An application whose answers are late, or errors, as requested.

    A trouble has these keys: ``every`` (one of this many requests is refused), ``at`` (the single request that is
    refused), ``status`` (the code of the answer) and ``seconds`` (the delay of each answer).

    Objects are put one at a time: moto checks whether an object exists before it writes, while S3 does both in one
    step.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._trouble = {"every": 0, "at": 0, "status": 503, "seconds": 0.0}
        self._requests = itertools.count(1)
        self._counts, self._sent = Counter[str](), Counter[str]()
        self._putting = threading.Lock()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request, by WSGI."""
        method = environment["REQUEST_METHOD"]
        if environment["PATH_INFO"] == CONTROL:
            if method == "POST":
                self._trouble = json.loads(environment["wsgi.input"].read(int(environment["CONTENT_LENGTH"])))
                self._requests = itertools.count(1)
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"counts": self._counts, "sent": self._sent}).encode()]
        time.sleep(self._trouble["seconds"])
        number, every = next(self._requests), self._trouble["every"]
        if number == self._trouble["at"] or (every and number % every == 0):
            self._counts["refused"] += 1
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            line, code = ERRORS[int(self._trouble["status"])]
            start(line, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>Try again.</Message></Error>".encode()]
        self._counts[method] += 1

        def answered(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if status.startswith("412"):
                self._counts["there already"] += 1
            if method == "GET":
                self._sent[environment["PATH_INFO"]] += int(dict(headers).get("Content-Length", 0))
            return start(status, headers, *more)

        with self._putting if method == "PUT" else nullcontext():
            return self._application(environment, answered)


def main() -> None:
    """Serve until the standard input ends."""
    from moto.server import DomainDispatcherApplication, create_backend_app  # type: ignore[attr-defined]  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415 - clients need neither
    from werkzeug.test import Client  # noqa: PLC0415

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, Troubled(application), threaded=True)
    Client(application).put(f"/{BUCKET}", base_url=f"http://127.0.0.1:{server.port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

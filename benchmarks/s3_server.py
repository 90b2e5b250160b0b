"""An S3 server for writes: moto's, in a process of its own, with errors and delays on demand.

It runs in a process of its own (``s3_program``), since delta-rs holds Python's lock while it waits for an answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

BUCKET = "laboratory"
CONTROL = "/control"  # GET: the requests so far by method; POST: the trouble to make from now on


def environment_of(endpoint: str) -> dict[str, str]:
    """Return the environment variables by which S3 clients reach an endpoint."""
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something", "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


class S3Server:
    """A bucket's URL, the options to reach it, and control over the answers."""

    def __init__(self, port: int) -> None:
        self._endpoint = f"http://127.0.0.1:{port}"
        self.url = f"s3://{BUCKET}"
        self.environment = environment_of(self._endpoint)

    def counts(self) -> Counter[str]:
        """The numbers of answered requests by method, of ``refused`` ones, and of puts ``there already``."""
        with urlopen(self._endpoint + CONTROL) as answer:  # noqa: S310 - our own server
            return Counter(json.loads(answer.read()))

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
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, Path(__file__).with_name("s3_program.py"), BUCKET, CONTROL],
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

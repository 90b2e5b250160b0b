"""What ``--cluster`` says."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Self

from schema.errors import InputError


@dataclass(frozen=True)
class ClusterAddress:
    """Where a cluster is.

    Attributes:
        text: The option's text.
        workers: How many workers are started on this machine; None where there is a scheduler already.

    """

    text: str
    workers: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address.

        Raises:
            InputError: It is none, or Dask is not installed.

        """
        local = re.fullmatch(r"local:([1-9][0-9]{0,2})", text)
        if local is None and not re.fullmatch(r"(tcp|tls)://[^\s/]+:[0-9]{1,5}", text):
            raise InputError(
                f"--cluster '{text}': write tcp://HOST:PORT of a Dask scheduler, or local:N for N workers here"
            )
        if importlib.util.find_spec("distributed") is None:
            raise InputError(f"--cluster {text}: needs Dask: pip install -e '.[distributed]' in kvdrift's folder")
        return cls(text, None if local is None else int(local[1]))

"""Let connections to servers on this machine bypass proxies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``NO_PROXY`` and ``no_proxy`` with the loopback addresses added to their values in ``environment``.

    A run's Prefect server, a served model and a llama-server are often on this machine. A proxy named by
    ``HTTP_PROXY`` or ``ALL_PROXY`` would look for these servers on the proxy's own machine.
    """
    named = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*filter(None, named.split(",")), *_LOOPBACK]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}

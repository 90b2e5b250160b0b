"""Decide which modules a request may let the service import, since importing a module runs its code.

Names of the package and entry points need no permission, since whoever installed the distribution chose them. Other
modules must be named on the service's command line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from generator.selectors.kvpress import PREFIX
from generator.selectors.own.names import load_installed
from generator.service.protocol import PendingMessage
from schema.errors import InputError

OPTION = "--allow-module"


def load_modules(names: Iterable[str]) -> frozenset[str]:
    """Import the modules of ``--allow-module``, so that errors show before the service begins."""
    allowed = frozenset(names)
    for name in sorted(allowed):
        where = f"{OPTION} '{name}'"
        if not all(part.isidentifier() for part in name.split(".")):
            raise InputError(f"{where}: is no module's name; write my_selectors for the module of my_selectors:MyClass")
        load_installed(name, where)
    return allowed


def check_modules(pending: Collection[PendingMessage], allowed: Collection[str]) -> None:
    """Refuse a request that names a module which is not allowed."""
    for number, item in enumerate(pending):
        parts = {
            "selector": item.action.selector, "codec": item.action.codec_name, "policy": item.action.policy_name,
        }  # fmt: skip
        for key, name in parts.items():
            module, colon, _ = (name or "").partition(":")
            if colon and module + colon != PREFIX and module not in allowed:
                raise InputError(
                    f"pending.{number}.action.{key}: the service may not import module '{module}'; who trusts the "
                    f"module starts the service with {OPTION} {module}"
                )

"""Say what a service serves: its model, and the modules that a request may let it import.

Importing a module runs its code. Names of the package and entry points need no permission, since whoever installed the
distribution chose them. Other modules must be named on the service's command line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvdrift.generator.codecs import CODECS
from kvdrift.generator.codecs.generated import GeneratedEntries
from kvdrift.generator.generation.events import versions_on
from kvdrift.generator.identity import NUMERICS_VERSION, source_of
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.custom.loading import load_module
from kvdrift.generator.selectors.kvpress import PREFIX
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.service.protocol import PROTOCOL, Identity, PendingMessage
from kvdrift.generator.transformer.model import LoadedModel
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import SCHEMA_VERSION

OPTION = "--allow-module"


def load_modules(names: Iterable[str]) -> frozenset[str]:
    """Import the modules of ``--allow-module``, so that errors show before the service begins."""
    allowed = frozenset(names)
    for name in sorted(allowed):
        where = f"{OPTION} '{name}'"
        if not all(part.isidentifier() for part in name.split(".")):
            raise InputError(f"{where}: is no module's name; write my_selectors for the module of my_selectors:MyClass")
        load_module(name, None, where)
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


def identity_of(model: LoadedModel, revision: str | None) -> Identity:
    """Return the identity of a model that was loaded at ``revision``.

    The source of every selector, codec and policy is read now, since a service continues with the loaded code even if
    the files change.
    """
    if model.files.weights_sha256 is None:
        raise InputError(f"model.id = '{model.id}': the files of its weights are not found again")
    for kind in (*SELECTORS.values(), *CODECS.values(), *POLICIES.values(), GeneratedEntries):
        source_of(kind)
    return Identity(
        protocol=PROTOCOL, schema_version=SCHEMA_VERSION, numerics=NUMERICS_VERSION, model=model.id,
        device=model.device, dtype=model.dtype, revision=revision, positions=model.positions,
        weights=model.files.weights_sha256, eos_tokens=list(model.eos_tokens),
        vocabulary=model.shape.vocabulary, versions=versions_on(model.device),
    )  # fmt: skip

"""The report of a service about the model that it serves."""

from __future__ import annotations

from generator.codecs import CODECS
from generator.codecs.generated import GeneratedEntries
from generator.generation.events import versions_on
from generator.identity import NUMERICS_VERSION, source_of
from generator.selectors import SELECTORS
from generator.selectors.policies import POLICIES
from generator.service.protocol import PROTOCOL, Identity
from generator.transformer.model import LoadedModel
from schema.errors import InputError
from schema.tables import SCHEMA_VERSION


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
        weights=model.files.weights_sha256, versions=versions_on(model.device),
    )  # fmt: skip

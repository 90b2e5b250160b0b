"""What the service and its clients say to each other: JSON in tickets and metadata, events as Arrow batches.

Nothing here knows of networks. Every message is checked whole, and an unknown field is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from generator.actions import build_action
from generator.generation import PendingUnit
from schema.document import Document
from schema.errors import InputError
from schema.study import CONTROL_ACTION, ActionSection, Study
from schema.tables import SCHEMA_VERSION

PROTOCOL = 1
IDENTITY = "identity"  # the one action of the service

HEARTBEAT_SECONDS = 1.0

State = Literal["waiting", "generating"]
"""How a request stands, as every batch of its answer says."""
WAITING: Final = "waiting"
GENERATING: Final = "generating"

ProblemKind = Literal["refused", "failed", "unavailable"]
"""Why it came to nothing: the caller's mistake, work that failed, or a service that cannot take it now."""
REFUSED: Final = "refused"
FAILED: Final = "failed"
UNAVAILABLE: Final = "unavailable"

MAX_EVENTS = 2**24
"""Replicates times positions of one request: about 1 GB of events."""

_INT32_END = 2**31

_Text = Annotated[str, Field(max_length=1000)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def encoded(self) -> bytes:
        """The message as JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """The message of ``encoded``; InputError, one line, for anything else."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise InputError(f"{where}: {problem['msg']}" if where else f"not a message: {problem['msg']}") from None


class Identity(_Message):
    """What an endpoint serves: everything but the request that decides events, and what units record of it."""

    protocol: int
    schema_version: int
    model: _Text  # the id as the study file gives it
    device: str
    dtype: str
    revision: str | None
    positions: int  # the most tokens, prompt and generated ones, that the model was made for
    weights: str  # fingerprint of configuration and parameters
    versions: dict[str, str]  # of the libraries that compute


class DocumentMessage(_Message):
    """A document without what only people read."""

    doc: _Text
    stratum: _Text
    cluster: _Text
    task: _Text
    source: _Text
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=_INT32_END)]], Field(min_length=1)]


class PendingMessage(_Message):
    """Replicates ``first .. first + count - 1`` of an action, as a study file gives it, or of the control."""

    action: ActionSection
    first: Annotated[int, Field(ge=0, lt=_INT32_END)]
    count: Annotated[int, Field(ge=1, lt=_INT32_END)]
    estimator: Literal["plain", "swrb"]


class GenerationRequest(_Message):
    """One document's pending units, and what decides their events."""

    protocol: int = PROTOCOL
    schema_version: int = SCHEMA_VERSION
    study: _Text
    model: _Text
    weights: str
    document: DocumentMessage
    pending: Annotated[list[PendingMessage], Field(min_length=1, max_length=1000)]
    horizon: Annotated[int, Field(ge=1, lt=_INT32_END)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]

    @classmethod
    def of(cls, study: Study, identity: Identity, document: Document, pending: Sequence[PendingUnit]) -> Self:
        """The request for units of a study's document, to the endpoint of this identity."""
        sections: dict[str, object] = {section.name: section.model_dump() for section in study.actions}
        sections[CONTROL_ACTION] = {"name": CONTROL_ACTION, "selector": "full", "keep": "all"}
        shown = ("doc", "stratum", "cluster", "task", "source")
        return cls.model_validate({
            "study": study.name,
            "model": identity.model,
            "weights": identity.weights,
            "document": {name: getattr(document, name) for name in shown} | {"tokens": list(document.tokens)},
            "pending": [
                {
                    "action": sections[item.action.name],
                    "first": item.first,
                    "count": item.count,
                    "estimator": item.estimator,
                }
                for item in pending
            ],
            "horizon": study.study.horizon,
            "seed": study.study.seed,
        })  # fmt: skip

    def check(self, identity: Identity, vocabulary: int) -> None:
        """InputError where the endpoint of this identity, with so many tokens, cannot or may not do what is asked."""
        for name in ("protocol", "schema_version", "model", "weights"):
            asked, served = getattr(self, name), getattr(identity, name)
            if asked != served:
                raise InputError(f"{name}: asked for {asked!r}, but {served!r} is served")
        if max(self.document.tokens) >= vocabulary:
            raise InputError(f"document.tokens: {max(self.document.tokens)} is not one of the {vocabulary} tokens")
        needed = len(self.document.tokens) + self.horizon
        if needed > identity.positions:
            raise InputError(
                f"document.tokens and horizon: {needed} tokens, the model has {identity.positions} positions"
            )
        for number, item in enumerate(self.pending):
            if item.first + item.count > _INT32_END:
                raise InputError(f"pending.{number}.first: {item.first} is too large")
        events = sum(item.count for item in self.pending) * self.horizon
        if events > MAX_EVENTS:
            raise InputError(f"pending: {events} replicates x positions, at most {MAX_EVENTS} in one request")

    def work(self) -> tuple[Document, list[PendingUnit]]:
        """The document and its pending units; InputError for an unknown selector or parameter."""
        shown = self.document.model_dump(exclude={"tokens"})
        pending = [
            PendingUnit(build_action(item.action), item.first, item.count, item.estimator) for item in self.pending
        ]
        return Document(tokens=tuple(self.document.tokens), **shown), pending

    def asked(self) -> list[dict[str, Any]]:
        """What the records of the units must say, one for each."""
        shared = {
            "study": self.study,
            "model": self.model,
            "doc": self.document.doc,
            "horizon": self.horizon,
            "seed": self.seed,
        }
        return [
            shared
            | {
                "action": item.action.name,
                "estimator": item.estimator,
                "first_replicate": item.first,
                "replicates": item.count,
            }
            for item in self.pending
        ]


class Problem(_Message):
    """What goes with an error; ``line`` is for people."""

    kind: ProblemKind
    line: str


class StreamMetadata(_Message):
    """What comes with a batch: how the request stands, and with the last batch of a unit the unit's record."""

    state: State
    unit: dict[str, Any] | None = None


def plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A unit's record in the types of JSON, which give every value back exactly."""
    plain: dict[str, Any] = json.loads(json.dumps(record, default=lambda value: value.item()))
    return plain

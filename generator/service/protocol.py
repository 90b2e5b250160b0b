"""The messages between the service and its clients: JSON in tickets and metadata, events as Arrow batches.

Every message is validated completely; an unknown field is an error.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvdrift.generator.identity import NUMERICS_VERSION, parts_sha256, written_tokens
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import Sampling, Temperature, TopK, TopP
from kvdrift.schema.study import CONTROL_ACTION, ActionSection, Study
from kvdrift.schema.tables import SCHEMA_VERSION

if TYPE_CHECKING:
    from kvdrift.generator.generation import PendingUnit  # which imports torch; a client needs none

PROTOCOL = 1
IDENTITY_ACTION = "identity"
"""Name of the service's only Flight action."""

HEARTBEAT_SECONDS = 1.0
MAX_EVENTS = 2**24
"""The most replicates times positions of one request: about 1 GB of events."""

_INT32_END = 2**31

_Text = Annotated[str, Field(max_length=1000)]


class ErrorKind(StrEnum):
    """The reason of a failed call: the caller's mistake, failed work, or a service that cannot take the call now."""

    REFUSED = "refused"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def encoded(self) -> bytes:
        """Return the message as JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """Read a message from JSON."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise InputError(f"{where}: {problem['msg']}" if where else f"invalid message: {problem['msg']}") from None


class Identity(_Message):
    """The report of an endpoint about itself."""

    protocol: int  # version of this protocol
    schema_version: int  # version of the events' schema
    numerics: int  # version of the generator's own arithmetic
    model: _Text  # the model's id as a study file gives it
    device: str  # the device, as torch names it
    dtype: str
    revision: str | None  # the model's revision; None for the default
    positions: int  # the most tokens, prompt and generated, that the model was made for
    weights: str  # SHA-256 of the model's configuration and weights
    eos_tokens: list[int]  # tokens that end a text by the model's files
    vocabulary: int  # V, the number of tokens
    versions: dict[str, str]  # versions of the libraries that compute, and the name of the GPU


class DocumentMessage(_Message):
    """A document without its answers, which generation does not need."""

    doc: _Text
    stratum: _Text
    cluster: _Text
    task: _Text
    source: _Text
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=_INT32_END)]], Field(min_length=1)]

    @property
    def document(self) -> Document:
        """Return the document."""
        return Document(tokens=tuple(self.tokens), **self.model_dump(exclude={"tokens"}))


class SamplingMessage(_Message):
    """The name of a study, with its temperature and truncation (``top_p``, ``top_k``)."""

    study: _Text
    temperature: Temperature
    top_p: TopP | None
    top_k: TopK | None

    @property
    def sampling(self) -> Sampling:
        """Return the sampling: temperature and truncation."""
        return Sampling(self.temperature, self.top_p, self.top_k)


class PendingMessage(_Message):
    """Replicates ``first .. first + count - 1`` of one revision of an action, which may be the control.

    ``selector_sha256`` is computed by the client; the service refuses the request if its own differs. ``of`` is the
    study of the replicates, if it differs from the request's study.
    """

    action: ActionSection
    selector_sha256: _Text
    first: Annotated[int, Field(ge=0, lt=_INT32_END)]
    count: Annotated[int, Field(ge=1, lt=_INT32_END)]
    estimator: Literal["plain", "swrb"]
    revision: Annotated[int, Field(ge=0, lt=_INT32_END)]
    of: SamplingMessage | None


class GenerationRequest(SamplingMessage):
    """One document's pending units, with everything that determines their events.

    ``tokenizer`` is the fingerprint of the tokenizer that the client made the prompt with; the service needs none.
    """

    protocol: int = PROTOCOL
    schema_version: int = SCHEMA_VERSION
    numerics: int = NUMERICS_VERSION
    model: _Text
    weights: str
    tokenizer: str | None
    logits_dtype: Literal["float32"] | None
    eos_tokens: Annotated[list[Annotated[int, Field(ge=0, lt=_INT32_END)]], Field(max_length=1000)]
    document: DocumentMessage
    pending: Annotated[list[PendingMessage], Field(min_length=1, max_length=1000)]
    horizon: Annotated[int, Field(ge=1, lt=_INT32_END)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]

    @classmethod
    def of(
        cls, study: Study, identity: Identity, document: Document, pending: Sequence[PendingUnit],
        tokenizer: str | None, eos_tokens: Sequence[int],
    ) -> Self:  # fmt: skip
        """Return the request for a document's pending units, for the endpoint with this identity."""
        sections: dict[str, object] = {section.name: section.model_dump() for section in study.actions}
        sections[CONTROL_ACTION] = {"name": CONTROL_ACTION, "selector": "full", "keep": "all"}
        shown = ("doc", "stratum", "cluster", "task", "source")
        pending_units = [
            {
                "action": sections[item.action.name],
                "selector_sha256": parts_sha256(item.action.parts),
                "first": item.first,
                "count": item.count,
                "estimator": item.estimator,
                "revision": item.revision,
                "of": None if item.of is None else {"study": item.of.study, **asdict(item.of.sampling)},
            }
            for item in pending
        ]
        return cls.model_validate({
            "study": study.name, "model": identity.model, "weights": identity.weights, "tokenizer": tokenizer,
            "logits_dtype": study.model.logits_dtype, "eos_tokens": list(eos_tokens),
            "document": {name: getattr(document, name) for name in shown} | {"tokens": list(document.tokens)},
            "pending": pending_units, "horizon": study.study.horizon, "seed": study.study.seed,
            **asdict(study.sampling),
        })  # fmt: skip

    def check(self, identity: Identity) -> None:
        """Check that the endpoint with this identity can do the work."""
        vocabulary = identity.vocabulary
        for name in ("protocol", "schema_version", "numerics", "model", "weights"):
            requested, served = getattr(self, name), getattr(identity, name)
            if requested != served:
                raise InputError(f"{name}: requested {requested!r}, but {served!r} is served")
        if max(self.document.tokens) >= vocabulary:
            raise InputError(
                f"document.tokens: {max(self.document.tokens)} is not in the vocabulary, 0..{vocabulary - 1}"
            )
        if max(self.eos_tokens, default=0) >= vocabulary:
            raise InputError(f"eos_tokens: {max(self.eos_tokens)} is not in the vocabulary, 0..{vocabulary - 1}")
        needed = len(self.document.tokens) + self.horizon
        if needed > identity.positions:
            raise InputError(
                f"document.tokens and horizon: {needed} tokens in all, but the model has {identity.positions} positions"
            )
        for number, item in enumerate(self.pending):
            item.action.check_kind(f"pending.{number}.action", finite=False)
            if item.first + item.count > _INT32_END:
                raise InputError(
                    f"pending.{number}.first: {item.first} is too large; replicate numbers end at 2^31 - 1"
                )
        events = sum(item.count for item in self.pending) * self.horizon
        if events > MAX_EVENTS:
            raise InputError(f"pending: {events} events (replicates x positions); one request has at most {MAX_EVENTS}")

    def expected_records(self) -> list[dict[str, Any]]:
        """Return the values that the record of each requested unit must have."""
        shared = {
            "model": self.model, "doc": self.document.doc, "horizon": self.horizon,
            "seed": self.seed, "weights_sha256": self.weights, "tokenizer_sha256": self.tokenizer,
            "numerics": self.numerics, "eos_tokens": written_tokens(self.eos_tokens),
            "prompt_sha256": self.document.document.prompt_sha256,
        }  # fmt: skip
        return [
            shared
            | {
                "study": self.study if item.of is None else item.of.study,
                "action": item.action.name, "estimator": item.estimator,
                "action_revision": item.revision, "first_replicate": item.first,
                "replicates": item.count, "selector_sha256": item.selector_sha256,
            }
            for item in self.pending
        ]  # fmt: skip


class ErrorMessage(_Message):
    """The message of an error: its kind, and one line of text."""

    kind: ErrorKind
    line: str


class KeptMessage(_Message):
    """``KeptEntries`` as a message: ``counts``, int32 [groups of layers, n], are compressed by zlib, as base64 text."""

    layers: Annotated[int, Field(ge=1, lt=_INT32_END)]
    pairs: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0, lt=_INT32_END)]
    entries: Annotated[int, Field(ge=1, lt=_INT32_END)]
    counts: str

    @classmethod
    def of(cls, kept: KeptEntries) -> Self:
        """Return the message about kept entries."""
        packed = base64.b64encode(zlib.compress(kept.counts.astype("<i4").tobytes(), 1)).decode("ascii")
        return cls(layers=kept.layers, pairs=kept.pairs, step=kept.step, entries=kept.counts.shape[1], counts=packed)

    @property
    def kept(self) -> KeptEntries:
        """Return the kept entries."""
        counts = np.frombuffer(zlib.decompress(base64.b64decode(self.counts)), "<i4").astype(np.int32)
        return KeptEntries(self.layers, self.pairs, counts.reshape(-1, self.entries), self.step)


class StreamMetadata(_Message):
    """The metadata of a batch: with a unit's last batch its record and its kept entries."""

    unit: dict[str, Any] | None = None
    kept: list[KeptMessage] = []

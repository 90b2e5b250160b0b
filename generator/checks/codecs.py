"""The checks of codecs: each tries a codec, and returns a line about the result or raises an error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.holding import DTYPES, AsComputed
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.checks.elsewhere import ELSEWHERE, same_after_others, same_elsewhere
from kvdrift.generator.checks.least_bytes import bits_claimed_and_needed
from kvdrift.generator.checks.random_models import embedded_document, random_document, random_model, same_events
from kvdrift.generator.checks.tried import Check, Tried, first_token_found, identity_found, require, require_unmoved
from kvdrift.generator.codecs import Codec
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.log.store import Unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection

# Kept entries on either side of a window of 128 and of groups of 32; KV heads and head sizes, one no power of two.
_ENTRIES = (1, 31, 127, 128, 129, 160, 161, 401)
_HEADS = ((2, 16), (1, 64), (3, 24))
_PROMPT = 200
_IN_TURN = 192  # entries of layers that follow each other; no other layer has as many
_LONG = 1024  # entries, of which a window of 128 is little


@dataclass(frozen=True, eq=False)
class CodecSubject(Tried[Codec]):
    """A codec to check."""

    kind: ClassVar[str] = "codec"
    decides: ClassVar[str] = "numbers that are read back"

    @staticmethod
    def part_of(action: Action) -> Codec:
        """Return the action's codec."""
        assert action.codec is not None  # noqa: S101 - an action of this class has one
        return action.codec

    def action(self, name: str = "own", selector: str | None = None, **changes: Any) -> Action:
        """Return an action of the codec; with ``selector``, after a selector that keeps half of the entries."""
        chosen: dict[str, Any] = {} if selector is None else {"selector": selector, "keep": "1/2"}
        codec = {**self.parameters, **changes, "name": self.name}
        return build_action(ActionSection(name=name, codec=codec, **chosen), self.folder)

    def heads(self) -> Iterator[tuple[int, int]]:
        """Yield numbers of KV heads and head sizes that the codec accepts."""
        for heads, size in _HEADS:
            try:
                self.part.check(size)
            except InputError:
                continue
            yield heads, size

    def layers(self, dtype: str = "float32") -> Iterator[tuple[str, PrefixLayer]]:
        """Yield random layers of every size that the codec accepts, with a channel of large keys, and names."""
        for heads, size in self.heads():
            for entries in _ENTRIES:
                generator = torch.Generator().manual_seed(entries)
                key, value = torch.randn(2, heads, entries, size, generator=generator)
                key[..., 1] += 20
                where = f"{heads} KV heads, {entries} entries of {size} channels, {dtype}"
                yield where, PrefixLayer(key.to(DTYPES[dtype]), value.to(DTYPES[dtype]))

    def decided(self) -> dict[str, str]:
        """Return digests of the entries read back, by layer."""
        return {where: self._read(layer) for dtype in DTYPES for where, layer in self.layers(dtype)}

    def decided_of(self, prompt: str) -> str:
        """Return the digest of the entries read back of one more layer."""
        read = []
        for heads, size in self.heads():
            generator = torch.Generator().manual_seed(int.from_bytes(prompt.encode(), "big"))
            read.append(self._read(PrefixLayer(*torch.randn(2, heads, _IN_TURN, size, generator=generator))))
        return " ".join(read)

    def _read(self, layer: PrefixLayer) -> str:
        held = self.part.hold(layer)
        return hashlib.sha256(torch.stack([held.key, held.value]).float().numpy().tobytes()).hexdigest()

    def generate(self) -> list[Unit]:
        """Return units of one prompt: of the codec, of a selector and the codec, of the selector, of the control."""
        actions = [
            self.action(),
            self.action("after", "snapkv"),
            _selecting("half", "snapkv"),
            Action("full", "full", Full(), Retention(None)),
        ]
        pending = [PendingUnit(action, 0, 8) for action in actions]
        return generate_units(random_model("qwen2"), "study", random_document("coded", _PROMPT), pending, 3, 7)


def _selecting(name: str, selector: str) -> Action:
    chosen: dict[str, Any] = {"selector": selector, "keep": "1/2"}
    return build_action(ActionSection(name=name, **chosen))


def _shapes(subject: CodecSubject) -> str:
    tried = 0
    for dtype in DTYPES:
        for where, layer in subject.layers(dtype):
            before = PrefixLayer(layer.key.clone(), layer.value.clone())
            held = subject.part.hold(layer)
            for name, read, own in (("keys", held.key, layer.key), ("values", held.value, layer.value)):
                require(read.shape == own.shape and read.dtype == own.dtype, f"{where}: {name} of another kind")
            same = torch.equal(before.key, layer.key) and torch.equal(before.value, layer.value)
            require(same, f"{where}: keys or values were changed in place; clone them first")
            tried += 1
    require(tried > 0, "check() refuses every head size that is tried, 16, 24 and 64")
    return f"{tried} layers come back as they were stored, in shape and dtype"


def _bytes(subject: CodecSubject) -> str:
    shares = []
    for where, layer in (pair for dtype in DTYPES for pair in subject.layers(dtype)):
        stored = subject.part.stored_bytes(layer)
        empty = subject.part.stored_bytes(PrefixLayer(layer.key.to("meta"), layer.value.to("meta")))
        require(stored == empty, f"{where}: {stored}, but {empty} by shapes alone")
        counts = (stored.payload, stored.scales)
        require(all(type(count) is int and count >= 0 for count in counts), f"{where}: bytes are {counts}")
        shares.append((layer.key.shape[1], layer.key.itemsize, stored.total / AsComputed().stored_bytes(layer).total))
    ends = [f"{share:.3f} of {entries} entries in {8 * item} bits" for entries, item, share in shares if entries == 401]
    return f"the same by shapes alone; with scales, {ends[0]}, {ends[-1]}"


def _least_bytes(subject: CodecSubject) -> str:
    found = []
    for dtype in ("float32", "bfloat16"):
        part = subject.part
        for heads, size in islice(subject.heads(), 1):
            stored, needed = bits_claimed_and_needed(part.hold, part.stored_bytes, heads, _LONG, size, dtype)
            require(
                stored >= needed,
                f"{dtype}: stored_bytes says {stored:.2f} bits a number; what comes back needs at least {needed:.2f} "
                "(Shannon's rate-distortion bound)",
            )
            found.append(f"{stored:.1f} bits a number in {dtype}, and {needed:.1f} are needed at least")
    return "; ".join(found)


def _repetition(subject: CodecSubject) -> str:
    torch.manual_seed(2)
    state, twin = torch.get_rng_state(), subject.action().codec
    require(twin == subject.part and hash(twin) == hash(subject.part), "equal parameters make unequal codecs")
    for where, layer in subject.layers():
        first = subject.part.hold(layer)
        for again in (subject.part.hold(layer), twin.hold(layer) if twin else first):
            same = torch.equal(first.key, again.key) and torch.equal(first.value, again.value)
            require(same, f"{where}: a second round trip, or a twin's, reads other numbers")
    require(torch.equal(torch.get_rng_state(), state), "numbers are drawn from torch's own state; seed a generator")
    return "the same numbers, and no draw from torch's state"


def _after_a_selector(subject: CodecSubject) -> str:
    own, after, half, control = subject.generated()
    require(after.record["kept_sha256"] == half.record["kept_sha256"], "the selector keeps other entries")
    require(own.record["kept_sha256"] == control.record["kept_sha256"], "the codec alone does not keep every entry")
    require_unmoved(control, "the control beside it")
    alone, with_selector = (max(unit.events["delta"].to_pylist()) for unit in (own, after))
    return f"its kept sets, and a control of exactly 0; delta up to {alone:.2f} alone, {with_selector:.2f} after it"


def _generated_entries(subject: CodecSubject) -> str:
    """Check generated entries, with windows and groups so short that both end within a few tokens."""
    short: dict[str, Any] = {"group": 4, "residual": 2}
    try:
        own = subject.action(**{name: short[name] for name in short if name in subject.part.parameters}, generated=True)
    except InputError as error:
        require("codes prompt entries alone" in str(error), str(error))
        return "prompt entries alone are coded"
    beside, document = _selecting("beside", "snapkv"), random_document("coded", _PROMPT + 1)
    control = Action("full", "full", Full(), Retention(None))

    def units(*pending: PendingUnit) -> list[Unit]:
        return generate_units(random_model("qwen2"), "study", document, pending, 12, 7)

    alone, kept = units(PendingUnit(own, 0, 4), PendingUnit(control, 0, 2))
    require_unmoved(kept, "the control beside it")
    parts = [*units(PendingUnit(beside, 0, 2), PendingUnit(own, 0, 1)), *units(PendingUnit(own, 1, 3))]
    rows = [row for unit in parts for row in unit.events.to_pylist() if row["action"] == own.name]
    require(rows == alone.events.to_pylist(), "the events are others beside another action, or replicate by replicate")
    most = max(row["delta"] for row in rows)
    return f"the same events alone, beside another action and in parts; delta up to {most:.2f}"


def _embedded_model(subject: CodecSubject) -> str:
    return same_events(subject.action(), _selecting("beside", "recent"), embedded_document())


_SIZES = "1 to 401 entries of 16, 24 and 64 channels, three dtypes"
CODEC_CHECKS = (
    Check("shapes", _SIZES, _shapes),
    Check("bytes", _SIZES, _bytes),
    Check("least bytes", f"what comes back of {_LONG:,} entries of independent normal numbers", _least_bytes),
    Check("repetition", "a second round trip, and a twin's", _repetition),
    Check("other layers", "two layers of one size in turn, one of them alone in another process", same_after_others),
    Check("another process", ELSEWHERE, same_elsewhere),
    Check("identity", "each parameter changed", identity_found),
    Check("first token", "8 pairs of continuations, alone and after selector 'snapkv'", first_token_found),
    Check("after a selector", "half of the entries, beside that selector and the control", _after_a_selector),
    Check("generated entries", "4 pairs of 12 tokens with generated = true", _generated_entries),
    Check("embedded model", "2 pairs of 8 tokens after a needle prompt of 396", _embedded_model),
)

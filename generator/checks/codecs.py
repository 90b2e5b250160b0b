"""The checks of codecs, on layers of random numbers and on small models.

The bytes that a codec states are compared with Shannon's rate-distortion bound: independent numbers drawn from the
normal distribution of variance 1 cannot be read back with a mean square error D from fewer than max(0, -log2(D) / 2)
bits a number, whatever the code (Shannon 1959; Cover and Thomas, Elements of Information Theory, theorem 10.3.2). If
some numbers are read back better than others, such as an exact window, the bound holds for each set of numbers with its
own D, and the bits of all sets add up. Rounding to the model's dtype counts as error, so a codec that returns its input
needs about 26 bits a number in float32 and 10 in bfloat16. The bound finds impossible claims, not slightly wrong ones,
since scales, zero points and a window's exact numbers cost more than it counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdrift.generator.actions import CODEC_KIND, Action, build_action
from kvdrift.generator.attention.holding import DTYPES, AsComputed
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.checks.random_models import embedded_document, random_document, random_model
from kvdrift.generator.checks.trial import Check, Trial, common_checks, require, require_no_draws, same_events
from kvdrift.generator.codecs import Codec
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import ActionSection

# Kept entries on either side of a window of 128 and of groups of 32; KV heads and head sizes, one no power of two.
_ENTRIES = (1, 31, 127, 128, 129, 160, 161, 401)
_HEADS = ((2, 16), (1, 64), (3, 24))
_IN_TURN = 192  # entries of layers that follow each other; no other layer has as many
_LONG, _DRAWS = 1024, 8  # entries, of which a window of 128 is little; layers of as many
_ALLOWANCE = 0.05  # bits a number: errors are means over hundreds of numbers, which are off by chance


@dataclass(frozen=True, eq=False)
class CodecTrial(Trial[Codec]):
    """A codec to check."""

    kind: ClassVar = CODEC_KIND
    decides: ClassVar[str] = "numbers that are read back"

    def action(self, name: str = "own", **changes: Any) -> Action:
        """Return an action that stores every entry by the codec; ``changes`` are new values of its parameters."""
        codec = {**self.parameters, **changes, "name": self.name, "skip_layers": []}  # models of checks have few layers
        return build_action(ActionSection.model_validate({"name": name, "codec": codec}), self.folder)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The shapes of layers to try, (number of KV heads, head size), without head sizes that the codec refuses."""
        return [(heads, size) for heads, size in _HEADS if self.accepts(size)]

    def accepts(self, size: int) -> bool:
        """Return whether the codec takes heads of ``size`` channels."""
        try:
            self.part.check(size, "keys")
            self.part.check(size, "values")
        except InputError:
            return False
        return True

    def layers(self, dtype: str = "float32") -> Iterator[tuple[str, PrefixLayer]]:
        """Yield a name and a random layer, with a channel of large keys, for each size that the codec accepts."""
        for heads, size in self.heads:
            for entries in _ENTRIES:
                generator = torch.Generator().manual_seed(entries)
                key, value = torch.randn(2, heads, entries, size, generator=generator)
                key[..., 1] += 20
                where = f"{heads} KV heads, {entries} entries of {size} channels, {dtype}"
                yield where, PrefixLayer(key.to(DTYPES[dtype]), value.to(DTYPES[dtype]))

    def decided(self) -> dict[str, str]:
        """Return a digest of the entries read back from each layer of ``layers``, keyed by the layer's name."""
        return {where: self._read(layer) for dtype in DTYPES for where, layer in self.layers(dtype)}

    def decided_on(self, prompt: str) -> str:
        """Return digests of what is read back from one more random layer of each head size; ``prompt`` is the seed."""
        read = []
        for heads, size in self.heads:
            generator = torch.Generator().manual_seed(int.from_bytes(prompt.encode(), "big"))
            read.append(self._read(PrefixLayer(*torch.randn(2, heads, _IN_TURN, size, generator=generator))))
        return " ".join(read)

    def _read(self, layer: PrefixLayer) -> str:
        held = self.part.hold(layer)
        return hashlib.sha256(torch.stack([held.key, held.value]).float().numpy().tobytes()).hexdigest()


def _shapes(trial: CodecTrial) -> str:
    require(bool(trial.heads), "check() refuses heads of 16, 24 and 64 channels, and must accept one of these sizes")
    layers = [pair for dtype in DTYPES for pair in trial.layers(dtype)]
    for where, layer in layers:
        before = PrefixLayer(layer.key.clone(), layer.value.clone())
        held = trial.part.hold(layer)
        for name, read, original in (("keys", held.key, layer.key), ("values", held.value, layer.value)):
            require(
                read.shape == original.shape and read.dtype == original.dtype,
                f"{where}: {name} come back as {read.dtype} {list(read.shape)}, stored were {original.dtype} "
                f"{list(original.shape)}",
            )
        same = torch.equal(before.key, layer.key) and torch.equal(before.value, layer.value)
        require(same, f"{where}: keys or values were changed in place; clone them first")
    return f"{len(layers)} layers come back as they were stored, in shape and dtype"


def _bytes(trial: CodecTrial) -> str:
    shares = []
    for where, layer in (pair for dtype in DTYPES for pair in trial.layers(dtype)):
        stored = trial.part.layer_bytes(layer)
        empty = trial.part.layer_bytes(PrefixLayer(layer.key.to("meta"), layer.value.to("meta")))
        require(
            stored == empty,
            f"{where}: stored_bytes returned {stored}, but {empty} for a layer of the same shapes without data; "
            "take bytes from shapes and dtype alone",
        )
        share = stored.total / AsComputed().layer_bytes(layer).total
        shares.append(f"{share:.3f} of the bytes of {layer.key.shape[1]} entries in {8 * layer.key.itemsize} bits")
    return f"the same without data; payload and scales take {shares[len(_ENTRIES) - 1]}, {shares[-1]}"


def _least_bytes(trial: CodecTrial) -> str:
    lines = []
    for dtype in ("float32", "bfloat16"):
        stated, needed = _bits_stated_and_needed(trial.part, *trial.heads[0], dtype)
        require(
            stated >= needed,
            f"{dtype}: stored_bytes reports {stated:.2f} bits a number, too few: numbers read back with errors so "
            f"small need at least {needed:.2f} (Shannon's rate-distortion bound)",
        )
        lines.append(f"{stated:.1f} bits a number in {dtype}, and {needed:.1f} are needed at least")
    return "; ".join(lines)


def _bits_stated_and_needed(codec: Codec, heads: int, size: int, dtype: str) -> tuple[float, float]:
    """Return the bits per number that a codec says it stores, and the fewest with which its errors are possible."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(_DRAWS, 2, heads, _LONG, size, generator=generator, dtype=torch.float64)
    squares = torch.empty_like(numbers)
    for drawn, square in zip(numbers, squares, strict=True):
        layer = PrefixLayer(*drawn.to(DTYPES[dtype]))
        back = codec.hold(layer)
        square[0], square[1] = (back.key.double() - drawn[0]).square(), (back.value.double() - drawn[1]).square()
    needed = max(_bits(squares.mean((0, 2, 4))), _bits(squares.mean((0, 2, 3))))  # sets of an entry, or of a channel
    return 8 * codec.layer_bytes(layer).total / numbers[0].numel(), max(needed - _ALLOWANCE, 0)


def _bits(errors: Tensor) -> float:
    """Return the bits per number that equally large sets of numbers need, from the mean square error of each set."""
    least = torch.finfo(torch.float64).tiny  # of a set that comes back as it was drawn
    return float((-0.5 * errors.clamp(least, 1).log2()).mean())


def _repetition(trial: CodecTrial) -> str:
    torch.manual_seed(2)
    state, twin = torch.get_rng_state(), CodecTrial(trial.name, trial.parameters, trial.folder).part
    for where, layer in trial.layers():
        first = trial.part.hold(layer)
        for again in (trial.part.hold(layer), twin.hold(layer)):
            same = torch.equal(first.key, again.key) and torch.equal(first.value, again.value)
            require(same, f"{where}: a second round trip of the same entries, or an equal codec's, gives other numbers")
    require_no_draws(state)
    return "the same numbers, and no draw from torch's state"


def _generated_entries(trial: CodecTrial) -> str:
    """Check an action that codes generated entries; windows and groups are so short that both end in a few tokens."""
    short: dict[str, Any] = {"group": 4, "residual": 2}
    try:
        generated = trial.action(**{name: short[name] for name in short if name in trial.options}, generated=True)
    except InputError as error:
        require("codes prompt entries alone" in str(error), str(error))
        return "prompt entries alone are coded"
    model = random_model("qwen2", head_size=trial.heads[0][1])
    return same_events(generated, _beside(), model, random_document("coded", 201))


def _embedded_model(trial: CodecTrial) -> str:
    model = load_model(EMBEDDED_ID)
    if trial.accepts(size := model.shape.head_size):
        return same_events(trial.action(), _beside(), model, embedded_document())
    _, larger = trial.heads[0]
    line = same_events(
        trial.action(), _beside(), random_model("llama", head_size=larger), random_document("other", 396)
    )
    return f"in place of its heads of {size} channels, which are refused, random ones of {larger}: {line}"


def _beside() -> Action:
    return build_action(ActionSection.model_validate({"name": "beside", "selector": "recent", "keep": "1/2"}))


_SIZES = "1 to 401 entries of 16, 24 and 64 channels, three dtypes"
CodecTrial.checks = (
    Check("shapes", _SIZES, _shapes),
    Check("bytes", _SIZES, _bytes),
    Check("least bytes", f"what comes back of {_LONG:,} entries of independent normal numbers", _least_bytes),
    Check("repetition", "a second round trip, and an equal codec's", _repetition),
    *common_checks("layers"),
    Check("generated entries", "2 pairs of 8 tokens with generated = true", _generated_entries),
    Check("embedded model", "2 pairs of 8 tokens after a needle prompt of 396", _embedded_model),
)

"""Which layers an action's selector or codec applies to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class LayerChoice:
    """Some of the layers with full attention, numbered among these from 0; -1 is the last.

    Attributes:
        layers: The chosen layers; None for all.
        skip_layers: Layers that are not chosen; None if a study file does not name them.
        ends: How many layers at either end are not chosen, but at most half of all layers at each end.
    """

    layers: tuple[int, ...] | None = None
    skip_layers: tuple[int, ...] | None = None
    ends: int = 0

    @classmethod
    def written(cls, layers: Sequence[int] | None, skip_layers: Sequence[int] | None) -> Self | None:
        """Return the choice that a study file writes; None if it writes neither list."""
        if layers is None and skip_layers is None:
            return None
        if layers is not None and skip_layers is not None:
            raise InputError("layers and skip_layers: write one of them")
        for name, numbers in (("layers", layers), ("skip_layers", skip_layers)):
            if numbers is None:
                continue
            if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
                line = f"{name} = {numbers!r}: should be a list of numbers of layers"
                raise InputError(f"{line}, as in {name} = [0, 1, -2, -1]")
            if len(set(numbers)) < len(numbers):
                raise InputError(f"{name} = {numbers}: names a layer twice")
        if layers is not None and not layers:
            raise InputError("layers = []: names no layer; leave layers out, or name some")
        chosen, skipped = (None if numbers is None else tuple(numbers) for numbers in (layers, skip_layers))
        return cls(chosen, skipped)

    @property
    def parameters(self) -> dict[str, Any]:
        """The keys by which a study file names the layers, or ``exact_ends``; empty if all layers are chosen."""
        if self.ends:
            return {"exact_ends": self.ends}
        if self.layers is not None:
            return {"layers": list(self.layers)}
        return {} if self.skip_layers is None else {"skip_layers": list(self.skip_layers)}

    def left_out(self, count: int) -> frozenset[int]:
        """Return the layers, of ``count``, that are not chosen, numbered from 0.

        Raises:
            InputError: A number is not that of a layer, or no layer is chosen.
        """
        if self.ends:
            ends = min(self.ends, count // 2)
            left_out = frozenset([*range(ends), *range(count - ends, count)])
        elif self.layers is not None:
            left_out = frozenset(range(count)) - self._numbers("layers", self.layers, count)
        else:
            left_out = self._numbers("skip_layers", self.skip_layers or (), count)
        if left_out and len(left_out) == count:
            why = f"the first {self.ends} and the last {self.ends} layers" if self.ends else "all layers that there are"
            raise InputError(f"{why} of {count} stay exact, which leaves none; write skip_layers = []")
        return left_out

    @staticmethod
    def _numbers(name: str, numbers: Sequence[int], count: int) -> frozenset[int]:
        for number in numbers:
            if not -count <= number < count:
                raise InputError(
                    f"{name} = {list(numbers)}: the model has {count} layers with full attention; {number} is none of "
                    f"{-count} to {count - 1}"
                )
        return frozenset(number % count for number in numbers)


ALL_LAYERS = LayerChoice()


@dataclass(frozen=True)
class ChosenLayers:
    """The part of an action by which selector and codec apply to some layers."""

    chosen: LayerChoice
    coded: LayerChoice

    @property
    def parameters(self) -> dict[str, Any]:
        """The layers of selector and codec; empty if both apply to all."""
        both = {"selector": self.chosen.parameters, "codec": self.coded.parameters}
        return {part: parameters for part, parameters in both.items() if parameters}

"""Retention rules: how many entries of a prompt an action keeps, or a policy's step reads."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class Retention:
    """A retention rule; ``rule`` is an integer count, an exact fraction of n in (0, 1], or None for all."""

    rule: int | Fraction | None

    @classmethod
    def parse(cls, value: float | str) -> Retention:
        """Read a study file's ``keep``: 512, "1/2", "90%" or "all".

        Raises:
            InputError: The value is none of these, such as a float.
        """
        if value == "all":
            return cls(None)
        try:
            rule = value if isinstance(value, int) else _fraction(str(value))
        except (ValueError, ZeroDivisionError):
            message = f'keep = {value!r}: write an integer, an exact fraction such as "1/2", or "all"'
            raise InputError(message) from None
        if isinstance(rule, Fraction) and not 0 < rule <= 1:
            raise InputError(f"keep = {value!r}: a fraction of the prompt must be above 0 and at most 1")
        if isinstance(rule, int) and rule < 1:
            raise InputError(f"keep = {value!r}: keep at least 1 entry")
        return cls(None if isinstance(rule, Fraction) and rule == 1 else rule)  # the integer 1 is a count

    def kept(self, entries: int) -> int:
        """Return m, how many of a prompt's n ``entries`` are kept: the rule's count or floor(n p/q), at most n."""
        count = self.count(entries)
        return entries if count is None else min(count, entries)

    def count(self, entries: int) -> int | None:
        """Return the rule's count, which may exceed n, or floor(n p/q) for a prompt of n ``entries``; None for all."""
        if isinstance(self.rule, Fraction):
            return entries * self.rule.numerator // self.rule.denominator
        return self.rule

    def __str__(self) -> str:
        return "all" if self.rule is None else str(self.rule)


def _fraction(text: str) -> int | Fraction:
    if text.endswith("%"):
        return exact_fraction(text[:-1].strip()) / 100
    if "/" in text:
        return exact_fraction(text)
    return int(text)


def exact_fraction(text: str) -> Fraction:
    """Return "1/4" or "0.25" as the exact fraction that is written.

    Raises:
        ValueError: The text is no fraction, or has an exponent: a short exponent can mean a number larger than memory.
        ZeroDivisionError: The denominator is 0.
    """
    if "e" in text.lower():
        raise ValueError(text)
    return Fraction(text)

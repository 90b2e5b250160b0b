"""Codecs store kept entries in fewer bits; every family has a file."""

from __future__ import annotations

from kvdrift.generator.codecs.codec import Codec
from kvdrift.generator.codecs.fp8 import FP8
from kvdrift.generator.codecs.hqq import HQQInt2, HQQInt4, HQQInt8
from kvdrift.generator.codecs.identity import Identity
from kvdrift.generator.codecs.kivi import Int2, Int4, Int8
from kvdrift.generator.codecs.rotated import RotatedInt4

CODECS: dict[str, type[Codec]] = {
    "identity": Identity,
    "fp8": FP8,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "rotated-int4": RotatedInt4,
    "hqq-int8": HQQInt8,
    "hqq-int4": HQQInt4,
    "hqq-int2": HQQInt2,
}

__all__ = ["CODECS", "Codec"]

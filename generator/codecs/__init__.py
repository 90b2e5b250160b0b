"""Codecs store kept entries in fewer bits; every family has a file."""

from __future__ import annotations

from kvdrift.generator.codecs.codec import Codec
from kvdrift.generator.codecs.fp4 import MXFP4, NVFP4
from kvdrift.generator.codecs.fp8 import FP8
from kvdrift.generator.codecs.hqq import HQQInt2, HQQInt4, HQQInt8
from kvdrift.generator.codecs.identity import Identity
from kvdrift.generator.codecs.kivi import Int2, Int4, Int8
from kvdrift.generator.codecs.llama_cpp_blocks import Q4_0, Q5_1, Q8_0
from kvdrift.generator.codecs.rotated import RotatedInt4
from kvdrift.generator.codecs.turboquant import (
    TurboQuant,
    TurboQuant3Bit,
    TurboQuant4Bit,
    TurboQuantK3V4,
    TurboQuantK8V4,
)

CODECS: dict[str, type[Codec]] = {
    "identity": Identity,
    "fp8": FP8,
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "rotated-int4": RotatedInt4,
    "turboquant": TurboQuant,
    "turboquant-k8v4": TurboQuantK8V4,
    "turboquant-4bit": TurboQuant4Bit,
    "turboquant-k3v4": TurboQuantK3V4,
    "turboquant-3bit": TurboQuant3Bit,
    "q8_0": Q8_0,
    "q5_1": Q5_1,
    "q4_0": Q4_0,
    "hqq-int8": HQQInt8,
    "hqq-int4": HQQInt4,
    "hqq-int2": HQQInt2,
}

__all__ = ["CODECS", "Codec"]

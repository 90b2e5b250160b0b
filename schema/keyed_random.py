"""Random streams that depend only on a name: equal on every machine, in any order and for any batch."""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_generator(name: str, counter: int = 0) -> np.random.Generator:
    """Return the Philox4x64-10 generator whose key is the BLAKE2b-128 digest of ``name``.

    Only ``Generator.random`` promises the same numbers under every version of numpy; numpy may change how the other
    distributions use the stream.

    Different names give independent streams. A stream begins at the 256-bit ``counter``, each step of which gives four
    uniforms.
    """
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key, counter=counter))

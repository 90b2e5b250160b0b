"""Keep the proofs of models that were made on this machine, in the user's cache folder.

A proof belongs to the weights' fingerprint, the versions of torch and transformers, the dtype and the kind of device.
If the file is missing or damaged, every model is proven again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from kvdrift.generator.attention.layer_traits import LayerTraits
from kvdrift.generator.identity import NUMERICS_VERSION
from kvdrift.generator.transformer.files.fingerprints import digests_path, read_remembered, write_remembered

_PROOFS = 3  # version of what a proof tries


@dataclass(frozen=True)
class Proof:
    """The result of trying a model when it was loaded: the reason of a refusal or None, and two of its traits."""

    refusal: str | None
    softcap: float | None = None
    turned_by_halves: bool = False

    @classmethod
    def of(cls, traits: LayerTraits) -> Proof:
        """Return the proof of a model with these traits."""
        return cls(None, traits.softcap, bool(traits.turned_by_halves))

    def traits(self, kind: str) -> LayerTraits:
        """Return the traits of the model, whose type is ``kind``, for selectors."""
        return LayerTraits(kind, self.softcap, self.turned_by_halves)


def remembered(weights_sha256: str | None, dtype: str, device: str) -> Proof | None:
    """Return the kept result about a model; None if it was not tried."""
    found = read_remembered(_path()).get(_key(weights_sha256, dtype, device)) if weights_sha256 else None
    try:
        refusal, softcap, halves = (found[name] for name in ("refusal", "softcap", "turned_by_halves"))  # type: ignore[index]
    except (TypeError, KeyError):
        return None
    known = isinstance(refusal, str | None) and isinstance(softcap, float | None) and isinstance(halves, bool)
    return Proof(refusal, softcap, halves) if known else None


def remember(weights_sha256: str | None, dtype: str, device: str, model_id: str, proof: Proof) -> None:
    """Keep the result about a model; do nothing if that fails, or if the weights have no fingerprint."""
    path = _path()
    if path is None or weights_sha256 is None:
        return
    made = {_key(weights_sha256, dtype, device): {"model": model_id, **asdict(proof)}}
    write_remembered(path, read_remembered(path) | made)


def results() -> dict[str, str | None]:
    """Return the models that these versions tried on this machine, each with the reason of its refusal, or None."""
    made = read_remembered(_path()).items()
    entries = [one for key, one in made if key.endswith(f" {_versions()}") and isinstance(one, dict)]
    return {str(one.get("model")): one.get("refusal") for one in entries}


def _key(weights_sha256: str | None, dtype: str, device: str) -> str:
    return f"{weights_sha256} {dtype} {torch.device(device).type} {_versions()}"


def _versions() -> str:
    return f"{torch.__version__} {version('transformers')} {NUMERICS_VERSION} {_PROOFS}"


def _path() -> Path | None:
    digests = digests_path()
    return None if digests is None else digests.with_name("proofs.json")

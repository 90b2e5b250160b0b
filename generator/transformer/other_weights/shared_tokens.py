"""Check that an action's weights have the same tokens as the reference, since otherwise there are no pairs."""

from __future__ import annotations

from generator.transformer.files.configuration import configured_eos_tokens, vocabulary_size
from generator.transformer.files.fingerprints import tokenizer_sha256
from generator.transformer.files.local_folders import local_configuration, local_folder, model_location
from generator.transformer.files.tokenizer import tokens_sha256
from generator.transformer.other_weights.named import told_of, weights_location, with_own_weights
from schema.errors import InputError
from schema.study import Study


def check_shared(study: Study, *, fetch: bool) -> None:
    """Raise an error for actions whose weights have another vocabulary, other EOS tokens or another tokenizer.

    A folder without a tokenizer uses the reference's.

    Args:
        study: A study of a transformer.
        fetch: Whether to download files that are not on this machine; otherwise they are not compared.
    """
    ours, revision = model_location(study.model), study.model.revision
    for action in with_own_weights(study):
        theirs = weights_location(study, action)
        if not fetch and None in (local_configuration(ours, revision), local_configuration(theirs)):
            continue
        with told_of(action, theirs):
            pairs = [
                ("a vocabulary of", vocabulary_size(ours, revision=revision), vocabulary_size(theirs)),
                ("the EOS tokens", configured_eos_tokens(ours, revision), configured_eos_tokens(theirs)),
                ("the tokenizer", *_tokenizers(ours, theirs, revision, fetch=fetch)),
            ]
        for what, one, other in pairs:
            if one != other:
                raise InputError(
                    f"action '{action.name}': its weights have {what} {_short(other)}, those of the reference "
                    f"{_short(one)}: sides are compared token by token, and must share the vocabulary and the tokenizer"
                )


def _tokenizers(ours: str, theirs: str, revision: str | None, *, fetch: bool) -> tuple[str | None, str | None]:
    """Return digests of two models' tokens; equal if one of them has no tokenizer, or none on this machine."""
    files = tokenizer_sha256(ours, revision), tokenizer_sha256(theirs)
    fetched = [fetch and local_folder(place) is None for place in (ours, theirs)]
    known = all(digest is not None or late for digest, late in zip(files, fetched, strict=True))
    if not known or files[0] == files[1] is not None:
        return None, None
    found = tokens_sha256(ours, revision=revision), tokens_sha256(theirs)
    return (None, None) if None in found else found


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) else str(value)

"""Find the weights that an action names, check their tokens, and include them in its identity; nothing is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvdrift.generator.actions import Action
from kvdrift.generator.identity import ActionIdentity, ModelIdentity
from kvdrift.generator.transformer.files.configuration import vocabulary_size
from kvdrift.generator.transformer.files.fingerprints import model_identity, tokenizer_sha256
from kvdrift.generator.transformer.files.local_folders import local_configuration, local_folder
from kvdrift.generator.transformer.files.locations import model_location, transformer_location
from kvdrift.generator.transformer.files.text_ends import TextEnds, check_ends, model_ends, text_ends
from kvdrift.generator.transformer.files.tokenizer import tokens_sha256
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import ActionSection, Study


def with_own_weights(study: Study) -> list[ActionSection]:
    """Return the actions of a transformer's study that have weights of their own."""
    return [action for action in study.actions if action.weights is not None]


def weights_location(study: Study, action: Action | ActionSection) -> str:
    """Return the place of an action's weights, as ``model_location`` does for the reference."""
    key = f"action '{action.name}': weights = "
    return transformer_location(action.weights or "", study.model.folder, key, study.model.tokenizer)


@contextmanager
def naming_action(action: ActionSection, location: str) -> Iterator[None]:
    """Let errors in the block about the model at ``location`` name the action and its weights, not ``model.id``."""
    try:
        yield
    except InputError as error:
        line = str(error).replace(f"model.id = '{location}'", f"weights = '{action.weights}'")
        raise type(error)(f"action '{action.name}': {line}") from error.__cause__


def identities(study: Study, files: ModelIdentity) -> Callable[[Action], ActionIdentity]:
    """Return a function that gives an action's identity, from the files on this machine.

    ``files`` are the fingerprints of the reference's files.
    """
    others: dict[str, str | None] = {}
    for action in with_own_weights(study):
        location = weights_location(study, action)
        with naming_action(action, location):
            others[action.name] = model_identity(location).weights_sha256

    def identity(action: Action) -> ActionIdentity:
        identity_of_model = files.of(action.parts)
        return with_weights(identity_of_model, others[action.name]) if action.name in others else identity_of_model

    return identity


def with_weights(identity: ActionIdentity, weights_sha256: str | None) -> ActionIdentity:
    """Return an action's identity with its own weights included in ``selector_sha256``.

    ``selector_sha256`` becomes None if the weights are unknown.
    """
    if weights_sha256 is None:
        return replace(identity, selector_sha256=None)
    content = json.dumps([identity.selector_sha256, weights_sha256])
    return replace(identity, selector_sha256=hashlib.sha256(content.encode()).hexdigest())


def check_shared(study: Study, *, fetch: bool) -> None:
    """Raise an error if an action's vocabulary or tokenizer is not the reference's, or if it has further EOS tokens.

    A folder without a tokenizer uses the reference's. Files that are not on this machine are compared only with
    ``fetch``, which downloads them.
    """
    ours, revision = model_location(study.model), study.model.revision
    for action in with_own_weights(study):
        theirs = weights_location(study, action)
        if not fetch and None in (local_configuration(ours, revision), local_configuration(theirs)):
            continue
        with naming_action(action, theirs):
            size = vocabulary_size(theirs)
            weights_ends = TextEnds.of(model_ends(theirs), size)
            pairs = [
                ("a vocabulary of", vocabulary_size(ours, revision=revision), size),
                ("the tokenizer", *_tokenizers(ours, theirs, revision, fetch=fetch)),
            ]
        check_equal_tokens(action.name, pairs)
        check_ends(study, action.name, text_ends(study), weights_ends.tokens)


def check_equal_tokens(action: str, pairs: Iterable[tuple[str, object, object]]) -> None:
    """Raise an error if an action's tokens are not the reference's, so that sides could not be compared by token.

    Each item of ``pairs`` has the name of what is compared, the reference's value and the action's.
    """
    for quality, reference_value, action_value in pairs:
        if reference_value != action_value:
            raise InputError(
                f"action '{action}': its weights have {quality} {_short(action_value)}, those of the reference "
                f"{_short(reference_value)}: "
                "sides are compared token by token, and must share the vocabulary and the tokenizer"
            )


def _tokenizers(ours: str, theirs: str, revision: str | None, *, fetch: bool) -> tuple[str | None, str | None]:
    """Return digests of two models' tokens; None for both if a model has no tokenizer here, or both have equal files.

    With ``fetch``, the tokenizers of Hugging Face ids are downloaded.
    """
    files = tokenizer_sha256(ours, revision), tokenizer_sha256(theirs)
    fetched = [fetch and local_folder(place) is None for place in (ours, theirs)]
    known = all(digest is not None or late for digest, late in zip(files, fetched, strict=True))
    if not known or files[0] == files[1] is not None:
        return None, None
    hashes = tokens_sha256(ours, revision=revision), tokens_sha256(theirs)
    return (None, None) if None in hashes else hashes


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) else str(value)

"""Find the weights that an action names, and include them in its identity. Nothing is loaded here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from generator.actions import Action
from generator.identity import ActionIdentity, ModelIdentity
from generator.transformer.files.fingerprints import model_identity
from generator.transformer.files.local_folders import transformer_location
from schema.errors import InputError
from schema.study import ActionSection, Study


def with_own_weights(study: Study) -> list[ActionSection]:
    """Return the actions of a transformer's study that have weights of their own."""
    return [action for action in study.actions if action.weights is not None]


def weights_location(study: Study, action: ActionSection) -> str:
    """Return the place of an action's weights, as ``model_location`` returns that of the reference's."""
    key = f"action '{action.name}': weights = "
    return transformer_location(action.weights or "", study.model.folder, key)


@contextmanager
def told_of(action: ActionSection, location: str) -> Iterator[None]:
    """Let errors about a model inside the block name the action with these weights, in place of ``model.id``."""
    try:
        yield
    except InputError as error:
        said = str(error).replace(f"model.id = '{location}'", f"weights = '{action.weights}'")
        raise type(error)(f"action '{action.name}': {said}") from error.__cause__


def identities(study: Study, files: ModelIdentity) -> Callable[[Action], ActionIdentity]:
    """Return a function that gives an action's identity, from the files on this machine.

    Args:
        study: A study of a transformer.
        files: Fingerprints of the reference.
    """
    others: dict[str, str | None] = {}
    for action in with_own_weights(study):
        location = weights_location(study, action)
        with told_of(action, location):
            others[action.name] = model_identity(location).weights_sha256

    def identity(action: Action) -> ActionIdentity:
        own = files.of(action.parts)
        return with_weights(own, others[action.name]) if action.name in others else own

    return identity


def with_weights(identity: ActionIdentity, weights_sha256: str | None) -> ActionIdentity:
    """Return an action's identity with other weights; their SHA-256 is None if they are not known here."""
    if weights_sha256 is None:
        return replace(identity, selector_sha256=None)
    said = json.dumps([identity.selector_sha256, weights_sha256])
    return replace(identity, selector_sha256=hashlib.sha256(said.encode()).hexdigest())

"""A transformer as the model of a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generator.actions import Action
from generator.identity import ActionIdentity, ModelIdentity
from generator.transformer.decoder import Decoder, check_positions
from generator.transformer.prompt import PrefilledPrompt
from schema.document import Document

_UNKNOWN = ModelIdentity(None, None)


@dataclass(frozen=True)
class LoadedModel(Decoder):
    """``generator.model.Model`` of a transformer.

    Attributes:
        files: Fingerprints of the files that it was loaded from; unknown where it was made in memory.
    """

    files: ModelIdentity = _UNKNOWN

    def identity(self, action: Action) -> ActionIdentity:
        """What makes the units of an action.

        Raises:
            InputError: The selector's source cannot be read.
        """
        return self.files.of(action.selector)

    def prefill(self, document: Document, actions: Sequence[Action], horizon: int) -> PrefilledPrompt:
        """Process the document's prompt, recording what the selectors of ``actions`` need.

        Raises:
            InputError: A retention cannot hold its selector's window and sinks, or the document is too long.
        """
        check_positions(document.doc, document.prompt_tokens, horizon, self.positions)
        return PrefilledPrompt(self, document, actions, horizon)

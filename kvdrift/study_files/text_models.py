"""The properties of a model that a new study's prompts depend on: its tokenizer, chat template and positions."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvdrift.generator.documents.prompts import Tokenizer
from kvdrift.generator.llama_cpp.gguf import check_is_gguf, gguf_facts
from kvdrift.generator.llama_cpp.library import INSTALL, PACKAGE
from kvdrift.generator.transformer.files.configuration import position_limit
from kvdrift.generator.transformer.files.local_folders import GGUF, local_folder, model_folder
from kvdrift.generator.transformer.files.tokenizer import is_on_hub, load_tokenizer
from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class TextModel:
    """A model that reads text, as far as it is known on this machine.

    Attributes:
        name: The model as the user named it.
        tokenizer: The tokenizer of prompts; None if it cannot be loaded here.
        positions: The largest number of tokens, prompt and generated ones; None if it is unknown.
        lacking: The reason why the tokenizer cannot be loaded; empty if it is loaded.
    """

    name: str
    tokenizer: Tokenizer | None
    positions: int | None
    lacking: str = ""

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer is known to have a chat template."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    @property
    def unknown_tokenizer(self) -> str:
        """The beginning of a line that says that the tokenizer is not known, and why."""
        return f"the tokenizer of '{self.name}' cannot be loaded ({self.lacking})"

    def most_tokens(self, horizon: int) -> int | None:
        """Return the most tokens of a prompt that leaves room for ``horizon`` tokens; None if it is unknown."""
        return None if self.positions is None else self.positions - horizon


def text_model(location: str) -> TextModel:
    """Return what is known of a model: a GGUF file, a folder or a Hugging Face id, whose tokenizer is downloaded.

    Raises:
        InputError: The file or folder cannot be read, or has no tokenizer; the hub has no such model.
    """
    if location.endswith(GGUF):
        return _of_gguf(Path(location))
    if local_folder(location) is None and model_folder(location) is None:
        there = is_on_hub(location, None)
        if there is None:
            return TextModel(location, None, None, "the hub cannot be reached, or does not give it out")
        if not there:
            raise InputError(f"--model {location}: the hub has no such model, or it is private")
    tokenizer: Any = load_tokenizer(location)
    return TextModel(location, tokenizer, position_limit(location))


def _of_gguf(file: Path) -> TextModel:
    check_is_gguf(file)
    if find_spec(PACKAGE) is None:
        return TextModel(str(file), None, None, f"it needs the package {PACKAGE}: {INSTALL}")
    return TextModel(str(file), load_tokenizer(str(file)), gguf_facts(file).positions or None)

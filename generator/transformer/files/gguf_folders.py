"""Make a folder of a GGUF file's configuration, tokenizer and ends, as transformers reads them from the file.

The folder is in the user's cache folder. It has a link to the file, whose weights transformers dequantizes when they
are loaded, so every reader of a model's folder reads a GGUF file too. One folder is made for each content of a file,
each version of transformers, and each tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvdrift.generator.transformer.files.configuration import causal_class, library, quiet
from kvdrift.generator.transformer.files.digests import cache_folder, file_digests, file_sha256
from kvdrift.generator.transformer.files.gguf_metadata import GgufMetadata, complete
from kvdrift.generator.transformer.files.local_folders import GGUF_WEIGHTS, local_folder, tokenizer_files
from kvdrift.schema.errors import InputError, installing, reading

_UNKNOWN_SPLIT = "unknown-split"  # the file of a folder with the name of a rule that is not in ``_SPLITS``

# How ``tokenizer.ggml.pre`` splits a text before merges: transformers reads every such tokenizer as that of GPT-2.
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT_2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}{_LINES}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), rf"{_CONTRACTIONS}|\p{{N}}{_LINES}"),
    **dict.fromkeys(("smollm", "starcoder", "codeshell", "command-r"), _GPT_2),
}
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "codeshell", "command-r"})


def gguf_folder(file: Path, tokenizer: str | None = None) -> Path:
    """Return the folder made of a GGUF file; make the folder if there is none yet, which takes some seconds.

    With ``tokenizer``, a folder or Hugging Face id, the folder has that tokenizer in place of the file's.

    Raises:
        InputError: The file is not there, or transformers cannot read it; or the extra ``gguf`` is not installed.
    """
    cache = cache_folder()
    if cache is None:
        raise InputError(
            f"{file}: needs a folder for its configuration; set XDG_CACHE_HOME, since there is no home folder"
        )
    version = library().__version__
    named = "" if tokenizer is None else f"-{_digest_of(tokenizer)[:8]}"
    folder = cache / "gguf" / f"{file.stem}-{file_sha256(file)[:16]}-{version}{named}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as made:
            beside = Path(made, "folder")
            beside.mkdir()
            _link(beside, file)
            _write(beside, file, tokenizer)
            try:
                beside.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process has made it
                    raise
    _link(folder, file)
    return folder


def unknown_split(folder: Path) -> str | None:
    """Return the file's name of a rule by which it splits texts, if the folder's tokenizer does not follow the rule."""
    file = folder / _UNKNOWN_SPLIT
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _digest_of(tokenizer: str) -> str:
    """Return a digest of a tokenizer's name and, if it is a folder, of the contents of its files."""
    folder = local_folder(tokenizer)
    digests = [] if folder is None else file_digests(tokenizer_files(folder))
    return hashlib.sha256(" ".join([tokenizer, *digests]).encode()).hexdigest()


@contextlib.contextmanager
def without_bar() -> Iterator[None]:
    """Keep transformers from showing a progress bar while it dequantizes weights inside the block."""
    readers: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    shown = readers.tqdm
    readers.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        readers.tqdm = shown


def _link(folder: Path, file: Path) -> None:
    """Let the folder's link lead to the file, which may have moved."""
    link, target = folder / GGUF_WEIGHTS, file.absolute()
    if link.is_symlink() and os.readlink(link) == str(target):  # noqa: PTH115 - the text of the link, not its target
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as made:
        beside = Path(made, GGUF_WEIGHTS)
        beside.symlink_to(target)
        beside.replace(link)


def _write(folder: Path, file: Path, tokenizer: str | None) -> None:
    """Write the configuration, the tokenizer and the ends of a GGUF file into a folder with a link to the file."""
    for package in ("gguf", "accelerate"):  # transformers needs both for such files
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise InputError(f"{file}: reading a GGUF file needs {package}: {installing('gguf')}") from None
    transformers, metadata = library(), GgufMetadata(file)
    where = f"{file}: transformers cannot read"
    metadata.check_known(str(file))
    with reading(f"{where} its configuration", Exception), quiet():
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=GGUF_WEIGHTS)
        complete(config, metadata)
        config.architectures = [causal_class(config) or ""]
        if (config.pad_token_id or 0) >= config.vocab_size:  # a default of the class, for another vocabulary
            config.pad_token_id = None
        config.save_pretrained(folder)
    ends = list(dict.fromkeys(metadata.ends()))
    transformers.GenerationConfig(eos_token_id=ends or None).save_pretrained(folder)
    if tokenizer is not None:
        with reading(f"model.tokenizer = '{tokenizer}': cannot be loaded", Exception), quiet():
            transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(folder)
    elif metadata.value("tokenizer.ggml.model") not in (None, "no_vocab", "none"):
        with reading(f"{where} its tokenizer", Exception), quiet():
            made = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_WEIGHTS)
            if metadata.pre in _SPLITS:
                made.backend_tokenizer.pre_tokenizer = _splitting(str(metadata.pre))
            elif metadata.pre is not None:
                (folder / _UNKNOWN_SPLIT).write_text(metadata.pre, encoding="utf-8")
            made.save_pretrained(folder)


def _splitting(pre: str) -> Any:
    """Return the rule by which a tokenizer splits texts, from its name in the metadata."""
    from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415 - transformers has it

    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*digits, split, byte_level])

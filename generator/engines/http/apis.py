"""The kinds of servers: how each reports about itself, and how it gives the next-token distribution of a history."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.connection import LLAMA_SERVER, OPENAI, SGLANG, VLLM, Connection, ServerSettings
from kvdrift.schema.errors import InputError, OperationError

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs; naïve café, Straße, Ωμέγα, Привет, 你好, こんにちは, 🙂\n\t"
    'x = [1, 2.5]; don\'t <b>stop</b> -- "quoted" #42 https://example.org/?q=1'
)
"""A text whose tokens distinguish two tokenizers."""


@dataclass(frozen=True)
class ServerFacts:
    """A server's report of itself.

    Attributes:
        reported: Facts that determine its distributions, as far as it reports them; they are part of units' identity.
        beside: Other facts, such as the number of slots.
        vocabulary: V, the number of tokens.
        positions: The largest number of tokens, prompt and generated tokens; 0 if unknown.
        eos_tokens: Tokens that end a text; () if unknown.
        tokenizer_sha256: SHA-256 of its report about its tokenizer; None if it reports nothing.
        slots: The number of slots, each of which keeps a stream's cache; 0 if a request cannot choose its slot.
    """

    reported: Mapping[str, Any]
    vocabulary: int
    positions: int
    eos_tokens: tuple[int, ...]
    tokenizer_sha256: str | None
    slots: int = 0
    beside: Mapping[str, Any] = field(default_factory=dict)


def whole_distribution(
    tokens: Sequence[Any], logarithms: Sequence[Any], vocabulary: int, where: str
) -> NDArray[np.float32]:
    """Return the log-probabilities of all V tokens by token id, float32 [V].

    ``logarithms[i]`` is that of token id ``tokens[i]``; ids come in any order. None is the logarithm of probability 0,
    since JSON has no infinity and servers write null. Errors name ``where``.

    Raises:
        InputError: A token is missing, or is beyond the vocabulary.
        OperationError: A logarithm is no number, or the probabilities do not sum to 1.
    """
    nulls = sum(value is None for value in logarithms)
    try:
        ids = np.array(tokens, dtype=np.int64)
        values = np.array([-np.inf if value is None else value for value in logarithms], dtype=np.float64)
    except (TypeError, ValueError):
        raise OperationError(f"{where}: not all of the server's token ids and log-probabilities are numbers") from None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InputError(
            f"{where}: the server returned token {int(ids.max())}, beyond the vocabulary of {vocabulary:,}: write the "
            "server's number of tokens as vocabulary in the side's settings"
        )
    if unknown := int(np.isnan(values).sum()):
        raise OperationError(
            f"{where}: {unknown:,} of the server's log-probabilities are NaN; a distribution has numbers"
        )
    distribution = np.full(vocabulary, np.nan)
    distribution[ids] = values
    if missing := int(np.isnan(distribution).sum()):
        raise InputError(
            f"{where}: the server returned {vocabulary - missing:,} of {vocabulary:,} log-probabilities; a "
            "distribution needs all of them: vLLM has them with --max-logprobs -1, and a server that cannot return "
            'them all can be compared at temperature 0, with api = "openai"'
        )
    with np.errstate(over="ignore"):
        total = float(np.exp(distribution).sum())
    if not abs(total - 1) < 1e-2:
        of_nulls = f", with 0 for {nulls:,} that are null" if nulls else ""
        raise OperationError(
            f"{where}: the server's probabilities sum to {total:.4g}{of_nulls}; those of a distribution sum to 1"
        )
    return distribution.astype(np.float32)


NAMED_BY_ID: Final = "token_id:"  # the name of a token that is requested by its id


_CACHE_INFO: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_VLLM_CACHE: Final = ("cache_dtype", "block_size", "enable_prefix_caching", "kv_cache_dtype_skip_layers")
_VLLM_MEMORY: Final = ("kv_cache_memory_bytes", "kv_cache_size_tokens")
_REFUSES_ALL: Final = "greater than max allowed"
_NAMED: Final = 256  # tokens whose texts distinguish tokenizers, too: one may have no token of ``PROBE``


class Vllm:
    """``vllm serve``, started with ``--max-logprobs -1`` or with kvdrift's processor."""

    health: Final = "/health"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/version``, ``/v1/models`` and the tokens of a text."""
        version = connection.optional_object("/version")
        if "version" not in version:
            raise InputError(
                f"{where}: {connection.url} is no vLLM: it has no /version; as api in the side's settings write its "
                f"kind: {LLAMA_SERVER}, {SGLANG} or {OPENAI}"
            )
        model = first_model(connection, where)
        reported = {
            "server": "vllm", "version": version["version"],
            **{name: model.get(name) for name in ("id", "root", "parent")},
        }  # fmt: skip
        cache = _CACHE_INFO.search(connection.optional("/metrics").text)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', cache[1])) if cache else {}
        reported |= {name: labels.get(name) for name in _VLLM_CACHE}
        memory = {name: int(labels[name]) for name in _VLLM_MEMORY if labels.get(name, "").isdigit()}
        tokenizer = probed_tokenizer(
            connection, {"model": model["id"], "prompt": PROBE, "add_special_tokens": False},
            {"model": model["id"], "tokens": list(range(_NAMED))},
        )  # fmt: skip
        positions = int(model.get("max_model_len") or 0)
        return ServerFacts(reported, settings.vocabulary, positions, (), tokenizer, beside=memory)

    def distribution(self, connection: Connection, facts: ServerFacts, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logarithms of the next token's probabilities, float32 [V]."""
        body = {
            "model": facts.reported["id"], "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": -1, "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }  # fmt: skip
        try:
            answer = connection.ask("/v1/completions", body)
        except InputError as error:
            if _REFUSES_ALL not in str(error):
                raise
            raise InputError(
                f"{connection.url}: the server returns fewer log-probabilities than its {facts.vocabulary:,} tokens: "
                "start it with --max-logprobs -1"
            ) from None
        try:
            likely: dict[str, Any] = answer["choices"][0]["logprobs"]["top_logprobs"][0] or {}
            ids = [int(name.removeprefix(NAMED_BY_ID)) for name in likely]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise OperationError(
                f"{connection.url}/v1/completions: the answer has no log-probabilities by token id"
            ) from None
        return whole_distribution(ids, list(likely.values()), facts.vocabulary, connection.url)


def first_model(connection: Connection, where: str) -> dict[str, Any]:
    """Return the report of an OpenAI-compatible server about the model that it serves."""
    models = connection.optional_object("/v1/models").get("data")
    if not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise InputError(f"{where}: {connection.url}/v1/models lists no model")
    return dict(models[0])


def probed_tokenizer(connection: Connection, body: dict[str, Any], named: dict[str, Any] | None = None) -> str | None:
    """Return SHA-256 of the tokens of a text that distinguishes tokenizers; None if the server cannot tokenize.

    ``body`` asks ``/tokenize``. ``named``, if given, asks ``/detokenize`` for the text of tokens, which counts, too.
    """
    tokens = connection.optional_object("/tokenize", body).get("tokens")
    texts = [] if named is None else [connection.optional_object("/detokenize", named).get("prompt")]
    found = [answer for answer in (tokens, *texts) if answer]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest() if found else None


_SGLANG_MODEL: Final = ("model_path", "tokenizer_path", "weight_version")
_SGLANG_SERVER: Final = ("version", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size")


class Sglang:
    """``python -m sglang.launch_server``."""

    health: Final = "/health"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/get_model_info``, ``/server_info`` and the tokens of a text."""
        model = connection.optional_object("/get_model_info") or connection.optional_object("/model_info")
        if "model_path" not in model:
            raise InputError(
                f"{where}: {connection.url} is no SGLang: it has no /get_model_info; write its kind as api in the "
                "settings"
            )
        server = connection.optional_object("/server_info") or connection.optional_object("/get_server_info")
        reported = {
            "server": "sglang",
            **{name: model.get(name) for name in _SGLANG_MODEL},
            **{name: server.get(name) for name in _SGLANG_SERVER},
        }
        tokenizer = probed_tokenizer(connection, {"prompt": PROBE, "add_special_tokens": False})
        positions = int(server.get("context_length") or 0)
        return ServerFacts(reported, settings.vocabulary, positions, (), tokenizer)

    def distribution(self, connection: Connection, facts: ServerFacts, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logarithms of the next token's probabilities, float32 [V]."""
        sampling = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        body = {
            "input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True,
            "top_logprobs_num": facts.vocabulary, "stream": False,
        }  # fmt: skip
        answer = connection.ask("/generate", body)
        try:
            likely = answer["meta_info"]["output_top_logprobs"][0] or []
            logarithms, ids = [entry[0] for entry in likely], [entry[1] for entry in likely]
        except (KeyError, IndexError, TypeError):
            raise OperationError(f"{connection.url}/generate: the answer has no output_top_logprobs") from None
        return whole_distribution(ids, logarithms, facts.vocabulary, connection.url)


class OpenAi:
    """A server with ``/v1/completions`` whose answers have token ids."""

    health: Final = "/v1/models"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/v1/models`` and, if the server has them, ``/version`` and ``/props``."""
        model = first_model(connection, where)
        reported = {
            "server": "openai",
            **{name: model.get(name) for name in ("id", "root", "owned_by")},
            "version": connection.optional_object("/version").get("version"),
            "build_info": connection.optional_object("/props").get("build_info"),
        }
        positions = int(model.get("max_model_len") or 0)
        return ServerFacts(reported, settings.vocabulary, positions, (), None)

    def written(
        self, connection: Connection, facts: ServerFacts, count: int, tokens: Sequence[int]
    ) -> tuple[list[int], bool]:
        """Return up to ``count`` tokens that a server writes after a history, and whether it ended the text there."""
        body = {
            "model": facts.reported["id"], "prompt": list(tokens), "max_tokens": count, "temperature": 0.0,
            "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        }  # fmt: skip
        answer = connection.ask("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            return _token_ids(choice), choice.get("finish_reason") == "stop"
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{connection.url}/v1/completions: the answer has no token ids, by which texts are compared: "
                "neither token_ids, nor logprobs.content with ids, nor logprobs.tokens of the form token_id:7"
            ) from None


def _token_ids(choice: dict[str, Any]) -> list[int]:
    """Return the token ids of a choice, from whichever of three places the server uses."""
    if choice.get("token_ids") is not None:
        return [int(token) for token in choice["token_ids"]]
    logprobs = choice["logprobs"]
    if logprobs.get("content") is not None:
        return [int(entry["id"]) for entry in logprobs["content"]]
    if not all(name.startswith(NAMED_BY_ID) for name in logprobs["tokens"]):
        raise ValueError
    return [int(name.removeprefix(NAMED_BY_ID)) for name in logprobs["tokens"]]


SAVED: Final = "kvdrift-prompt.bin"  # the file of a saved slot, in the folder that the server was given for such files

_LLAMA_MODEL: Final = ("n_vocab", "n_embd", "n_params", "n_ctx_train", "size", "vocab_type")
_LLAMA_PROPERTIES: Final = ("build_info", "model_ftype", "bos_token", "eos_token")
_LLAMA_PARAMETERS: Final = ("speculative.types", "lora")

_vocabularies: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}  # by address and the server's report


class LlamaServer:
    """llama-server of llama.cpp."""

    health: Final = "/health"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/props`` and ``/v1/models``, and for the names of all tokens."""
        properties = connection.optional_object("/props")
        if "total_slots" not in properties:
            raise InputError(
                f"{where}: {connection.url} is no llama-server: it has no /props; write its kind as api in the settings"
            )
        models = connection.optional_object("/v1/models").get("data") or [{}]
        meta = models[0].get("meta") or {}
        defaults = properties.get("default_generation_settings") or {}
        parameters = defaults.get("params") or {}
        vocabulary = settings.vocabulary or int(meta.get("n_vocab") or 0)
        if not vocabulary:
            raise InputError(
                f"{where}: {connection.url} does not report its number of tokens; write vocabulary in the settings"
            )
        reported = {
            "server": "llama-server",
            "model": str(properties.get("model_path", "")).rpartition("/")[2],
            **{name: properties.get(name) for name in _LLAMA_PROPERTIES},
            **{name: meta.get(name) for name in _LLAMA_MODEL},
            **{name: parameters.get(name) for name in _LLAMA_PARAMETERS},
            "chat_template": _sha256(properties.get("chat_template") or ""),
        }
        names, ends = _vocabulary(connection, vocabulary, json.dumps(reported), properties.get("eos_token"))
        slots, entries = int(properties["total_slots"]), int(defaults.get("n_ctx") or 0)
        beside = {"slots": slots, "entries": entries}
        return ServerFacts(reported, vocabulary, entries, ends, names, slots, beside)

    def take(self, connection: Connection, slot: int, tokens: Sequence[int], *, cached: bool) -> int:
        """Make a slot hold a whole history, ``tokens``, and return how many of its tokens the server computed anew.

        ``cached``: whether the slot's present content may be used.

        Raises:
            LostServerError: The server was gone, and is back.
        """
        return _computed(connection, slot, self._complete(connection, slot, tokens, cached=cached, vocabulary=0))

    def distribution(
        self, connection: Connection, slot: int, tokens: Sequence[int], vocabulary: int, *, cached: bool = True
    ) -> tuple[NDArray[np.float32], int]:
        """Make a slot hold ``tokens``; return the log-probabilities after them, [V], and how many tokens were computed.

        Raises:
            LostServerError: The server was gone, and is back.
            InputError: The distribution lacks tokens.
        """
        answer = self._complete(connection, slot, tokens, cached=cached, vocabulary=vocabulary)
        completions = answer.get("completion_probabilities") or [{}]
        likely = completions[0].get("top_logprobs") or []
        try:
            ids, logarithms = [entry["id"] for entry in likely], [entry["logprob"] for entry in likely]
        except (KeyError, TypeError):
            raise OperationError(f"{connection.url}/completion: log-probabilities have no token ids") from None
        return whole_distribution(ids, logarithms, vocabulary, connection.url), _computed(connection, slot, answer)

    def slot_bytes(self, connection: Connection, slot: int) -> int | None:
        """Return the bytes of a slot's saved state; None if the server was not started to save slots."""
        written = connection.optional_object(f"/slots/{slot}?action=save", {"filename": SAVED}).get("n_written")
        return int(written) if written else None

    @staticmethod
    def _complete(
        connection: Connection, slot: int, tokens: Sequence[int], *, cached: bool, vocabulary: int
    ) -> dict[str, Any]:
        """Decode ``tokens`` in a slot and return the answer, which has a distribution unless ``vocabulary`` is 0."""
        body = {
            "prompt": list(tokens), "id_slot": slot, "cache_prompt": cached, "n_predict": 1 if vocabulary else 0,
            "n_probs": vocabulary, "samplers": [], "post_sampling_probs": False, "temperature": 1.0, "seed": 1,
            "stream": False,
        }  # fmt: skip
        answer = connection.ask_once("/completion", body)
        if not isinstance(answer, dict) or answer.get("id_slot") != slot:
            raise OperationError(
                f"{connection.url}/completion: slot {slot} was requested, and the answer does not name it as id_slot; "
                "another slot does not hold the stream's cache"
            )
        return answer


KINDS: Final[dict[str, LlamaServer | Vllm | Sglang | OpenAi]] = {
    LLAMA_SERVER: LlamaServer(), VLLM: Vllm(), SGLANG: Sglang(), OPENAI: OpenAi(),
}  # fmt: skip
"""The kinds of servers by the name of their interface."""


def _computed(connection: Connection, slot: int, answer: dict[str, Any]) -> int:
    """Return how many of the sent tokens the server computed; the others were in its cache."""
    timings = answer.get("timings")
    if not isinstance(timings, dict) or not isinstance(timings.get("prompt_n"), int):
        raise OperationError(
            f"{connection.url}/completion: slot {slot}: the answer does not report how many tokens were computed "
            "(timings.prompt_n), so that decoding cannot be distinguished from reading a prompt"
        )
    return int(timings["prompt_n"])


def _vocabulary(connection: Connection, vocabulary: int, reported: str, eos: Any) -> tuple[str, tuple[int, ...]]:
    """Return SHA-256 of the names of a server's tokens, and the tokens that end a text.

    They are requested once for each address and report, ``reported``; ``eos`` is the text of the EOS.
    """
    key = (connection.url, reported)
    if key not in _vocabularies:
        likely = all_tokens(connection, vocabulary)
        ids, logarithms = [entry["id"] for entry in likely], [entry["logprob"] for entry in likely]
        whole_distribution(ids, logarithms, vocabulary, connection.url)
        names = sorted((entry["id"], entry.get("bytes") or entry.get("token")) for entry in likely)
        _vocabularies[key] = _sha256(json.dumps(names)), _ends(connection, eos)
    return _vocabularies[key]


def all_tokens(connection: Connection, vocabulary: int) -> list[dict[str, Any]]:
    """Return a server's report on each of its ``vocabulary`` tokens: id, text, bytes, and a log-probability."""
    body = {
        "prompt": [0], "n_predict": 1, "n_probs": vocabulary, "samplers": [], "cache_prompt": False, "stream": False,
    }  # fmt: skip
    answer = connection.ask("/completion", body)
    return (answer.get("completion_probabilities") or [{}])[0].get("top_logprobs") or []


def _ends(connection: Connection, eos: Any) -> tuple[int, ...]:
    """Return the tokens at which the server ends a text, its EOS first.

    No report lists these tokens, but the answer to a request with ``ignore_eos`` lists the tokens that it excludes: all
    that llama.cpp calls ends of generation.
    """
    body = {"prompt": [0], "n_predict": 0, "ignore_eos": True, "cache_prompt": False, "stream": False}
    excluded = (connection.ask("/completion", body).get("generation_settings") or {}).get("logit_bias") or []
    ends = sorted(entry["token"] for entry in excluded)
    text = {"content": eos or "", "add_special": False, "parse_special": True}
    tokens = connection.ask("/tokenize", text).get("tokens") if eos else []
    eos_tokens = tokens if isinstance(tokens, list) and len(tokens) == 1 and isinstance(tokens[0], int) else []
    return tuple(dict.fromkeys([*eos_tokens, *ends]))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

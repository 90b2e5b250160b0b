"""SGLang's own server: whole laws of histories that are given as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.apis.api import PROBE, ServerFacts, whole_law
from kvdrift.generator.engines.http.apis.vllm import probed_tokenizer
from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.settings import ServerSettings
from kvdrift.schema.errors import InputError, OperationError

_MODEL: Final = ("model_path", "tokenizer_path", "weight_version")
_SERVER: Final = ("version", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size")


class Sglang:
    """``python -m sglang.launch_server``."""

    health: Final = "/health"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/get_model_info``, ``/server_info`` and the tokens of a text."""
        model = connection.said("/get_model_info") or connection.said("/model_info")
        if "model_path" not in model:
            raise InputError(f"{where}: {connection.url} is no SGLang: it has no /get_model_info; write another api")
        server = connection.said("/server_info") or connection.said("/get_server_info")
        said = {
            "server": "sglang",
            **{name: model.get(name) for name in _MODEL},
            **{name: server.get(name) for name in _SERVER},
        }
        tokenizer = probed_tokenizer(connection, {"prompt": PROBE, "add_special_tokens": False})
        positions = int(server.get("context_length") or 0)
        return ServerFacts(said, settings.vocabulary, positions, (), tokenizer)

    def law(self, connection: Connection, facts: ServerFacts, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logarithms of the next token's probabilities, float32 [V]."""
        sampling = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        body = {
            "input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True,
            "top_logprobs_num": facts.vocabulary, "stream": False,
        }  # fmt: skip
        answer = connection.ask("/generate", body)
        try:
            likely = answer["meta_info"]["output_top_logprobs"][0] or []
            logarithms, ids = [one[0] for one in likely], [one[1] for one in likely]
        except (KeyError, IndexError, TypeError):
            raise OperationError(f"{connection.url}/generate: the answer has no output_top_logprobs") from None
        return whole_law(ids, logarithms, facts.vocabulary, connection.url)

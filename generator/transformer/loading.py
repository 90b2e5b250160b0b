"""A transformer as the model of a study, and loading it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.cpu_products import replace_activations, replace_linear_layers
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.interface import IMPLEMENTATION
from kvdrift.generator.attention.parts import UNKNOWN, attention_modules
from kvdrift.generator.attention.row_invariance import find_row_multiple, threads_agree
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.identity import ActionIdentity, ModelIdentity
from kvdrift.generator.transformer.decoder import Decoder, check_prompt, is_small, whole_sums
from kvdrift.generator.transformer.files.configuration import causal_class, known_by_family, library, quiet, rope_switch
from kvdrift.generator.transformer.files.fingerprints import model_identity
from kvdrift.generator.transformer.files.gguf_folders import without_bar
from kvdrift.generator.transformer.files.local_folders import (
    GGUF_WEIGHTS,
    is_gguf,
    is_multimodal,
    model_source,
    stored_bytes,
)
from kvdrift.generator.transformer.files.text_ends import TextEnds, model_ends
from kvdrift.generator.transformer.fused.layers import join_weights, layers_fault
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.generator.transformer.model_checks import (
    Proof,
    check_complete,
    checked_configuration,
    remember,
    remembered,
)
from kvdrift.generator.transformer.prompts.document import PreparedPrompt
from kvdrift.generator.transformer.proof import Probe, Reference, prove, reference_forward
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, first_line, reading
from kvdrift.schema.progress import SILENT

_UNKNOWN = ModelIdentity(None, None)
_PAIRS_AT_ONCE = 96  # with more, the rows of a step would exceed a core's cache


@dataclass(frozen=True)
class LoadedModel(Decoder):
    """A transformer as a ``kvdrift.generator.generation.model.Model``.

    ``files`` are fingerprints of the files from which the model was loaded, and ``stored_bytes`` is the size of its
    weight files; both are unknown if the model was made in memory.
    """

    files: ModelIdentity = _UNKNOWN
    stored_bytes: int | None = None

    @property
    def models(self) -> list[LoadedModel]:
        """A list with the model itself."""
        return [self]

    def ending(self, eos_tokens: tuple[int, ...]) -> Self:
        """Return the same model with other tokens that end a text."""
        return replace(self, eos_tokens=eos_tokens)

    @property
    def pairs_at_once(self) -> int:
        """The most pairs (action, replicate) that documents decoded side by side have; 0 for one document at a time."""
        busy = (
            self.threads != 1 or not is_small(self.network) or self.device != "cpu"
        )  # with a large model, or on a GPU, computing takes most of the time
        alone = busy or self.batch_deviation or self.switch is not None  # all rows of a step share RoPE's frequencies
        return 0 if alone else _PAIRS_AT_ONCE

    def twins(self, count: int, before: Callable[[], None]) -> Iterator[Self]:
        """Yield ``count`` copies of the model for as many threads, each with its share of the available memory.

        Each copy has modules of its own over the same weights, so that hooks and state belong to one thread. ``before``
        is called before every pass through the network; an error that it raises ends the pass.
        """
        for _ in range(count):
            network = copy.deepcopy(self.network, {id(weight): weight for weight in self.network.parameters()})
            yield replace(self, network=network, memory_share=self.memory_share / count, before_pass=before)

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units."""
        return replace(self.files, eos_tokens=self.eos_tokens).of(action.parts)

    def weight_bytes(self, action: Action) -> int | None:  # noqa: ARG002 - all actions have its weights
        """Return the bytes of the weight files of the model that decodes an action; None if they are unknown."""
        return self.stored_bytes

    def prepare(
        self, document: Document, actions: Sequence[Action], horizon: int, sharing: int | None = None
    ) -> PreparedPrompt:
        """Prefill the document's prompt, and make the cache of every action.

        ``sharing`` is the number of actions among which the prefill's time is divided, by default ``len(actions)``.
        """
        check_prompt(document, horizon, self.positions, self.shape.vocabulary, self.switch)
        return PreparedPrompt(self, document, actions, horizon, sharing)


# The beginnings of tensor names of a language model within a multimodal checkpoint, and of the language model alone.
_OF_TOWERS = {
    r"^model\.language_model\.": "model.", r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}  # fmt: skip


def load_model(
    model_id: str, *, device: str = "cpu", dtype: str = "float32", revision: str | None = None,
    device_map: str | None = None, logits_dtype: str | None = None, name: str | None = None,
    say: Callable[[str], None] = SILENT.say,
) -> LoadedModel:  # fmt: skip
    """Load a model through transformers: ``kvdrift/tiny``, a local folder or a Hugging Face id.

    Only the result refers to the network, so the network is freed together with the result. The device map "auto"
    spreads the layers over the GPUs by accelerate; ``device`` is then not used. With ``logits_dtype`` "float32" logits
    are float32, by default they are rounded to ``dtype``. The store knows the model by ``name``, by default by
    ``model_id``. ``say`` receives a line before a model that is not small is proven, and a line after it.

    Raises:
        InputError: The model cannot be loaded or placed, is not supported, or its files changed meanwhile.
    """
    config = checked_configuration(model_id, dtype, revision, device, device_map)
    before = model_identity(model_id, revision)
    network = load_network(model_id, revision, dtype, device_map, config)
    files = model_identity(model_id, revision)
    if before.weights_sha256 not in (None, files.weights_sha256):  # not on this machine before, or the same
        raise InputError(f"model.id = '{model_id}': its files changed while they were loaded; run the command again")
    if not attention_modules(network):
        line = "its network has no attention by the name model.layers[i].self_attn"
        raise InputError(f"model.id = '{model_id}': not supported: {line}")
    device = _place(network, device, device_map)
    network.eval().requires_grad_(requires_grad=False)
    proof = remembered(files.weights_sha256, dtype, device)
    if known_by_family(config) and not is_multimodal(model_id, revision):
        proof = Proof(None, turned_by_halves=True)
    small = is_small(network)
    threads = 1 if small else None
    probe = Probe.of(config.vocab_size)
    reference = None
    if proof is None:  # the network's parts are still transformers' own
        with torch_threads(threads):
            reference = _reference(model_id, network, probe, SILENT.say if small else say)
    if torch.device(device).type == "cpu":
        replace_activations(network)
        replace_linear_layers(network)
    elif torch.device(device).type == "cuda" and layers_fault(network) is None:
        join_weights(network)
    if torch.device(device).type == "cpu" and threads is None:
        most = torch.get_num_threads()
        threads = most if most == 1 or threads_agree(network, most) else 1
    with torch_threads(threads), whole_sums(device):
        rows = find_row_multiple(network)
    model = LoadedModel(
        id=model_id if name is None else name, network=network, device=device, dtype=dtype,
        eos_tokens=TextEnds.of(model_ends(model_id, revision), config.vocab_size).tokens,
        positions=config.max_position_embeddings,
        shape=ModelShape.of(config.to_dict(), dtype, device), rows=rows, threads=threads, files=files,
        logits_dtype=logits_dtype, stored_bytes=stored_bytes(model_id, revision), switch=rope_switch(config),
    )  # fmt: skip
    if reference is not None:
        proof = _proof(model, probe, reference, SILENT.say if small else say)
        remember(files.weights_sha256, dtype, device, model_id, proof)
    if proof is not None and proof.refusal is not None:
        raise InputError(f"model.id = '{model_id}': not supported: {proof.refusal}")
    return replace(model, traits=UNKNOWN if proof is None else proof.traits(config.model_type))


def _reference(model_id: str, network: Any, probe: Probe, say: Callable[[str], None]) -> Reference:
    """Report that the model is being proven, and compute the probe by transformers alone."""
    say(f"proving model '{model_id}', once for these weights: each layer is compared with transformers' own")
    with reading(f"model.id = '{model_id}': not supported: its own forward pass fails on a probe", Exception):
        return reference_forward(network, probe)


def _proof(model: LoadedModel, probe: Probe, reference: Reference, say: Callable[[str], None]) -> Proof:
    """Compare a model with the reference, and report how long both took."""
    began = time.perf_counter()
    proof = prove(model, probe, reference)
    seconds = reference.seconds + time.perf_counter() - began
    result = "proven" if proof.refusal is None else "refused"
    say(f"model '{model.id}' is {result} after {seconds:.1f} s, {reference.seconds:.1f} s of which transformers took")
    return proof


def load_network(
    model_id: str, revision: str | None, dtype: str, device_map: str | None, config: Any,
    attention: str = IMPLEMENTATION,
) -> Any:  # fmt: skip
    """Load transformers' own network, with the implementation of ``attention`` by its name; on the CPU, or as mapped.

    Raises:
        InputError: The weights cannot be loaded, or are not complete.
    """
    loader: Any = library().AutoModelForCausalLM
    dequantized = is_gguf(model_id)
    keywords: dict[str, Any] = {"gguf_file": GGUF_WEIGHTS, "config": config} if dequantized else {}
    if is_multimodal(model_id, revision):  # the rest of the checkpoint is not loaded
        loader, keywords = getattr(library(), causal_class(config) or ""), {"config": config, "key_mapping": _OF_TOWERS}
    quantized = getattr(config, "quantization_config", None) or {}
    if quantized.get("quant_method") == "compressed-tensors":  # its layers would have no weights to multiply with
        keywords["quantization_config"] = library().CompressedTensorsConfig(dequantize=True)
    bar = without_bar() if dequantized else nullcontext()
    with reading(f"model.id = '{model_id}': cannot load its weights", Exception), quiet(), bar:
        network, loaded = loader.from_pretrained(
            model_source(model_id),
            revision=revision,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            trust_remote_code=False,
            device_map=device_map,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            **keywords,
        )
    # Transformers fills missing weights with random numbers and only warns.
    check_complete(model_id, [*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    return network


def _place(network: Any, device: str, device_map: str | None) -> str:
    """Move the network to the device, unless a device map has placed it; return the device for input tokens."""
    if device_map is not None:
        if any(parameter.is_meta for parameter in network.parameters()):  # they lie on disk or in the host's memory
            problem = "the weights do not fit the memory of the devices here"
            raise InputError(f"model.device_map = '{device_map}': {problem}")
        return str(network.get_input_embeddings().weight.device)
    try:
        network.to(torch.device(device))
        for module in network.modules():  # frequencies of RoPE, some of which transformers holds as plain attributes
            plain = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
            vars(module).update((name, value.to(device)) for name, value in plain.items())
    except RuntimeError as error:  # out of memory
        raise InputError(f"model.device = '{device}': {first_line(error)}") from error
    return device

"""Time decoding of many model families beside transformers' ``generate``.

    python -m benchmarks.families --device cuda                       # all that begin within five minutes
    python -m benchmarks.families --device cuda --names gpt-oss gemma-4
    python -m benchmarks.families --small --names llama-1b            # the same code at tiny widths, on a CPU

Models have random weights and the widths of published ones: the first four are whole, the others have a few layers.
Each is saved and then loaded as a study loads it, so it is proven, too. It decodes one random document: the control,
SnapKV keeping a quarter and recent keeping 512 entries together, and then policy h2o keeping 512. Each is decoded
twice, and the second time counts. ``generate`` samples as many sequences of the same prompt as there are replicates;
its step is the median of its steps.

A row is one step, and its rate is in next-token distributions; a distribution is cheaper than one of ``generate`` by
the ratio. A control other than 0 and a model that fails are reported below the table, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.cases import SEED
from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, run
from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.generator.transformer.files.configuration import quiet
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.log.units.unit import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import first_line
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import CONTROL_ACTION
from kvdrift.schema.study.actions import ActionSection

_LOWEST_TOKEN = 10  # below are a tokenizer's special tokens
_WARM_UP = 3  # steps of ``generate`` that do not count


@dataclass(frozen=True)
class Family:
    """The widths of a model; ``others`` are the further keys of its configuration."""

    kind: str  # model_type
    width: int
    inner_width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    others: Mapping[str, Any] = field(default_factory=dict)

    def configuration(self, positions: int, *, small: bool) -> Any:
        """Return transformers' configuration of a model with so many positions; with ``small``, at tiny widths."""
        sizes = {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.inner_width,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size, "max_position_embeddings": positions, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 0, "tie_word_embeddings": False,
        }  # fmt: skip
        others = dict(self.others) | (_SMALL if small else {})
        if small and "layer_types" in others:  # one layer of each type
            others["layer_types"] = list(dict.fromkeys(others["layer_types"]))
            others["num_hidden_layers"] = len(others["layer_types"])
        return transformers.AutoConfig.for_model(self.kind, **sizes | others)


_SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "global_head_dim": 32, "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
}  # fmt: skip


def _windows(layers: int, window: int, every: int) -> dict[str, Any]:
    """Return the keys of layers with a window, of which one in ``every``, the last, attends to the whole prompt."""
    whole, windowed = "full_attention", "sliding_attention"
    types = [windowed if number % every else whole for number in range(1, layers + 1)]
    return {"sliding_window": window, "layer_types": types}


def _linear(layers: int) -> dict[str, Any]:
    """Return the keys of layers of which three in four have linear attention."""
    types = ["linear_attention" if number % 4 else "full_attention" for number in range(1, layers + 1)]
    return {"layer_types": types}


_TIED = {"tie_word_embeddings": True}
_WHOLE = {"sliding_window": None}
_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4}
_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}

FAMILIES: dict[str, Family] = {
    # Whole models.
    "llama-1b": Family("llama", 2048, 8192, 16, 32, 8, 64, 128_256),
    "mistral-1b": Family("mistral", 2048, 8192, 16, 32, 8, 64, 128_256, _WHOLE),
    "gemma-3-1b": Family("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262_144, _windows(26, 512, 6) | _TIED),
    "qwen-3.5-0.8b": Family("qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248_320, _linear(24) | _TIED),
    # A few layers of larger models, and of other families.
    "gpt-oss": Family("gpt_oss", 2880, 2880, 2, 64, 8, 64, 201_088, _windows(2, 128, 2) | _OSS),
    "gemma-4": Family("gemma4_text", 1536, 6144, 6, 8, 1, 256, 262_144, _windows(6, 512, 6) | {"global_head_dim": 512}),
    "gemma-2": Family("gemma2", 2304, 9216, 4, 8, 4, 256, 256_000, _windows(4, 512, 2) | _TIED),
    "qwen-3-moe": Family("qwen3_moe", 2048, 6144, 2, 32, 4, 128, 151_936, _MOE),
    "mixtral": Family("mixtral", 4096, 14_336, 2, 32, 8, 128, 32_000, _WHOLE | {"num_local_experts": 8}),
    "falcon-h1": Family("falcon_h1", 1024, 2048, 3, 8, 2, 64, 32_784),
    "lfm-2": Family("lfm2", 1024, 6656, 4, 16, 8, 64, 65_536, {"layer_types": ["conv", "full_attention"] * 2}),
    "qwen-3": Family("qwen3", 1024, 3072, 4, 16, 8, 128, 151_936, _TIED),
    "qwen-2.5-0.5b": Family("qwen2", 896, 4864, 4, 14, 2, 64, 151_936, _TIED),
    "qwen-2.5-7b": Family("qwen2", 3584, 18_944, 3, 28, 4, 128, 152_064),
    "smollm-2": Family("llama", 576, 1536, 6, 9, 3, 64, 49_152, _TIED),
    "smollm-3": Family("smollm3", 2048, 11_008, 4, 16, 4, 128, 128_256, _TIED),
    "llama-8b": Family("llama", 4096, 14_336, 4, 32, 8, 128, 128_256),
    "mistral-7b": Family("mistral", 4096, 14_336, 4, 32, 8, 128, 32_768, _WHOLE),
    "phi-3": Family("phi3", 3072, 8192, 4, 32, 32, 96, 32_064, _WHOLE),
    "granite": Family("granite", 2048, 8192, 4, 32, 8, 64, 49_159, _TIED),
    "olmo-2": Family("olmo2", 4096, 11_008, 3, 32, 32, 128, 100_352),
    "starcoder-2": Family("starcoder2", 3072, 12_288, 3, 24, 2, 128, 49_152, _WHOLE),
}


@dataclass(frozen=True)
class Sizes:
    """The device and dtype of all models, and the sizes of what they decode; ``small`` models have tiny widths."""

    device: str
    dtype: str
    entries: int  # n
    replicates: int  # K
    horizon: int  # H
    small: bool

    @property
    def kept(self) -> int:
        """The entries that ``recent`` and ``h2o`` keep."""
        return min(512, self.entries // 4)

    def tokens(self, vocabulary: int) -> list[int]:
        """Return the tokens of the prompt."""
        drawn: list[int] = np.random.default_rng(SEED).integers(_LOWEST_TOKEN, vocabulary, self.entries).tolist()
        return drawn


def measure_family(name: str, family: Family, sizes: Sizes, folder: str) -> Measurement:
    """Measure one family's model, which is saved in ``folder``; what is wrong with it is a fact by its name."""
    config = family.configuration(sizes.entries + sizes.horizon + 1, small=sizes.small)
    network = random_network(config, sizes)
    step = generate_step(network, sizes)
    with quiet():
        network.save_pretrained(folder)
    del network
    free_memory()
    model = load_model(folder, device=sizes.device, dtype=sizes.dtype)
    rows = [BenchmarkRow(f"{name}, {config.num_hidden_layers} layers: generate", step, rate=sizes.replicates / step)]
    units: list[Unit] = []
    for part, actions in (("h2o", [policy_action(sizes)]), ("selectors", selecting_actions(sizes))):
        seconds, distributions, units = decode(model, actions, sizes)
        ratio = step / sizes.replicates / (seconds / distributions)
        rows.append(BenchmarkRow(f"{name}: {part}", seconds, None, None, distributions / seconds, "generate", ratio))
    moved = max(float(np.abs(units[-1].events[column].to_numpy()).max()) for column in ("delta", "f"))
    facts: dict[str, Any] = {f"rows_of_{name}_deviate_by": units[-1].record["batch_deviation"]}
    return rows, facts | ({name: f"the control's delta or f is {moved:.2g}, and must be 0"} if moved else {})


def selecting_actions(sizes: Sizes) -> list[Action]:
    """Return the actions that are decoded together; the control is the last."""
    snapkv = _action(name="snapkv", selector="snapkv", keep="1/4")
    recent = _action(name="recent", selector="recent", keep=sizes.kept)
    return [snapkv, recent, Action(CONTROL_ACTION, "full", Full(), Retention(None))]


def policy_action(sizes: Sizes) -> Action:
    """Return the action of a decode-time policy."""
    return _action(name="h2o", policy="h2o", keep=sizes.kept)


def _action(**keys: Any) -> Action:
    return build_action(ActionSection.model_validate(keys))


def random_network(config: Any, sizes: Sizes) -> Any:
    """Make transformers' own network of random weights on the device."""
    torch.manual_seed(0)
    loader: Any = transformers.AutoModelForCausalLM
    with torch.device(sizes.device), quiet():
        return loader.from_config(config, dtype=DTYPES[sizes.dtype]).eval()


def free_memory() -> None:
    """Give the memory of deleted networks back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _StepTimes(transformers.StoppingCriteria):
    """Notes when each step of ``generate`` ends, and never stops it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002 - transformers' convention
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.ends.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate_step(network: Any, sizes: Sizes) -> float:
    """Return the median seconds of a step of ``generate`` that samples K sequences; the first steps do not count."""
    tokens = torch.tensor([sizes.tokens(network.config.vocab_size)] * sizes.replicates, device=sizes.device)
    times = _StepTimes()
    with torch.inference_mode():
        network.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, max_new_tokens=sizes.horizon,
            min_new_tokens=sizes.horizon, stopping_criteria=[times],
        )  # fmt: skip
    return statistics.median(end - begin for begin, end in pairwise(times.ends[_WARM_UP:]))


def decode(model: LoadedModel, actions: Sequence[Action], sizes: Sizes) -> tuple[float, float, list[Unit]]:
    """Decode K replicates of the actions twice; return a step's seconds and distributions the second time, and units.

    The units are those of the second time.
    """
    tokens = tuple(sizes.tokens(model.network.config.vocab_size))
    document = Document("random", "RANDOM", "random", "random", "random", tokens)
    pending = [PendingUnit(action, 0, sizes.replicates) for action in actions]
    for _ in range(2):
        units = generate_units(model, "benchmark", document, pending, sizes.horizon, SEED)
    seconds, distributions = (
        sum(unit.record[name] for unit in units) / (sizes.horizon - 1)
        for name in ("decode_seconds", "kernel_evaluations")
    )
    return seconds, distributions, units


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure the families of ``--names`` in turn; none begins after ``--seconds``."""
    entries, replicates, horizon = (320, 2, 8) if options.small else (8000, 16, 32)
    sizes = Sizes(
        options.device, "float32" if options.small else "bfloat16", options.entries or entries,
        options.replicates or replicates, options.horizon or horizon, options.small,
    )  # fmt: skip
    gpu = torch.device(sizes.device).type == "cuda"
    yield (
        [],
        asdict(sizes)
        | {
            "processor": torch.cuda.get_device_name(sizes.device) if gpu else "a CPU",
            "versions": {
                "torch": torch.__version__,
                "CUDA": torch.version.cuda,
                "transformers": transformers.__version__,
            },
        },
    )
    begun, names = time.perf_counter(), options.names or list(FAMILIES)
    for number, name in enumerate(names):
        if time.perf_counter() - begun > options.seconds:
            yield [], {"not_begun": names[number:]}
            return
        try:
            rows, facts = measure_family(name, FAMILIES[name], sizes, str(folder / name))
        except Exception as error:  # noqa: BLE001 - the other families are measured
            rows, facts = [], {name: f"{type(error).__name__}: {first_line(error)}"}
        print(f"{name}: {facts.get(name, 'measured')}", file=sys.stderr, flush=True)
        yield rows, facts
        shutil.rmtree(folder / name, ignore_errors=True)
        free_memory()


if __name__ == "__main__":
    parser = benchmark_parser("families", "Time decoding of many model families beside transformers' generate.")
    parser.add_argument("--device", default="cpu", help="the device of all models")
    parser.add_argument("--names", nargs="+", choices=FAMILIES, help="the families to measure; by default all")
    parser.add_argument("--small", action="store_true", help="tiny widths in float32, which a CPU decodes")
    parser.add_argument("--entries", type=int, help="prompt length n; by default 8,000, small 320")
    parser.add_argument("--replicates", type=int, help="replicates K, and sequences; by default 16, small 2")
    parser.add_argument("--horizon", type=int, help="horizon H, at least 6; by default 32, small 8")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no family later than this")
    facts = run(parser, "distributions", measure_all)
    sys.exit(int(not FAMILIES.keys().isdisjoint(facts)))

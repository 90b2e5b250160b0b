"""``kvdrift run --dry-run``: the paper's studies without their data and weights, and what a run refuses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.command import call, mistake
from fixtures.small_study import ADDED_ACTION, run_of, write_study
from fixtures.study_files import load_study

from kvdrift.console import ConsoleProgress
from kvdrift.dry_run import timing as generation_time
from kvdrift.dry_run.timing import Sample, Seconds, StudyTime, study_time
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.material import gather_material
from kvdrift.flows.plan.making import primary_endpoints
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun, forecast
from kvdrift.generator.actions import build_actions
from kvdrift.generator.documents.registry import stratum_documents
from kvdrift.generator.documents.source import Candidate, HeldDocuments, where
from kvdrift.generator.generation import PendingUnit, Work
from kvdrift.generator.transformer.footprint import Footprint, local_footprint
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.log.store import Store
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.study import DocumentsSection, load_studies
from kvdrift.schema.tables import PLAIN, SCHEMA_VERSION
from kvdrift.stats.endpoints import Family

STUDIES = Path(__file__).parents[2] / "studies"
LLAMA = Footprint(ModelShape(32, 4096, 14_336, 32, 8, 128, 128_256, "bfloat16"), 15 * 2**30)
PAPER = ("paper_first", "paper_retention90")
STRATA = [f"{environment}-{length}" for environment in ("HELMET", "RULER") for length in ("4K", "16K", "32K")]


def dry_run(capsys: pytest.CaptureFixture[str], study: Path, *options: str | Path) -> str:
    code, out, err = call(capsys, "run", study, "--dry-run", *options)
    assert (code, err) == (0, "")
    return out


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder on a machine without models, with files of as many prompts as are asked for."""

    def candidates(
        sections: Sequence[DocumentsSection], _seed: int, _held: HeldDocuments
    ) -> list[dict[str, list[Candidate]]]:
        return [candidates_of(section) for section in sections]

    def candidates_of(section: DocumentsSection) -> dict[str, list[Candidate]]:
        names = {
            split: [f"{section.stratum_name}-{split}-{number}" for number in range(getattr(section, split))]
            for split in SPLITS
        }
        return {split: [Candidate(name, name, "", 0) for name in own] for split, own in names.items()}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "kvdrift.generator.transformer.files.local_folders.try_to_load_from_cache", lambda *_, **__: None
    )
    monkeypatch.setattr("kvdrift.flows.material.choose_candidates", candidates)
    return tmp_path


SERVED = ("--endpoint", "grpc://nowhere:1")  # it does not matter then which devices are here


@pytest.mark.usefixtures("elsewhere")
class TestPaperStudies:
    """Section 5.1: documents, replicates, horizon, actions and endpoints."""

    @pytest.mark.parametrize(
        ("name", "units", "development", "evaluation"),
        [
            ("paper_first", 288 * 4, 36 * 3 * 32, 288 * 3 * 64),
            ("paper_retention90", 288 * 3, 36 * 2 * 16, 288 * 2 * 32),
        ],
    )
    def test_documents_units_trajectories_and_what_cannot_be_known(
        self, capsys: pytest.CaptureFixture[str], name: str, units: int, development: int, evaluation: int
    ) -> None:
        out = dry_run(capsys, STUDIES / f"{name}.toml", *SERVED)
        assert evaluation in {55_296, 18_432}
        assert (
            out.count(f"development: 36 documents, {units // 8} units, {development:,} trajectories and 72 of the") == 2
        )
        assert out.count(f"288 documents, {units} units, {evaluation:,} trajectories and 576 of the") == 2
        assert out.count(f"{(evaluation + 576) * 128:,} events") == 2
        assert f"on meta-llama/Llama-3.1-8B-Instruct, H = 128; store {Path('stores').absolute()}" in out
        assert "on Qwen/Qwen2.5-7B-Instruct, H = 128" in out
        assert f"lengths are nominal in {', '.join(STRATA)}: " in out
        unchecked = [line for line in out.splitlines() if "not checked: " in line]
        for model_id in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct"):
            assert [f"'{model_id}'" in line for line in unchecked].count(True) == 1
        assert (len(unchecked), out.count("time: not measured")) == (4, 2)
        assert not Path("stores").exists()

    def test_bytes_where_the_configuration_is_at_hand(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Llama-3.1-8B: 32 layers, 8 KV heads of width 128, bfloat16: 128 KiB of payload to an entry."""
        monkeypatch.setattr("kvdrift.dry_run.description.local_footprint", lambda *_: LLAMA)
        monkeypatch.setattr("kvdrift.dry_run.description.memory_here", lambda *_: 80 * 2**30)
        out = dry_run(capsys, STUDIES / "paper_first.toml", *SERVED)
        assert "action snapkv-512: snapkv, 512 entries: 512 prompt entries, 64.5 MiB of prompt cache" in out
        assert ": 4,096 to 32,768 prompt entries, 512.0 MiB to 4.0 GiB of prompt cache" in out
        assert "memory of generation: 15.0 GiB of weights and " in out
        assert "64 of 64 replicates at once; 80.0 GiB available on cuda" in out

    def test_heads_that_share_a_budget(
        self, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bytes stay the same. In memory there may be 512 + 7 (512 - 102) = 3,382 entries for each of the 8 KV heads."""
        monkeypatch.setattr("kvdrift.dry_run.description.local_footprint", lambda *_: LLAMA)
        text, even = (STUDIES / "paper_first.toml").read_text(), "keep = 512\n"
        lines = []
        for number, keep in enumerate((even, even + 'budget = "adakv"\n', "keep = 3382\n")):
            study = elsewhere / f"study-{number}.toml"
            study.write_text(text.replace(even, keep))
            lines.append(
                [
                    line
                    for line in dry_run(capsys, study, *SERVED).splitlines()
                    if "action snapkv-512" in line or "memory of" in line
                ]
            )
        words = (
            "snapkv, 512 entries, shared by the heads of a layer (adakv): 512 prompt entries, 64.5 MiB of prompt cache"
        )
        assert words in lines[1][0]
        assert lines[0][0] == lines[1][0].replace(", shared by the heads of a layer (adakv)", "")
        assert lines[0][1] != lines[1][1] == lines[2][1]

    def test_bytes_that_no_action_can_evict(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """16 of the 32 layers see 1,025 positions: 1,024 entries of 4 KiB each; 64 MiB, and 3 MiB of states."""
        shape = replace(LLAMA.shape, windows=(1025,) * 16, state_bytes=3 * 2**20)
        monkeypatch.setattr("kvdrift.dry_run.description.local_footprint", lambda *_: replace(LLAMA, shape=shape))
        out = dry_run(capsys, STUDIES / "paper_first.toml", *SERVED)
        assert re.search(r"512 prompt entries, 99\.3 MiB .* 67\.0 MiB", out)

    def test_prompts_that_may_be_too_long_for_the_model(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Qwen2.5 has 32,768 positions, and a prompt at the label's bound leaves none for the horizon."""
        configured = {"max_position_embeddings": 32_768}
        monkeypatch.setattr("kvdrift.dry_run.description.local_configuration", lambda *_: configured)
        monkeypatch.setattr("kvdrift.dry_run.description.end_lines", lambda _: iter(()))
        out = dry_run(capsys, STUDIES / "paper_first.toml", *SERVED)
        assert len(re.findall(r"32,768 positions: .* 32,640 tokens .* HELMET-32K, RULER-32K\n", out)) == 2

    def test_strata_and_actions_are_those_of_the_published_results(self) -> None:
        """As the paper names them, and as the published numbers do."""
        actions_of = (["snapkv-512", "snapkv-half", "recent-half"], ["snapkv-90", "recent-90"])
        for name, actions in zip(PAPER, actions_of, strict=True):
            studies = load_studies(STUDIES / f"{name}.toml")
            models = [study.model.id.partition("/")[2] for study in studies]
            assert models == ["Llama-3.1-8B-Instruct", "Qwen2.5-7B-Instruct"]
            for study in studies:
                assert [section.stratum_name for section in study.documents] == STRATA
                assert [section.length for section in study.documents] == [4096, 16384, 32768] * 2
                assert [action.name for action in study.actions] == actions
                assert {tuple(len(section.tasks) for section in study.documents)} == {(6, 6, 6, 13, 13, 13)}

    def test_the_endpoints_of_the_second_study_are_one_family_of_eight(self) -> None:
        studies = load_studies(STUDIES / "paper_retention90.toml")
        endpoints = [primary_endpoints(study) for study in studies]
        named = itertools.product(("late_minus_early", "saturation"), ("snapkv-90", "recent-90"))
        assert [(e.quantity, e.action) for e in endpoints[0]] == list(named)
        assert sum(map(len, endpoints)) == studies[0].plan.family_size == 8
        assert Family("primary", tuple(endpoints[0]), 0.05, 8).level == pytest.approx(0.99375)

    def test_the_two_studies_take_different_parts_of_every_source(self) -> None:
        first, second = (load_studies(STUDIES / f"{name}.toml")[0] for name in PAPER)
        for one, other in zip(first.documents, second.documents, strict=True):
            assert (one.part_of_clusters, other.part_of_clusters) == ((1, 2), (2, 2)), where(one)
        assert first.study.seed != second.study.seed


def test_quickstart_is_exact(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    splits = {"development": Seconds(4.04, 114), "evaluation": Seconds(540, 1300)}
    found = StudyTime(splits, "cpu", 10.0, 3.2, [Sample(774, 12, 64, 1.0, 1.0, 0.0, 0.0)], 774.0)
    monkeypatch.setattr("kvdrift.dry_run.description.study_time", lambda *_: found)
    out = dry_run(capsys, STUDIES / "quickstart.toml", "--store", tmp_path / "store")
    assert "action snapkv-half: snapkv, half of the entries: 196 to 774 prompt entries" in out
    assert re.search(r"development: 18 documents, 72 units, 864 trajectories and 36 .*, 57,600 events", out)
    assert "nominal" not in out
    assert re.search(r"cpu \(float32\), .*: development 4 to 110 s, evaluation 9 to 22 min\n.*: 9\.6 to 24 min\n", out)


def test_bytes_are_those_that_eviction_measures() -> None:
    study = load_study(STUDIES / "quickstart.toml")
    footprint = local_footprint("kvdrift/tiny", "float32")
    assert footprint is not None
    document = stratum_documents(study.documents[0], 7)["development"][0]
    model = load_model("kvdrift/tiny")
    weights = sum(parameter.nbytes for parameter in model.network.parameters())
    assert footprint.weight_bytes == pytest.approx(weights, rel=0.01)  # norms and biases are left out
    prompt = Prompt(model, document.tokens, window=64)
    for action in build_actions(study):
        kept = action.retention.kept(document.prompt_tokens)
        compact = evict(prompt.layers, action.selector, kept)
        indexed = action.removes(document.prompt_tokens, study.study.horizon)
        assert indexed is not action.control
        layers = range(len(prompt.layers))
        bytes_held = footprint.cache_bytes(
            [kept for _ in layers], action.holdings(len(layers)), indexed=layers if indexed else ()
        )
        assert bytes_held == compact.stored_bytes


def test_a_family_smaller_than_its_members_is_refused(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, ("draws = 200", "draws = 200\nfamily_size = 2")))
    with pytest.raises(InputError, match=r"plan.family_size = 2: this model alone has 3 endpoints"):
        gather_material(study, offline=True)


# --- Time ------------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """A clock that generation moves on: seconds by prompt tokens and their pairs, by steps, and by pairs in a step."""

    token: float = 0.01
    before: float = 1e-5  # for each token, and each token before it
    step: float = 0.1
    entry: float = 0.0  # for each step and prompt token
    pair: float = 0.02
    now: float = 0.0
    made: list[tuple[str, int, int, int]] = field(default_factory=list)  # document, prompt tokens, pairs, positions

    def perf_counter(self) -> float:
        return self.now

    def prefill(self, tokens: int) -> float:
        return tokens * (self.token + self.before * tokens)

    def decode(self, tokens: int, pairs: int, positions: int) -> float:
        return (positions - 1) * (self.step + self.entry * tokens + self.pair * pairs)

    def generate_units(
        self, _model: Any, _study: str, document: Document, pending: Iterable[PendingUnit], horizon: int, _seed: int
    ) -> list[Any]:
        units, prefill, items = [], self.prefill(document.prompt_tokens), list(pending)
        for estimator in sorted({item.estimator for item in items}):
            pairs = sum(item.count for item in items if item.estimator == estimator)
            decode = self.decode(document.prompt_tokens, pairs, horizon)
            self.now += prefill + decode
            record = {"estimator": estimator, "prefill_seconds": prefill, "decode_seconds": decode}
            units.append(SimpleNamespace(record=record))
            prefill = 0.0
        self.made.append((document.doc, document.prompt_tokens, sum(item.count for item in items), horizon))
        return units

    def truth(self, work: Work, horizon: int) -> float:
        """The seconds of some work, with those in which its units enter the store."""
        return sum(
            self.prefill(document.prompt_tokens)
            + self.decode(document.prompt_tokens, sum(item.count for item in items), horizon)
            + 0.05
            for document, items in work
        )


@dataclass(frozen=True)
class PretendModel:
    """A model with the attributes that the forecast reads."""

    device: str = "cpu"
    shape: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocabulary=256))
    pairs_at_once: int = 0
    sampling: Sampling = FULL_SOFTMAX


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    clock = Machine()
    monkeypatch.setattr(generation_time, "time", clock)
    monkeypatch.setattr(generation_time, "generate_units", clock.generate_units)
    monkeypatch.setattr("kvdrift.generator.transformer.other_weights.model.load_transformer", lambda *_: PretendModel())
    return clock


LONGER = ('tasks = ["variable_tracking"]\nlength = 384', 'tasks = ["variable_tracking"]\nlength = 768')


def small_time(
    folder: Path, *changes: tuple[str, str], budget: float = 60.0, doing: Callable[[str], None] = lambda _: None
) -> tuple[StudyTime, dict[str, Work]]:
    """The forecast, and the splits' work at their greatest size."""
    study = load_study(write_study(folder, *changes))
    run = StudyRun(study, str(folder / "none"), storing(LocalGenerator()), offline=True)
    splits = forecast(run).splits
    found = study_time(run.material, splits, doing, budget)
    return found, {split.split: split.work for split in splits}


def test_time_is_that_of_all_documents(tmp_path: Path, machine: Machine) -> None:
    """Prompts of two lengths, and splits of 10 and of 12 pairs, are measured until costs of tokens and pairs are.

    Each step is named before it begins.
    """
    said = list[str]()
    found, work = small_time(tmp_path, LONGER, doing=lambda line: said.append(f"{len(machine.made)} {line}"))
    assert "kvdrift/tiny" in said[0]
    for number, (line, (_, tokens, pairs, positions)) in enumerate(zip(said[1:], machine.made, strict=True)):
        assert line.startswith(f"{number} measuring: {tokens} prompt tokens ")
        assert f" {pairs} pairs, {positions} position" in line
    assert list(found.splits) == list(work) == ["development", "evaluation"]
    for split, seconds in found.splits.items():
        assert seconds.low == seconds.high == pytest.approx(machine.truth(work[split], 12))
    assert found.measuring == machine.now < 60
    assert {made[3] for made in machine.made} == {1, 4, 12}


def test_a_plan_that_is_still_to_be_made_has_a_range_of_sizes(tmp_path: Path, machine: Machine) -> None:
    """K of 5 to 9, and 2 or 3 documents of each stratum."""
    between = ("replicates = 5\n", 'replicates = "auto"\nreplicates_between = [5, 9]\n')
    at_least = ("documents = 3\n", 'documents = "auto"\ndocuments_at_least = 2\n')
    found, work = small_time(tmp_path, between, at_least)
    evaluation = found.splits["evaluation"]
    assert evaluation.high == pytest.approx(machine.truth(work["evaluation"], 12), rel=1e-3)
    fewer = [
        (document, [replace(item, count=min(item.count, 5)) for item in own]) for document, own in work["evaluation"]
    ]
    assert evaluation.low == pytest.approx(2 / 3 * machine.truth(fewer, 12), rel=0.05)


@pytest.mark.parametrize("entry", [0.0, 2e-4])
@pytest.mark.parametrize("budget", [20.0, 75.0])
@pytest.mark.parametrize("horizon", [12, 200])
@pytest.mark.by_default("12-20.0-0.0", "200-75.0-0.0002")
def test_measuring_keeps_to_its_budget_and_the_forecast_is_within_a_quarter(
    tmp_path: Path, machine: Machine, budget: float, horizon: int, entry: float
) -> None:
    machine.entry = entry
    found, work = small_time(tmp_path, LONGER, ("horizon = 12", f"horizon = {horizon}"), budget=budget)
    assert machine.now < 1.3 * budget
    for split, seconds in found.splits.items():
        assert seconds.high == pytest.approx(machine.truth(work[split], horizon), rel=0.25)


@pytest.mark.parametrize("token", [0.05, 0.1])
def test_prompts_beyond_the_budget_are_read_in_part(tmp_path: Path, machine: Machine, token: float) -> None:
    """A prompt of 774 tokens takes 45 and 83 s. Of all prompts the beginnings give the costs."""
    machine.token = token
    found, work = small_time(tmp_path, LONGER, budget=40.0)
    assert machine.now < 52
    assert max(tokens for _, tokens, _, _ in machine.made) < 700
    for split, seconds in found.splits.items():
        assert seconds.high == pytest.approx(machine.truth(work[split], 12), rel=0.25)


def test_a_prefill_rate_is_a_forecast(tmp_path: Path, machine: Machine) -> None:
    """128 prompt tokens, the fewest that snapkv can halve, take 26 s; then no time is left to decode."""
    machine.token, machine.before = 0.2, 0.0
    found, work = small_time(tmp_path)
    assert machine.now < 75
    assert (found.samples, found.prompt_rate) == ([], pytest.approx(5.0))
    prompts = sum(document.prompt_tokens for own in work.values() for document, _ in own)
    assert sum(seconds.low for seconds in found.splits.values()) > 0.2 * prompts


def test_a_hybrid_study_may_branch_no_action(tmp_path: Path, machine: Machine) -> None:
    machine.step, machine.pair = 0.0, 0.01
    found, work = small_time(tmp_path, ("draws = 200", 'estimator = "hybrid"\ndraws = 200'))
    plain = [(one, [item for item in own if item.estimator == PLAIN]) for one, own in work["development"]]
    assert found.splits["development"].low == pytest.approx(machine.truth(plain, 12), rel=0.02)
    assert found.splits["development"].high == pytest.approx(machine.truth(work["development"], 12), rel=1e-3)


def test_a_line_at_once_waits_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress(at_once=True) as console:
        console.doing("loading a model")
        assert capsys.readouterr().err == "loading a model\n"


def test_time_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = dry_run(capsys, write_study(tmp_path), "--store", tmp_path / "store")
    assert re.search(
        r"time of generation on cpu \(float32\), an estimate: development .* to .* s, evaluation .* s\n", out
    )
    assert re.search(r"\n    from \d+ s of generating here, at [\d,]+ prompt tokens a second\n$", out)
    assert not (tmp_path / "store").exists()


def test_a_document_too_long_for_the_model_is_refused(tmp_path: Path) -> None:
    """The embedded model has 4,096 positions."""
    study = load_study(write_study(tmp_path, ("horizon = 12", "horizon = 3701")))
    with pytest.raises(
        InputError, match=r"^document 'needle-384-\d+': a prompt of 396 tokens and a horizon of 3701 exceed"
    ):
        gather_material(study, offline=True)


def test_systems_need_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = dry_run(capsys, STUDIES / "finite_state.toml", "--store", tmp_path / "store")
    assert "no model is loaded" in out


def test_too_little_memory_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.dry_run.description.memory_here", lambda *_: 3 * 2**20)
    out = dry_run(capsys, write_study(tmp_path), "--store", tmp_path / "store")
    assert "1 of 5 replicates at once; 3.0 MiB available on cpu, " in out
    assert "time: not measured; " in out


def test_heads_that_a_codec_cannot_code_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    action = '[[actions]]\nname = "rotated"\ncodec = "rotated-int4"\n\n[plan]\nbaseline'
    study, store = write_study(tmp_path, ("[plan]\nbaseline", action)), tmp_path / "store"
    monkeypatch.setattr("kvdrift.flows.material.head_size", lambda *_, **__: 24)
    for options in (["--dry-run"], []):
        line = mistake(capsys, "run", study, "--store", store, *options)
        says = "action 'rotated': codec 'rotated-int4': heads of 24 channels have no Hadamard transform here"
        assert says in line
    assert not store.exists()


# What a run refuses, and what the store has already


Change = tuple[str, str]
TINY = 'id = "kvdrift/tiny"'
NEEDLE = 'source = "embedded"\ntasks = ["needle"]\nlength = 384'


def same_line(capsys: pytest.CaptureFixture[str], study: Path, store: Path, *options: str) -> str:
    """Return the line that both commands print; nothing may be written."""
    lines = [mistake(capsys, "run", study, "--store", store, *options, *dry) for dry in ((), ("--dry-run",))]
    assert lines[0] == lines[1]
    return lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((TINY, f'{TINY}\ndtype = "fp16"'), "model.dtype = 'fp16': "),
        ((TINY, f'{TINY}\ndevice = "cuda:77"'), "model.device = 'cuda:77': "),
        ((NEEDLE, 'source = "jsonl"\npath = "nowhere.jsonl"\nlength = 384'), "nowhere.jsonl: no such file"),
        ((NEEDLE, 'source = "ruler"\ntasks = ["vt"]\nlength = 384'), "embedded source"),
    ],
)  # fmt: skip
def test_what_run_refuses_is_refused_by_the_same_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: Change, message: str
) -> None:
    assert message in same_line(capsys, write_study(tmp_path, change), tmp_path / "store")
    assert not (tmp_path / "store").exists()


_TILED = ('selector = "recent"\nkeep = "1/2"', 'selector = "numerics"\nkeep = "all"\nrow_tile = 3')


@pytest.mark.parametrize(
    ("placed", "gpu", "fault", "message"),
    [
        ('device = "cuda"', False, "unknown", "row_tile = 3: model.device = 'cuda' is a GPU"),
        ('device = "cuda:1"', True, None, "row_tile = 3: model.device = 'cuda:1' is a GPU"),
        ('device = "cuda"', True, "triton is not installed", "model.device = 'cuda': "),  # none of this machine's
        ('device_map = "auto"', True, None, "row_tile = 3: model.device_map = 'auto' is a GPU"),
        ('device_map = "auto"', False, "unknown", "model.device_map = 'auto': needs accelerate"),
    ],
)
def test_tiles_of_an_action_on_a_gpu(
    placed: str, gpu: bool, fault: str | None, message: str, capsys: pytest.CaptureFixture[str],  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """A GPU with fused attention refuses ``row_tile`` before anything is loaded; a GPU without Triton does not."""
    checks = "kvdrift.generator.transformer.model_checks"
    monkeypatch.setattr(f"{checks}.torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(f"{checks}.attention_fault", lambda _: fault)
    monkeypatch.setattr(f"{checks}.importlib.util.find_spec", lambda _: None)
    study = write_study(tmp_path, (TINY, f"{TINY}\n{placed}"), _TILED)
    line = same_line(capsys, study, tmp_path / "store")
    assert message in line
    assert line.startswith("kvdrift: action 'recent-half': ") == message.startswith("row_tile")
    assert not (tmp_path / "store").exists()


def test_a_store_of_a_newer_version_is_no_missing_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    for table in ("events", "plans"):
        first = Path(store.location, table, "_delta_log", f"{0:020d}.json")
        first.write_text(first.read_text().replace(f'"{SCHEMA_VERSION}"', '"99"'))
    line = same_line(capsys, write_study(tmp_path), tmp_path / "store")
    assert "has schema version 99" in line


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of time, for tests in which it must not run or does not matter."""
    monkeypatch.setattr("kvdrift.dry_run.description.time_lines", lambda *_, **__: iter(()))


@pytest.mark.usefixtures("unmeasured")
class TestAgainstTheStore:
    """The finished small study: 4 development and 6 evaluation documents under 2 actions and the control."""

    def test_a_finished_study(self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
        code, out, _ = call(capsys, "run", write_study(tmp_path), "--store", finished, "--dry-run")
        assert code == 0
        assert "development: 4 documents, all 12 units are stored\n" in out
        assert "evaluation: 6 documents, all 18 units are stored\n" in out
        assert out.endswith("  nothing to do\n")
        assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}

    @pytest.mark.parametrize("change", [("seed = 3", "seed = 4"), ("draws = 200", "draws = 300")])
    def test_a_changed_setting(
        self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path, change: Change
    ) -> None:
        assert change[1].split(" ", 1)[0] in same_line(capsys, write_study(tmp_path, change), finished)

    def test_an_action_that_is_new(self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path) -> None:
        _, out, _ = call(capsys, "run", write_study(tmp_path, ADDED_ACTION), "--store", finished, "--dry-run")
        assert "development: 4 documents, 4 units besides 12 that are stored, 16 trajectories" in out
        assert (
            "evaluation: 6 documents, 6 units besides 18 that are stored, 30 trajectories" in out
        )  # the plan's K and N
        assert "new: snapkv-100 (6)" in out
        assert re.search(r"then: derive .*, estimate, write", out)

    def test_an_action_that_is_redone(self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path) -> None:
        changed = write_study(tmp_path, ('selector = "recent"', 'selector = "recent"\nsinks = 2'))
        same_line(capsys, changed, finished)
        _, out, _ = call(capsys, "run", changed, "--store", finished, "--dry-run", "--redo", "recent-half")
        assert "evaluation: 6 documents, 6 units besides 12 that are stored" in out
        assert "redone: recent-half (6)" in out
        assert "recent-hlf" in same_line(capsys, write_study(tmp_path), finished, "--redo", "recent-hlf")

    def test_what_a_stopped_run_left(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        study, store = write_study(tmp_path), tmp_path / "store"
        stages.prepare(run_of(load_study(study), store))
        stages.develop(StudyRun(load_study(study), str(store), storing(LocalGenerator()), limit=DocumentLimit(1)))
        _, out, _ = call(capsys, "run", study, "--store", store, "--dry-run")
        assert "development: 4 documents, 9 units besides 3 that are stored" in out
        assert "missing: snapkv-half (3), recent-half (3), full (3)" in out
        assert re.search(r"then: derive 3 units .*, score answers, estimate", out)

"""``kvdrift run --dry-run``: the paper's studies without their data and weights, numbers against the paper."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from small_study import write_study

from flows.plan import primary_endpoints
from flows.preparation import outline_study
from generator.actions import build_actions
from generator.documents.source import where
from generator.eviction import evict
from generator.footprint import CacheShape, local_cache_shape
from generator.models import load_model
from generator.sources import stratum_documents
from generator.transformer import Prompt
from kvdrift.command import main
from schema.errors import InputError
from schema.study import load_studies, load_study
from stats.endpoints import Family

STUDIES = Path(__file__).parents[1] / "studies"
PAPER = ("paper_first", "paper_retention90")
STRATA = [f"{environment}-{length}" for environment in ("HELMET", "RULER") for length in ("4K", "16K", "32K")]


def dry_run(capsys: pytest.CaptureFixture[str], study: Path) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["run", str(study), "--dry-run"])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    return out


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without data, on a machine without models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("generator.footprint.try_to_load_from_cache", lambda *_, **__: None)
    return tmp_path


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
    def test_documents_units_and_trajectories(
        self, capsys: pytest.CaptureFixture[str], name: str, units: int, development: int, evaluation: int
    ) -> None:
        out = dry_run(capsys, STUDIES / f"{name}.toml")
        assert evaluation in {55_296, 18_432}
        assert (
            out.count(f"development: 36 documents, {units // 8} units, {development:,} trajectories and 72 of the") == 2
        )
        assert out.count(f"288 documents, {units} units, {evaluation:,} trajectories and 576 of the") == 2
        assert out.count(f"{(evaluation + 576) * 128:,} events") == 2
        assert f"on meta-llama/Llama-3.1-8B-Instruct, H = 128; store {Path('stores')}" in out
        assert "on Qwen/Qwen2.5-7B-Instruct, H = 128" in out

    @pytest.mark.parametrize("name", PAPER)
    def test_what_cannot_be_known_is_said(self, capsys: pytest.CaptureFixture[str], name: str) -> None:
        out = dry_run(capsys, STUDIES / f"{name}.toml")
        assert "bytes per entry need the model's configuration, which is not on this machine" in out
        assert f"lengths are nominal in {', '.join(STRATA)}: " in out
        assert f"not checked: the files of {', '.join(STRATA[:3])}; {Path('data/helmet')} is not here" in out
        assert f"not checked: the files of {', '.join(STRATA[3:])}; {Path('data/ruler')} is not here" in out
        assert "memory of generation: not estimated" in out
        assert "time: measured when the development documents run" in out
        assert not Path("stores").exists()

    def test_kept_entries_at_nominal_lengths(self, capsys: pytest.CaptureFixture[str]) -> None:
        first, second = (dry_run(capsys, STUDIES / f"{name}.toml") for name in PAPER)
        assert "action snapkv-512: keep 512, 512 prompt entries" in first
        assert "action recent-half: keep 1/2, 2,048 to 16,384 prompt entries" in first
        assert "action snapkv-90: keep 9/10, 3,686 to 29,491 prompt entries" in second
        assert "action full: keep all, 4,096 to 32,768 prompt entries" in second

    def test_bytes_where_the_configuration_is_at_hand(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Llama-3.1-8B: 32 layers, 8 KV heads of width 128, bfloat16: 128 KiB of payload to an entry."""
        llama = CacheShape(layers=32, heads=8, width=128, dtype="bfloat16")
        monkeypatch.setattr("kvdrift.dry_run.local_cache_shape", lambda *_: llama)
        out = dry_run(capsys, STUDIES / "paper_first.toml")
        assert "action snapkv-512: keep 512, 512 prompt entries, 64.5 MiB of prompt cache" in out
        assert "action full: keep all, 4,096 to 32,768 prompt entries, 516.0 MiB to 4.0 GiB of prompt cache" in out

    def test_strata_and_actions_are_those_of_the_published_results(self) -> None:
        """As the paper names them, and as the published numbers do."""
        names = {
            "paper_first": ["snapkv-512", "snapkv-half", "recent-half"],
            "paper_retention90": ["snapkv-90", "recent-90"],
        }
        for name, actions in names.items():
            studies = load_studies(STUDIES / f"{name}.toml")
            assert [study.model.id.partition("/")[2] for study in studies] == [
                "Llama-3.1-8B-Instruct",
                "Qwen2.5-7B-Instruct",
            ]
            for study in studies:
                assert [section.stratum_name for section in study.documents] == STRATA
                assert [section.length for section in study.documents] == [4096, 16384, 32768] * 2
                assert [action.name for action in study.actions] == actions
                assert {tuple(len(section.tasks) for section in study.documents)} == {(6, 6, 6, 13, 13, 13)}

    def test_the_endpoints_of_the_second_study_are_one_family_of_eight(self) -> None:
        studies = load_studies(STUDIES / "paper_retention90.toml")
        endpoints = [primary_endpoints(study) for study in studies]
        assert [(e.quantity, e.action) for e in endpoints[0]] == [
            (quantity, action)
            for quantity in ("late_minus_early", "saturation")
            for action in ("snapkv-90", "recent-90")
        ]
        assert sum(map(len, endpoints)) == studies[0].plan.family_size == 8
        assert Family("primary", tuple(endpoints[0]), 0.05, 8).level == pytest.approx(0.99375)

    def test_the_two_studies_take_different_parts_of_every_source(self) -> None:
        first, second = (load_studies(STUDIES / f"{name}.toml")[0] for name in PAPER)
        for one, other in zip(first.documents, second.documents, strict=True):
            assert (one.part_of_clusters, other.part_of_clusters) == ((1, 2), (2, 2)), where(one)
        assert first.study.seed != second.study.seed


def test_quickstart_is_exact_and_as_quick_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    out = dry_run(capsys, STUDIES / "quickstart.toml")
    assert time.perf_counter() - began < 3  # 0.05 s on an idle core, modules loaded
    assert "action snapkv-half: keep 1/2, 196 to 774 prompt entries" in out
    assert (
        "development: 18 documents, 72 units, 864 trajectories and 36 of the full-retention control, 57,600 events"
        in out
    )
    assert "nominal" not in out


def test_bytes_are_those_that_eviction_measures() -> None:
    study = load_study(STUDIES / "quickstart.toml")
    shape = local_cache_shape("kvdrift/tiny", "float32")
    assert shape is not None
    document = stratum_documents(study.documents[0], 7)["development"][0]
    prompt = Prompt(load_model("kvdrift/tiny"), document.tokens, window=64)
    for action in build_actions(study):
        kept = action.retention.kept(document.prompt_tokens)
        compact = evict(prompt.layers, action.selector, kept)
        assert shape.bytes_of(kept) == compact.payload_bytes + compact.index_bytes + compact.metadata_bytes


def test_files_that_are_here_are_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"id": "a", "prompt": "x"}\n')
    text = f'source = "jsonl"\npath = "{tmp_path}/mine.jsonl"\nlength = 384\nstratum = "needle"'
    study = write_study(tmp_path, ('source = "embedded"\ntasks = ["needle"]\nlength = 384\nstratum = "needle"', text))
    with pytest.raises(InputError, match=r"documents 'needle': development = 2, but the source has \d document"):
        outline_study(load_study(study))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\n\n[[model]]\nid = "kvdrift/tiny"'), "model.id = 'kvdrift/tiny' stands there twice"),
        (('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\n\n[[model]]\nidd = "x"'), "model.idd: unknown key; did you mean 'id'?"),
        (('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\n\n[[model]]\nid = "other"'), "names 2 models (kvdrift/tiny, other), where one is wanted"),
    ],
)  # fmt: skip
def test_several_models(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_study(write_study(tmp_path, ("[model]", "[[model]]"), change))


def test_a_family_smaller_than_its_members_is_refused(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, ("draws = 200", "draws = 200\nfamily_size = 2")))
    with pytest.raises(InputError, match=r"plan.family_size = 2: this model alone has 3 endpoints"):
        outline_study(study)

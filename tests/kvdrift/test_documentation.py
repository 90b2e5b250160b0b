"""Documents, examples and the application: what pages and scripts name exists, and does as they say.

``make docs-check`` runs the pages' code blocks.
"""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from fixtures.command import call
from fixtures.house import ROOT
from fixtures.small_study import write_study

from kvdrift.command import app
from kvdrift.generator.actions import CODEC_KIND, build_action, build_actions
from kvdrift.generator.checks.codecs import CodecTrial
from kvdrift.generator.checks.policies import PolicyTrial
from kvdrift.generator.checks.selectors import SelectorTrial
from kvdrift.generator.codecs import CODECS, Codec
from kvdrift.generator.codecs.hqq import HQQ
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.transformers.engine import Transformers
from kvdrift.generator.engines.transformers.trial import effect
from kvdrift.generator.selectors import SELECTOR_KIND, SELECTORS
from kvdrift.generator.selectors.policies import POLICIES, POLICY_KIND
from kvdrift.log.store import Store
from kvdrift.reference import reference
from kvdrift.schema.study import ActionSection, load_studies

PAGE = (ROOT / "docs" / "adding-a-selector.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"^`([\w.-]+\.\w+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)


def test_the_pages_other_pieces_are_right(tmp_path: Path) -> None:
    files = dict(FILE.findall(PAGE))
    (tmp_path / "my_selector.py").write_text(files["my_selector.py"], encoding="utf-8")
    pieces = [text for kind, text in BLOCK.findall(PAGE) if kind == "toml" and text != files["my-study.toml"]]
    action, entry_points = pieces
    assert tomllib.loads(entry_points)["project"]["entry-points"] == {
        SELECTOR_KIND.group: {"peak": "my_selector:PeakAttention"}
    }
    study = tmp_path / "my-study.toml"
    study.write_text(files["my-study.toml"] + "\n" + action, encoding="utf-8")
    added = build_actions(load_studies(study)[0])[3]
    assert (added.name, added.selector.window) == ("peak-half-16", 16)


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def sections(*pages: str) -> list[ActionSection]:
    """The actions of pages."""
    written = [text for page in pages for kind, text in BLOCK.findall(page) if kind == "toml"]
    return [ActionSection.model_validate(one) for text in written for one in tomllib.loads(text)["actions"]]


def write_class(page: str, path: Path) -> None:
    """Write the class of a page."""
    (code,) = (text for kind, text in BLOCK.findall(page) if kind == "python")
    path.write_text(code, encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "sliding",
        "sharper",
        pytest.param("adakv", marks=pytest.mark.kvpress),
        pytest.param("int4", marks=pytest.mark.quantizers),
    ],
)
def test_the_page_on_presses_caches_and_patches_does_as_it_says(name: str, tmp_path: Path) -> None:
    page = read("kvpress.md")
    write_class(page, tmp_path / "my_cache.py")
    written = next(tomllib.loads(text) for kind, text in BLOCK.findall(page) if kind == "toml" and "engine" in text)
    settings = {action["name"]: action["settings"] for action in written["actions"]}
    side = Transformers().side(written["model"]["id"], settings[name], name, tmp_path)
    session = side.open(Room(384, 2, 8))
    reference = Transformers().side(written["model"]["id"], {}, name).open(Room(384, 2, 8))
    prompt = make_document("needle", 384, 0, 3).tokens[:384]
    words = effect(session, reference, prompt, [5, 9, 17, 33])
    shares = {
        "sliding": "96 of 384 entries, 25% of the bytes",
        "sharper": "384 of 384 entries, 100% of the bytes",
        "adakv": "192 of 384 entries, 50% of the bytes",
        "int4": "an unknown number of 384 entries, 19% of the bytes",
    }
    assert words.startswith(shares[name]), words


def test_the_pages_on_codecs_do_as_they_say(tmp_path: Path) -> None:
    own, there = read("adding-a-codec.md"), read("codecs.md")
    write_class(own, tmp_path / "my_codec.py")
    made = [section for section in sections(own, there) if not needs_library(section)]
    actions = {section.name: build_action(section, tmp_path) for section in made}
    assert list(actions) == ["finer-keys", "finer-keys-16", "int4", "int4-wide", "snapkv-half-int8", "int4-throughout"]
    assert actions["int4-throughout"].generated is not None
    trial = CodecTrial("my_codec:FinerKeys", folder=tmp_path)
    assert [finding.line for check in trial.checks[:4] if not (finding := check(trial)).holds] == []
    assert CODEC_KIND.group in own
    assert set(CODECS) <= {
        name for line in there.splitlines() if line.startswith("## ") for name in line[3:].split(", ")
    }


@pytest.mark.quantizers
def test_actions_with_a_library_can_be_made() -> None:
    made = [section for section in sections(read("codecs.md")) if needs_library(section)]
    assert [build_action(section).codec_name for section in made] == ["hqq-int4"]


def needs_library(section: ActionSection) -> bool:
    return issubclass(CODECS.get(str(section.codec_name), Codec), HQQ)


@pytest.mark.slow
def test_the_pages_on_policies_do_as_they_say(tmp_path: Path) -> None:
    own, there = read("adding-a-policy.md"), read("policies.md")
    write_class(own, tmp_path / "my_policy.py")
    actions = [build_action(section, tmp_path).name for section in sections(own, there)]
    assert actions == ["fading-half", "fading-fast", "sliding-512", "sliding-sinks"]
    trial = PolicyTrial("my_policy:Fading", folder=tmp_path)
    assert [finding.line for check in trial.checks[:2] if not (finding := check(trial)).holds] == []
    assert POLICY_KIND.group in own
    assert {line[3:] for line in there.splitlines() if line.startswith("## ")} >= set(POLICIES)


GROUP: Any = typer.main.get_command(app)
OPTIONS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in GROUP.commands.items()
}
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reference_is_that_of_the_application() -> None:
    """``make docs`` writes it."""
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == reference()


def test_the_guide_lists_every_command() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    table = guide.partition("## Commands")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `kvdrift ([a-z]+)", table, re.MULTILINE)
    assert sorted(listed) == sorted(OPTIONS)
    assert len(listed) == len(set(listed))


def test_every_command_is_in_the_file_of_its_name() -> None:
    files = {path.stem for path in (ROOT / "kvdrift" / "commands").rglob("*.py")} - {"__init__"}
    assert files == set(OPTIONS)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_documents_name_no_command_or_option_that_is_not_there(text: Path) -> None:
    for command, rest in re.findall(r"(?<!from )kvdrift ([a-z]+)\b([^\n`|]*(?:\\\n[^\n`|]*)*)", code_of(text)):
        if command not in OPTIONS:
            assert rest.strip() == "" or not rest.startswith(" "), f"kvdrift {command}{rest}"
            continue
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest):
            assert option in OPTIONS[command] | {"--help", "--debug"}, f"kvdrift {command}: {option}"


def test_every_selector_has_its_section() -> None:
    """With its paper, and the parameters that a study can set."""
    text = (ROOT / "docs" / "selectors.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    for name, selector in SELECTORS.items():
        assert name in sections
        if selector.paper is not None:
            assert selector.paper.rpartition(":")[2] in sections[name]
        inherited = {field.name for base in selector.__bases__ if is_dataclass(base) for field in fields(base)}
        for field in fields(selector):  # type: ignore[arg-type]  # a dataclass
            if field.name not in inherited:
                assert f"`{field.name}`" in sections[name], f"{name}: {field.name}"
                if isinstance(field.default, int) and field.default:
                    assert f"`{field.name}` ({field.default})" in " ".join(sections[name].split())


def test_actions_of_the_guide_can_be_made() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), re.DOTALL)
    sections = [section for block in blocks for section in tomllib.loads(block)["actions"]]
    made = [build_action(ActionSection.model_validate(section)).name for section in sections]
    assert made == ["snapkv-half", "snapkv-half-int4", "sliding-512"]


def code_of(path: Path) -> str:
    """The parts of a document that are code."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL) and [
        block or inline for block, inline in re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
    ])  # fmt: skip


# The scripts of examples/ are short, and do what they say


EXAMPLES = ROOT / "examples"
ACTIONS = {"full", "recent-half", "snapkv-half"}


def ran(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run an example in this process; return its exit code."""
    monkeypatch.setattr("sys.argv", [f"examples/{name}.py", *map(str, arguments)])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_each_has_at_most_30_lines() -> None:
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lines) == 5
    assert max(lines.values()) <= 30, lines


def test_a_study_a_query_and_a_gate(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("study", monkeypatch, write_study(tmp_path), finished) == 0
    _, *rows, page = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows} == ACTIONS
    assert Path(page.removeprefix("page: ")).is_file()
    assert ran("first_divergence", monkeypatch, finished) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(": ")[0] for line in lines} == ACTIONS
    assert ran("gate", monkeypatch, finished, "recent-half", "0.9") == 0
    assert "recent-half: equivalent or better: " in capsys.readouterr().out


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.by_default("False")
def test_a_custom_selector(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool) -> None:
    """By default with two of the checks; those that generate or start a second interpreter take longest."""
    monkeypatch.chdir(EXAMPLES)
    if not whole:
        few = [check for check in SelectorTrial.checks if check.name in {"kept sets", "identity"}]
        assert len(few) == 2
        monkeypatch.setattr(SelectorTrial, "checks", (*few,))
    code, out, err = call(capsys, "check", "long_keys:LongKeys")
    assert (code, err) == (0, ""), out
    assert out.endswith(f"long_keys:LongKeys: all {len(SelectorTrial.checks)} checks hold\n")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.by_default("False")
def test_events_of_another_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool
) -> None:
    """Its commands are called in this process, by default without the last two."""
    asked, said = list[str](), list[str]()

    def called(command: list[str], *, check: bool) -> None:
        assert (command[:3], check) == ([sys.executable, "-m", "kvdrift"], True)
        asked.append(command[3])
        if whole or command[3] in {"ingest", "derive"}:
            code, out, _ = call(capsys, *command[3:])
            assert code == 0, out
            said.append(out)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", called)
    assert ran("ingest", monkeypatch, "store") == 0
    assert asked == ["ingest", "derive", "analyze", "report"]
    page = Path(said[-1].splitlines()[-1].removeprefix("report: "))
    assert (tmp_path / page).is_file() == whole
    assert Store.open(tmp_path / "store").row_count("events") == 12 * 3 * 16 * 32

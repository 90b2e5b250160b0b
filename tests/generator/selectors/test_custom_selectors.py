"""Users' selectors: modules beside a study file, installed modules and entry points, and mistakes in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.own_selectors import CLASS, IMPORTS, write_distribution, write_module
from fixtures.refusals import refused
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from kvdrift.generator.actions import build_action, build_actions
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.identity import custom_texts, selector_sha256
from kvdrift.generator.selectors import Selector, build_selector
from kvdrift.generator.service.protocol import DocumentMessage, GenerationRequest, PendingMessage
from kvdrift.generator.service.server import requested_work
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import ActionSection

NAME = "my_selector:Mine"
SHARED = "def scale():\n    return 1.0\n"
FAILING = "        return layer.key[..., self.coordinat].float() * self.sign"
USES_SHARED = ("from torch import Tensor\n", "from torch import Tensor\nfrom shared import scale\n")


def sign(folder: Path, name: str = NAME) -> float:
    """The default of a selector's ``sign``, which tells texts apart."""
    found: float = vars(build_selector(name, {}, folder))["sign"]
    return found


def sources(selector: Selector) -> set[str]:
    return {path.name for path in custom_texts(type(selector))}


# --- Modules beside a study file -------------------------------------------------------------------------------------


def test_a_study_finds_its_own_module_and_leaves_no_trace(tmp_path: Path) -> None:
    write_module(tmp_path)
    change = ('selector = "recent"', f'selector = "{NAME}"\ncoordinate = 3')
    before = (list(sys.path), list(sys.meta_path))
    study = load_study(write_study(tmp_path, change))
    first, second = build_actions(study)[1], build_actions(study)[1]
    assert (list(sys.path), list(sys.meta_path)) == before
    assert first == second
    assert type(first.selector).__module__ == "my_selector"
    row = first.row("small", prespecified=True)
    assert (row["selector"], row["parameters"]) == (NAME, '{"coordinate": 3, "sign": 1.0}')
    assert not list(tmp_path.rglob("__pycache__"))


def test_the_folder_is_no_part_of_a_studys_hash(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    one, other = (load_study(write_study(folder)) for folder in folders)
    assert (one.folder, other.folder) == (folders[0], folders[1])
    assert (one.sha256, one.settings, one.model_dump()) == (other.sha256, other.settings, other.model_dump())


def test_an_edited_module_is_loaded_anew(tmp_path: Path) -> None:
    """The new text has the old text's length and time, by which Python would accept stale bytecode."""
    write_module(tmp_path)
    first = build_selector(NAME, {}, tmp_path)
    assert sign(tmp_path) == 1.0
    write_module(tmp_path, ("sign: float = 1.0", "sign: float = 2.0"))
    second = build_selector(NAME, {}, tmp_path)
    assert vars(second)["sign"] == 2.0
    texts = [custom_texts(type(selector))[tmp_path / "my_selector.py"] for selector in (first, second)]
    assert texts[1] == (tmp_path / "my_selector.py").read_bytes() != texts[0]


def test_an_edit_of_what_a_module_imports_counts_as_one_of_it(tmp_path: Path) -> None:
    write_module(tmp_path, USES_SHARED, ("sign: float = 1.0", "sign: float = scale()"))
    write_module(tmp_path, name="unrelated")
    write_module(tmp_path, name="shared", text=SHARED)
    assert sign(tmp_path) == 1.0
    write_module(tmp_path, ("1.0", "3.0"), name="shared", text=SHARED)
    assert sign(tmp_path, "unrelated:Mine") == 1.0
    assert sign(tmp_path) == 3.0
    assert sources(build_selector(NAME, {}, tmp_path)) == {"my_selector.py", "shared.py"}
    assert sources(build_selector("unrelated:Mine", {}, tmp_path)) == {"unrelated.py"}


def test_a_package_may_be_imported_from_within(tmp_path: Path) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    write_module(package, name="__init__", text="")
    write_module(
        package, ("from shared", "from .shared"), name="inner", text=IMPORTS + "from shared import scale\n" + CLASS
    )
    write_module(package, name="shared", text=SHARED)
    selector = build_selector("my_package.inner:Mine", {}, tmp_path)
    assert sources(selector) == {"inner.py", "shared.py"}
    write_module(package, ("sign: float = 1.0", "sign: float = 2.0"), name="inner")
    assert sign(tmp_path, "my_package.inner:Mine") == 2.0


def test_two_folders_may_have_modules_of_one_name(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, value in zip(folders, ("1.0", "2.0"), strict=True):
        folder.mkdir()
        write_module(folder, USES_SHARED, ("sign: float = 1.0", "sign: float = scale()"))
        write_module(folder, ("1.0", value), name="shared", text=SHARED)
    assert [sign(folder) for folder in folders * 2] == [1.0, 2.0, 1.0, 2.0]
    (folders[0] / "my_selector.py").unlink()
    assert "no module 'my_selector' is installed" in refused(build_selector, NAME, {}, folders[0])


# --- Installed modules and entry points ------------------------------------------------------------------------------


def test_a_module_that_the_folder_lacks_is_an_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, folder = tmp_path / "installed", tmp_path / "study"
    for path in (installed, folder):
        path.mkdir()
    path = write_module(installed, name="installed_selectors")
    monkeypatch.syspath_prepend(installed)
    name = "installed_selectors:Mine"
    assert build_selector(name, {}, folder) == build_selector(name, {})
    write_module(installed, ("sign: float = 1.0", "sign: float = 2.0"), name="installed_selectors")
    assert f"{path}: has changed since this process loaded it" in refused(build_selector, name, {})


def test_entry_points_stand_beside_the_packages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(tmp_path, name="pointed_at")
    write_module(tmp_path, name="pointed_elsewhere")
    target = "pointed_at:Mine"
    write_distribution(tmp_path, "good", one=target, recent=target, broken="pointed_at:Nobody", twice=target)
    write_distribution(tmp_path, "other", twice="pointed_elsewhere:Mine")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_selector("one", {"coordinate": 1}) == build_selector(target, {"coordinate": 1})
    assert type(build_selector("recent", {})).__module__ == "kvdrift.generator.selectors.recent"
    assert "did you mean 'one'?" in refused(build_selector, "ones", {})
    twice = "selector 'twice': is an entry point of good 1.0 and of other 1.0; uninstall one of them, or write "
    assert refused(build_selector, "twice", {}).startswith(twice)
    code, out, _ = call(capsys, "list", "selectors")
    rows = dict(line.split(None, 1) for line in out.splitlines() if not line.startswith("recent"))
    assert code == 0
    assert rows["one"] == "one coordinate of the keys; coordinate = 0; sign = 1.0; budget = even; of good 1.0"
    assert rows["broken"].startswith("not usable: ")
    assert rows["twice"] == f"not usable: {refused(build_selector, 'twice', {})}"
    assert "MODULE:CLASS" in rows
    assert "not usable: kvdrift has a selector of this name; rename the entry point of good 1.0" in out


def test_a_service_takes_what_is_installed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has the module beside its study; the service has it on its Python's path."""
    study, installed = tmp_path / "study", tmp_path / "installed"
    for folder in (study, installed):
        folder.mkdir()
        write_module(folder, name="served_selectors")
    section = ActionSection(name="a", selector="served_selectors:Mine", keep="1/2", coordinate=2)
    wanted = build_action(section, study)
    known = selector_sha256(wanted.selector)
    pending = PendingMessage(
        action=section, selector_sha256=known, first=0, count=1, estimator="plain", revision=0, of=None
    )  # fmt: skip
    document = DocumentMessage(doc="d", stratum="s", cluster="c", task="t", source="s", tokens=[1])
    request = GenerationRequest.model_construct(document=document, pending=[pending])
    allowed = ["served_selectors"]
    assert "the service may not import module 'served_selectors'" in refused(requested_work, request, ())
    line = refused(requested_work, request, allowed)
    assert line.endswith("no module 'served_selectors' is installed where this process runs; install it there")
    monkeypatch.syspath_prepend(installed)
    _, (unit,) = requested_work(request, allowed)
    assert unit.action.row("s", prespecified=True) == wanted.row("s", prespecified=True)


# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("class Mine", "class Yours"), "has no class 'Mine'; known: Yours"),
        ((CLASS, ""), "has no class 'Mine'; it has no class derived from Selector"),
        ((CLASS, "Mine = 3\n"), "'Mine' is of type int; it should be a class derived from Selector"),
        (("(ScoringSelector)", ""), "class Mine is no Selector; derive it from ScoringSelector or Selector"),
        (("def score", "def scores"), "class Mine has no method score; define it"),
        (("@dataclass(frozen=True)", ""), "class Mine is no frozen dataclass; write @dataclass(frozen=True) above it"),
        (("(frozen=True)", "(frozen=True, eq=False)"), "class Mine is no frozen"),
        (("sign: float = 1.0", "sign: float"), ", line 12: TypeError: non-default argument 'sign' follows"),
        (("coordinate: int = 0", "coordinate: int"), "Mine.coordinate: the field has no default; write coordinate: TYPE"),
        (("coordinate: int = 0", "coordinate: tuple = (1, 2)"), "the default (1, 2) is no number, text, True, False or None"),
        (("coordinate: int = 0", "selector: int = 0"), "[[actions]] has a key of this name already; rename the parameter"),
        (('    summary: ClassVar[str] = "one coordinate of the keys"\n', ""), "class Mine has no summary; write summary: C"),
        (("summary: ClassVar[str]", "summary: str"), "Mine.summary would be a parameter that study files set; write summary: ClassVar[str] ="),
        (("sign: float = 1.0", "sign: float = 1.0\n    window: float = 8.0"), "Mine().window is 8.0; it should be a number"),
        (("from torch import Tensor", "import no_such_thing"), ", line 7: ModuleNotFoundError: No module named 'no_such_thing'"),
        (("coordinate: int = 0", "coordinate: int = 1 / 0"), ", line 17: ZeroDivisionError: division by zero"),
        (("class Mine", "clas Mine"), ", line 13: SyntaxError: invalid syntax"),
        (("\n\n@dataclass", "\nimport sys\nsys.exit(3)\n@dataclass"), "SystemExit: 3"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_module_is_one_line_with_its_file(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    path = write_module(tmp_path, change)
    line = refused(build_selector, NAME, {}, tmp_path)
    assert line.startswith(str(path))
    assert says in line
    write_module(tmp_path)
    assert sign(tmp_path) == 1.0  # what failed leaves nothing behind


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"coordinat": 1}, "coordinat: unknown key; did you mean 'coordinate'?"),
        ({"zoom": 1}, "selector 'my_selector:Mine' has no parameter 'zoom'; it takes budget, coordinate, sign"),
        ({"coordinate": "1"}, "coordinate = '1': should be an integer"),
        ({"sign": True}, "sign = True: should be a number"),
        ({"coordinate": -5}, "Mine(coordinate=-5): ValueError: no"),
    ],
)
def test_a_wrong_parameter_is_one_line_with_the_file(parameters: dict[str, int], says: str, tmp_path: Path) -> None:
    refusing = '\n    def __post_init__(self):\n        if self.coordinate < 0:\n            raise ValueError("no")\n'
    path = write_module(tmp_path, text=IMPORTS + CLASS + refusing)
    section = ActionSection(name="own", selector=NAME, keep="1/2", **parameters)
    assert refused(build_action, section, tmp_path) == f"action 'own': {path}: {says}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_selecter:Mine", "no module 'my_selecter' is installed, and {folder} has no my_selecter.py"),
        ("my_selector.inner:Mine", "selector 'my_selector.inner:Mine': {folder} has no module 'my_selector.inner'"),
        ("my_selector.py:Mine", "is no name of a module and a class in it; write my_selector:Mine"),
        ("my-selector:Mine", "is no name of a module and a class in it; write module:Class"),
        ("my_selector:Selector", "class Selector has no method keep"),
        ("json:Mine", "json/__init__.py: has no class 'Mine'; it has no class derived from Selector"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, says: str, tmp_path: Path) -> None:
    write_module(tmp_path)
    assert says.format(folder=tmp_path) in refused(build_selector, name, {}, tmp_path)


def test_no_module_takes_the_name_of_another(tmp_path: Path) -> None:
    for name in ("kvdrift", "torch", "statistics", "turtledemo"):
        path, before = write_module(tmp_path, name=name), sys.modules.get(name)
        line = refused(build_selector, f"{name}:Mine", {}, tmp_path)
        assert line.startswith(f"{path}: the name '{name}' is taken by ")
        assert sys.modules.get(name) is before


ASKING = (
    "\nfrom kvdrift.generator.attention.recording import QueryChunk, Statistic\n"
    "\n@dataclass(frozen=True)\nclass Count:\n"
    "    def update(self, gathered, chunk):\n        return len(chunk.query)\n"
)
ASKED = "\n    @property\n    def statistics(self):\n        return (Count(),)\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("return (Count(),)", 'raise ValueError("no")'), ": ValueError: no ({path}, line {line})"),
        (("(Count(),)", "Count()"), ": should be a tuple, such as (MyStatistic(),), and not one Count"),
        (("(Count(),)", "(Count,)"), ": Count is a class; name an object of it, as in (Count(),)"),
        (("(Count(),)", "(3,)"), ": int has no method update(gathered, chunk); define it"),
        (("(frozen=True)\nclass Count", "\nclass Count"), ": Count is not hashable ("),
    ],
)
def test_what_a_selector_asks_for_wrongly_is_one_line(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    path = write_module(tmp_path, change, text=IMPORTS + ASKING + CLASS + ASKED)
    where = says.format(path=path, line=len(path.read_text().splitlines()))
    assert refused(build_selector, NAME, {}, tmp_path).startswith(f"selector Mine: statistics{where}")


@pytest.mark.parametrize(
    ("failing", "says"), [('raise ValueError("no\\nmore")', "ValueError: no"), ("bytearray(10**15)", "MemoryError")]
)
def test_a_statistic_that_fails_in_a_run_has_its_line(failing: str, says: str, tmp_path: Path) -> None:
    path = write_module(tmp_path, ("return len(chunk.query)", failing), text=IMPORTS + ASKING + CLASS + ASKED)
    selector, document = build_selector(NAME, {}, tmp_path), random_document("short", 20)
    line = refused(Prompt, random_model("llama"), document.tokens, 0, selector.statistics, error=OperationError)
    number = path.read_text().splitlines().index(f"        {failing}") + 1
    assert line == f"statistic Count: {says} ({path}, line {number})"


@pytest.mark.parametrize(
    ("returned", "says"),
    [("3", "TypeError: 'int' object"), ('{"parameters": {"a": self}}', "TypeError: Object of type")],
)
def test_what_cannot_be_recorded_of_a_selector_is_one_line(returned: str, says: str, tmp_path: Path) -> None:
    path = write_module(tmp_path, text=IMPORTS + CLASS + f"\n    def identity(self):\n        return {returned}\n")
    assert refused(build_selector, NAME, {}, tmp_path).startswith(f"{path}: Mine(): {says}")


def test_what_fails_in_a_run_has_its_line(tmp_path: Path) -> None:
    path = write_module(tmp_path, ("self.coordinate]", "self.coordinat]"))
    model, selector = random_model("llama"), build_selector(NAME, {}, tmp_path)
    prompt = Prompt(model, random_document("short", 20).tokens, 0)
    line = refused(evict, prompt.layers, selector, 10, error=OperationError)
    assert line.startswith("selector Mine: AttributeError: 'Mine' object has no attribute 'coordinat'")
    assert line.endswith(f"({path}, line {path.read_text().splitlines().index(FAILING) + 1})")

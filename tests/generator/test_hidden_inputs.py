"""Parts whose decisions depend on more than source, parameters and prompt: ``kvdrift check`` names each of them.

A second interpreter imports torch, which takes seconds. So one interpreter tries all parts of this file; the slow test
tries the whole package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.own_codecs import MODULE as CODEC
from fixtures.own_policies import MODULE as POLICY
from fixtures.own_selectors import write_module

from kvdrift.generator.checks.kinds import trial_of
from kvdrift.generator.checks.source_notes import source_notes
from kvdrift.generator.checks.trial import Trial, decide_elsewhere, same_after_others, same_elsewhere
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.codecs.hqq import HQQ
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.kvpress import PRESSES
from kvdrift.generator.selectors.policies import POLICIES

SCORE = "return layer.key[..., self.coordinate].float() * self.sign"
SALTED = "hash('salt') / 2**61"
SELECTORS_HERE = {
    "sound": SCORE,
    "environment": f"import os\n        {SCORE} * float(os.environ.get('MY_SIGN', '1'))",
    "file": f"import json, pathlib\n        {SCORE} * json.loads(pathlib.Path('sign.json').read_text())",
    "file beside": f"import json\n        with open(__file__.replace('my_selector.py', 'sign.json')) as file:\n            {SCORE} * json.load(file)",
    "helper": "import importlib.util\n        spec = importlib.util.spec_from_file_location('late', __file__.replace('my_selector', 'late'))\n"
    f"        late = importlib.util.module_from_spec(spec)\n        spec.loader.exec_module(late)\n        {SCORE} * late.SIGN",
    "hash": f"{SCORE} + {SALTED} * layer.key[..., 1].float()",
    "global": f"return _KNOWN.setdefault((layer.number, layer.key.shape), {SCORE.removeprefix('return ')})",
}  # fmt: skip
CODEC_STEP = "self.step).round() * self.step"
SUBJECTS = [*SELECTORS_HERE, "codec", "policy"]
BESIDE = ("file beside", "helper")  # lie beside the class in any interpreter, as the source says
OF_LIBRARIES = [name for name, one in CODECS.items() if issubclass(one, HQQ)]
PACKAGE = {
    "selector": [*SELECTORS],
    "codec": [name for name in CODECS if name not in OF_LIBRARIES],
    "policy": [*POLICIES],
}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trial[Any]]]:
    """Return parts that lie in folders of their own, and the decisions of all of them in a second interpreter."""
    home = tmp_path_factory.mktemp("parts")
    made: dict[str, Trial[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_SIGN", "-1")
        patch.chdir(home)
        for place in (home, *(home / name.replace(" ", "-") for name in SUBJECTS)):
            place.mkdir(exist_ok=True)
            (place / "sign.json").write_text("-1")
            (place / "late.py").write_text("SIGN = -1\n")
        for name, score in SELECTORS_HERE.items():
            folder = home / name.replace(" ", "-")
            write_module(folder, ("\n\n@dataclass", "\n\n_KNOWN = {}\n\n\n@dataclass"), (SCORE, score))
            made[name] = trial_of("my_selector:Mine", {}, folder, "selector")
        assert CODEC_STEP in CODEC
        kept = "_KNOWN = {}\n\n\n@dataclass"
        step = "(step := _KNOWN.setdefault(numbers.shape, numbers.abs().max() / 8))).round() * step"
        text = CODEC.replace("@dataclass", kept, 1).replace(CODEC_STEP, step)
        (home / "codec" / "my_codec.py").write_text(text)
        made["codec"] = trial_of("my_codec:Mine", {}, home / "codec", "codec")
        write_module(home / "policy", ("self.share *", f"abs({SALTED}) *"), name="my_policy", text=POLICY)
        made["policy"] = trial_of("my_policy:Mine", {}, home / "policy", "policy")
        decide_elsewhere([one for name, one in made.items() if name not in BESIDE])
        yield made


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("environment", "another process", "n = 401, m = 133: kept sets .* environment"),
        ("file", "another process", "selector Mine: FileNotFoundError"),
        ("hash", "another process", "kept sets .* hash seed"),
        ("policy", "another process", "events .* hash seed"),
        ("global", "other prompts", "kept sets .* another input"),
        ("codec", "other layers", "numbers .* another input"),
    ],
)  # fmt: skip
@pytest.mark.by_default("file", "hash", "global", "codec")
def test_what_decides_by_something_else_fails(
    subjects: dict[str, Trial[Any]], name: str, check: str, says: str
) -> None:
    tried = subjects[name]
    (one,) = (one for one in tried.checks if one.name == check)
    finding = one(tried)
    assert not finding.holds
    assert re.search(says, finding.line)


def test_what_depends_on_nothing_else_holds(subjects: dict[str, Trial[Any]]) -> None:
    assert same_elsewhere(subjects["sound"]) == same_after_others(subjects["sound"]) == "the same kept sets"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("sound", []),
        ("environment", ["os.environ.get uses the environment"]),
        ("file", ["read_text() uses a file"]),
        ("file beside", ["open uses a file"]),
        ("helper", ["importlib.util.spec_from_file_location uses a module found at run time",
                    "importlib.util.module_from_spec uses a module found at run time"]),
        ("hash", ["hash uses Python's hash seed"]),
        ("global", []),
        ("policy", ["hash uses Python's hash seed"]),
    ],
)  # fmt: skip
@pytest.mark.by_default("file", "hash", "sound")
def test_the_source_says_what_is_taken(subjects: dict[str, Trial[Any]], name: str, takes: list[str]) -> None:
    notes = source_notes(type(subjects[name].part))
    assert [note.partition(": ")[2].partition(",")[0] for note in notes] == takes
    folder = subjects[name].folder
    assert folder is not None
    file = folder / f"my_{subjects[name].kind.noun}.py"
    lines = file.read_text().splitlines()
    for note, said in zip(notes, takes, strict=True):
        line = note.removeprefix(f"{file}, line ").partition(":")[0]
        assert said.split("(")[0].split(" ")[0].split(".")[-1] in lines[int(line) - 1]


def test_more_that_source_may_take(tmp_path: Path) -> None:
    """Under other names, in modules that the class imports, drawn with and without a seed, and clocks."""
    write_module(
        tmp_path,
        (
            "from torch import Tensor",
            "from helper import noise\nfrom os import environ as told\nfrom torch import Tensor",
        ),
        (SCORE, f"from nowhere import late\n        told\n        {SCORE}"),
    )
    (tmp_path / "helper.py").write_text(
        "import random\nimport time as clock\nfrom datetime import datetime\n\nimport numpy as np\nimport torch\n\n\n"
        "def noise(seed):\n    generator = torch.Generator().manual_seed(seed)\n"
        "    torch.rand(3, generator=generator), np.random.default_rng(seed), random.Random(seed)\n"
        "    clock.monotonic()\n    datetime.now()\n    random.random()\n    np.random.default_rng()\n    torch.rand(3)\n"
    )
    notes = source_notes(type(trial_of("my_selector:Mine", {}, tmp_path).part))
    assert [note.removeprefix(f"{tmp_path}/").partition(", which is no part")[0] for note in notes] == [
        "helper.py, line 12: time.monotonic uses a clock",
        "helper.py, line 13: datetime.datetime.now uses a clock",
        "helper.py, line 14: random.random uses a global random state",
        "helper.py, line 15: numpy.random.default_rng uses a global random state",
        "helper.py, line 16: torch.rand uses a global random state",
        "my_selector.py, line 24: import of nowhere uses a module found at run time",
        "my_selector.py, line 25: os.environ uses the environment",
    ]


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(PACKAGE, marks=pytest.mark.slow),
        pytest.param({"codec": OF_LIBRARIES}, marks=pytest.mark.quantizers),
        pytest.param({"selector": [f"kvpress:{press}" for press in PRESSES]}, marks=pytest.mark.kvpress),
    ],
    ids=["package", "quantizers", "kvpress"],
)
def test_all_decide_the_same_in_a_second_interpreter(named: dict[str, list[str]]) -> None:
    tried: list[Trial[Any]] = [trial_of(name, {}, None, kind) for kind, names in named.items() for name in names]
    decide_elsewhere(tried)
    for one in tried:
        assert same_elsewhere(one) == same_after_others(one) == f"the same {one.decides}", one.name
        assert source_notes(type(one.part)) == []

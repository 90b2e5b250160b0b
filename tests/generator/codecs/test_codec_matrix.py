"""Every codec passes the checks of ``kvdrift check``; registering a codec adds it here.

Codecs that need a library are marked ``quantizers`` and run by ``make quantizers``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from fixtures.own_codecs import MODULE as OWN
from fixtures.part_checks import of_this_process

from kvdrift.generator.checks.codecs import CodecTrial
from kvdrift.generator.checks.kinds import trial_of
from kvdrift.generator.checks.trial import Check
from kvdrift.generator.codecs import CODECS, Codec
from kvdrift.generator.codecs.hqq import HQQ
from kvdrift.generator.selectors import default_parameters

NAMES = [
    pytest.param(name, marks=[pytest.mark.quantizers] if issubclass(kind, HQQ) else []) for name, kind in CODECS.items()
]
BY_NAME = {check.name: check for check in CodecTrial.checks}


@cache
def codec_trial(name: str) -> CodecTrial:
    """The codec with its default parameters, one for all checks."""
    return CodecTrial(name)


@pytest.mark.parametrize("check", [*of_this_process(CodecTrial.checks)], ids=lambda check: check.name)
@pytest.mark.parametrize("name", NAMES)
def test_every_codec_holds(name: str, check: Check[Codec]) -> None:
    finding = check(codec_trial(name))
    assert finding.holds, finding.line
    if check.name == "identity":
        parameters = default_parameters(CODECS[name])
        changed, _, skipped = finding.line.partition("; no other value tried of ")
        assert skipped == ("group" if name == "hqq-int2" else "")  # no other group that is tried is a multiple of 4
        assert changed == (", ".join(one for one in parameters if one != skipped) or "no parameter")


@pytest.mark.parametrize(
    ("check", "change", "says"),
    [
        ("shapes", ("(part / self.step)", "part.div_(self.step)"), "keys or values were changed in place"),
        ("shapes", ("layer.value)))", "layer.value[..., :8])))"), "codec Mine: values come back as"),
        ("shapes", ("* self.step for", "/ 0 for"), "codec Mine: keys come back with a number that is not finite"),
        ("shapes", ("self.step).round()", "self.stepp).round()"), "AttributeError: 'Mine' object has no attribute 'stepp' ({path}, line 18)"),
        ("bytes", ("layer.value.numel(), 2)", "layer.value.numel() + int(layer.key.sum() > 0), 2)"), "meta tensors"),
        ("bytes", ("layer.value.numel(), 2)", "layer.value.numel() / 2, 2)"), "bytes are ("),
        ("least bytes", ("layer.key.numel() + layer.value.numel(), 2)", "0)"), "float32: stored_bytes says 0.00 bits a number; what comes back needs at least 2.7"),
        ("least bytes", ("(part / self.step).round() * self.step", "part"), "float32: stored_bytes says 8.00 bits a number; what comes back needs at least 25."),
        ("least bytes", ("(part / self.step).round() * self.step", "0 * part"), None),
        ("repetition", (".round()", ".add(torch.rand(1)).round()"), "a second round trip, or a twin's, reads other numbers"),
        ("repetition", (".round()", ".add(0 * torch.rand(1)).round()"), "numbers are drawn from torch's own state"),
        ("identity", ("step: float", "step: ClassVar[float]"), None),
        ("generated entries", ("step: float = 0.5", "step: float = 0.25"), None),
    ],
)  # fmt: skip
def test_a_broken_codec_fails_the_check_of_what_it_breaks(
    check: str, change: tuple[str, str], says: str | None, tmp_path: Path
) -> None:
    assert change[0] in OWN
    (tmp_path / "my_codec.py").write_text(OWN.replace(*change, 1))
    finding = BY_NAME[check](CodecTrial("my_codec:Mine", folder=tmp_path))
    assert finding.holds is (says is None)
    said = says or {"identity": "no parameter"}.get(check, "")
    assert said.replace("{path}", f"{tmp_path}/my_codec.py") in finding.line


def test_a_module_is_found_to_have_a_codec(tmp_path: Path) -> None:
    (tmp_path / "my_codec.py").write_text(OWN)
    trial = trial_of("my_codec:Mine", {"step": 0.25}, tmp_path)
    assert (type(trial), trial.options) == (CodecTrial, {"step": 0.25})

"""A gate's answer as a JUnit file, for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from log.delta.durability import replace_durably
from schema.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

SUITE = "kvdrift gate"


def write_junit(path: Path, name: str, line: str, outcome: str | None, properties: Mapping[str, object]) -> None:
    """Write a file with one test.

    Args:
        path: The file; an existing file is replaced.
        name: The name of the test.
        line: The answer, or the error, in words.
        outcome: ``failure``, ``skipped`` or ``error``; None if the test passes.
        properties: Further properties of the test.
    """
    counts = {"failure": "failures", "skipped": "skipped", "error": "errors"}
    totals = {total: str(int(outcome == one)) for one, total in counts.items()}
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", {"name": SUITE, "tests": "1", **totals})
    case = ET.SubElement(suite, "testcase", {"classname": SUITE, "name": name})
    listed = ET.SubElement(case, "properties")
    for key, value in properties.items():
        ET.SubElement(listed, "property", {"name": key, "value": str(value)})
    if outcome is not None:
        ET.SubElement(case, outcome, {"message": line})
    ET.SubElement(case, "system-out").text = line
    ET.indent(suites)
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ET.ElementTree(suites).write(aside, encoding="utf-8", xml_declaration=True)
        replace_durably(aside, path)
    except OSError as error:
        raise InputError(f"--junit {path}: cannot be written ({error.strerror or error})") from None

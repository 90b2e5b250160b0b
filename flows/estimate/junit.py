"""A gate's answer as a JUnit file, for continuous integration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

from log.delta.durability import replace_durably
from schema.errors import InputError

SUITE = "kvdrift gate"


def write_junit(path: Path, name: str, line: str, outcome: str | None, properties: Mapping[str, object]) -> None:
    """Write a file with one test, in place of an existing file.

    ``line`` has the answer, or the error, in words; the outcome is ``failure``, ``skipped``, ``error``, or None if the
    test passes.
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

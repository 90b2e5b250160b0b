"""The outcome of a ``kvdrift gate`` call as a JUnit file, for continuous integration.

The file says "error" from the start of the call until the answer. So the file of an earlier call is never
taken for the outcome, however the call ends. Elements and attributes are those of Jenkins' schema junit-10.xsd.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from xml.etree import ElementTree as ET

from kvdrift.log.delta.durability import replace_durably
from kvdrift.schema.errors import InputError, printable

SUITE: Final = "kvdrift gate"
_OPTION = "--junit"
_TOTALS = {"failure": "failures", "error": "errors", "skipped": "skipped"}  # outcome: attribute with its count


class JUnitFile(NamedTuple):
    """A JUnit file with one test, named after the words of the call."""

    path: Path
    test: str

    @classmethod
    def of_call(cls, arguments: Sequence[str]) -> Self | None:
        """Return the file that ``--junit`` of ``kvdrift gate`` names, even if other arguments are wrong; else None."""
        if arguments[:1] != ["gate"]:
            return None
        words, path, words_left = list[str](), None, iter(arguments)
        for word in words_left:
            option, equals, value = word.partition("=")
            if option == _OPTION:
                path = value if equals else next(words_left, None)
            else:
                words.append(word)
        return cls(Path(path), printable(" ".join(words))) if path else None

    def write_error(self, line: str) -> None:
        """Write an error with its reason in place of an answer; raises as ``write`` does."""
        self.write("error", "no answer", line)

    def write(self, outcome: str | None, kind: str, line: str, properties: Mapping[str, Any] | None = None) -> None:
        """Write the outcome of the call, in place of an existing file.

        Args:
            outcome: ``failure``, ``skipped`` or ``error``; None if the test passes.
            kind: the outcome in a word or two.
            line: the answer, or the error, in words.
            properties: values by name; texts as they are, other values as JSON, and None left out.

        Raises:
            InputError: The file cannot be written.
        """
        suites = ET.Element("testsuites")
        totals = {total: str(int(outcome == element)) for element, total in _TOTALS.items()}
        suite = ET.SubElement(suites, "testsuite", {"name": SUITE, "tests": "1", **totals})
        listed = ET.SubElement(suite, "properties")
        for name, value in (properties or {}).items():
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                ET.SubElement(listed, "property", {"name": name, "value": printable(text)})
        case = ET.SubElement(suite, "testcase", {"classname": SUITE, "name": self.test})
        if outcome is not None:
            ET.SubElement(case, outcome, {"type": kind, "message": printable(line)})
        ET.SubElement(case, "system-out").text = printable(line)
        ET.indent(suites)
        aside = self.path.with_name(f".{self.path.name}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            ET.ElementTree(suites).write(aside, encoding="utf-8", xml_declaration=True)
            replace_durably(aside, self.path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{_OPTION} {self.path}: cannot be written ({reason})") from None

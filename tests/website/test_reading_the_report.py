"""``docs/reading-the-report.md`` explains every part and every question of the page, in their order."""

from __future__ import annotations

from fixtures.house import ROOT

from report.sections import PARTS

PAGE = " ".join((ROOT / "docs" / "reading-the-report.md").read_text(encoding="utf-8").split())


def test_every_question_of_the_page_is_explained_in_its_part() -> None:
    place = 0
    for part in PARTS:
        for word in (f"## {part.title}" if part.title else "", *(f"**{question}**" for _, question in part.sections)):
            if word not in {"", "****"}:
                assert PAGE.find(word, place) >= 0, word
                place = PAGE.find(word, place)

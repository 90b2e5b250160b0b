"""The site's gallery: pages and explorers of the shipped studies that `make gallery` has made."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File

STUDIES = ("quickstart", "frontier", "weights", "llama_cpp")
"""Files of ``studies/`` without their ending, in the gallery's order; studies without a report are left out."""

_EMPTY = (
    "None was made yet. `make gallery` runs the shipped studies, which takes some minutes, and builds the site again."
)


@dataclass(frozen=True)
class Shown:
    """A finished study of the gallery."""

    name: str  # The study's name
    about: str  # The first words of the study's file
    folder: Path  # The folder of its report

    @property
    def files(self) -> list[Path]:
        """The report's files that the site has, relative to the folder."""
        every = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        return [path.relative_to(self.folder) for path in every]


def shown(root: Path) -> list[Shown]:
    """Return the shipped studies that have a report, in the gallery's order."""
    found = []
    for file in (root / "studies" / f"{name}.toml" for name in STUDIES):
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        name = tomllib.loads(text)["study"]["name"]
        folder = root / "stores" / name / "report" / name
        if (folder / "index.html").is_file():
            lines = [line.removeprefix("#").strip() for line in text.partition("\n\n")[0].splitlines()]
            found.append(Shown(name, " ".join(lines), folder))
    return found


def gallery_page(studies: list[Shown]) -> str:
    """Return the gallery's page as Markdown."""
    parts = ["# Gallery", "The pages of the studies in `studies/`, as `kvdrift run` wrote them on one machine."]
    for study in studies:
        link = f"gallery/{study.name}"
        explorer = f" · [Trajectories]({link}/trajectories.html)" if Path("trajectories.html") in study.files else ""
        parts += [f"## {study.name}", study.about, f"[Report]({link}/index.html){explorer}"]
        if Path("figures/bytes.svg") in study.files:
            parts.append(f"![Bytes against divergence, of {study.name}]({link}/figures/bytes.svg)")
    return "\n\n".join([*parts, *([] if studies else [_EMPTY])]) + "\n"


def gallery_files(studies: list[Shown], config: MkDocsConfig) -> list[File]:
    """Return the gallery's page and the files of its studies."""
    files = [File.generated(config, "gallery.md", content=gallery_page(studies))]
    for study in studies:
        for path in study.files:
            place = f"gallery/{study.name}/{path.as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(study.folder / path)))
    return files

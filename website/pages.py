"""Pages of the site whose text lies elsewhere in the repository, such as README, and the gallery of shipped studies.

MkDocs calls the functions that begin with ``on_``.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

STUDIES = ("smollm2", "deployed", "smollm2_llama_cpp", "presses", "quickstart", "frontier", "weights", "llama_cpp")
"""Files of ``studies/`` without their ending, in the gallery's order; studies without a report are left out."""

_EMPTY = (
    "No page exists yet. `make gallery` runs the shipped studies, which takes some minutes, and builds the site again."
)
ROOT = Path(__file__).parents[1]
NOTEBOOK = "docs/notebook.ipynb"
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md", NOTEBOOK: "notebook.md",
}  # fmt: skip
"""Files of the repository, each with its page."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^()#\s]+)")
_TOGETHER = tempfile.TemporaryDirectory(prefix="kvdrift-site-")  # removed when the process ends


@dataclass(frozen=True)
class Shown:
    """A finished study of the gallery."""

    name: str  # The study's name
    about: str  # The first words of the study's file
    folder: Path  # The folder of its report

    @property
    def files(self) -> list[Path]:
        """The files of the report that the site copies, relative to the report's folder."""
        every = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        return [path.relative_to(self.folder) for path in every]

    @property
    def verdict(self) -> str:
        """The first sentence of the report."""
        return str(json.loads((self.folder / "verdict.json").read_text(encoding="utf-8"))["sentence"])


def shown(root: Path) -> list[Shown]:
    """Return the shipped studies that have a report, in the gallery's order."""
    studies = []
    for file in (root / "studies" / f"{name}.toml" for name in STUDIES):
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        name = tomllib.loads(text)["study"]["name"]
        folder = root / "stores" / name / "report" / name
        if (folder / "verdict.json").is_file():
            lines = [line.removeprefix("#").strip() for line in text.partition("\n\n")[0].splitlines()]
            studies.append(Shown(name, " ".join(lines), folder))
    return studies


def gallery_page(studies: list[Shown]) -> str:
    """Return the gallery's page as Markdown."""
    parts = ["# Gallery", "The pages of the studies in `studies/`, as `kvdrift run` wrote them on one machine."]
    for study in studies:
        link = f"gallery/{study.name}"
        explorer = f" · [Trajectories]({link}/trajectories.html)" if Path("trajectories.html") in study.files else ""
        figure = Path("figures/bytes.svg") in study.files
        drawn = [f"![Bytes against divergence, of {study.name}]({link}/figures/bytes.svg)"] if figure else []
        words = [
            "<div markdown>",
            f"**{study.verdict}**",
            study.about,
            f"[Report]({link}/index.html){explorer}",
            "</div>",
        ]
        parts += [f"## {study.name}", '<div class="study" markdown>', *drawn, *words, "</div>"]
    return "\n\n".join([*parts, *([] if studies else [_EMPTY])]) + "\n"


def gallery_files(studies: list[Shown], config: MkDocsConfig) -> list[File]:
    """Return the gallery's page and the files of its studies."""
    files = [File.generated(config, "gallery.md", content=gallery_page(studies))]
    for study in studies:
        for path in study.files:
            place = f"gallery/{study.name}/{path.as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(study.folder / path)))
    return files


@event_priority(100)  # before the plugin reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copy the packages to a folder with a wheel's layout, where mkdocstrings finds their files without importing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    first, *packages = project["tool"]["hatch"]["build"]["only-include"]
    whole = Path(_TOGETHER.name) / first
    for name, folder in {first: whole, **{name: whole / name for name in packages}}.items():
        shutil.copytree(ROOT / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_TOGETHER.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ``PAGES``, the gallery, and the licence that README links to."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=notebook_page(text) if source == NOTEBOOK else text))
    for file in gallery_files(shown(ROOT), config):
        files.append(file)
    files.append(File.generated(config, "LICENSE.txt", content=(ROOT / "LICENSE").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs' call
    """Return the page with links to files of the repository turned into links to pages of the site."""
    places = {page: source for source, page in PAGES.items()}
    return linked(markdown, places.get(page.file.src_uri, f"docs/{page.file.src_uri}"))


def linked(markdown: str, source: str) -> str:
    """Return the Markdown of the file ``source`` with its links turned into links to pages of the site.

    A link to a file without a page becomes relative to ``docs``.
    """

    def target(link: re.Match[str]) -> str:
        path = normpath(PurePosixPath(source).parent / link[1])
        if path == "LICENSE":
            return "LICENSE.txt"
        return PAGES.get(path) or relpath(path, "docs")

    return _LINK.sub(target, markdown)


def notebook_page(text: str) -> str:
    """Return a notebook's cells as Markdown: its texts, its code in fences, and its output."""
    parts = []
    for cell in json.loads(text)["cells"]:
        lines = "".join(cell["source"])
        parts.append(lines if cell["cell_type"] == "markdown" else f"```python\n{lines}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f"![What the code draws](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"

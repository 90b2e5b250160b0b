"""A program that makes the commits of ``recorded_commits`` while one change on the disk fails, and then once more.

The store's tables exist already; ``failing_study`` tries failures while tables are made.

The program needs the library ``library.c`` preloaded. Its arguments are a folder, and the number of trials for each way
to fail. It prints the outcome of each trial as a line of JSON.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from faults.disk import recorded_commits
from faults.disk.failing import How, counted, fail, set_clock
from faults.disk.trials import fault_of_end, in_a_process, say, ways

from kvdrift.log.store import Store
from kvdrift.schema.errors import KvdriftError


def commit(root: Path, before: Callable[[Path], None]) -> None:
    """Do the commits as a command does them: an error is one line and an exit code."""
    before(root / "parent")
    try:
        recorded_commits.main(root, catalog=False)
    except KvdriftError as error:
        sys.stderr.write(f"kvdrift: {error}\n")
        sys.exit(error.exit_code)


def go_on(root: Path) -> None:
    """Make the commits again, and print whether everything acknowledged is there."""
    os.fsync = lambda _: None  # no power is cut here
    told = root / recorded_commits.ACKNOWLEDGED
    acknowledged = told.read_text().split() if told.exists() else []
    sys.stdout.write(recorded_commits.go_on(root / recorded_commits.STORE, acknowledged))


def tried(folder: Path, name: str, how: How, before: Callable[[Path], None]) -> dict[str, str | int | None]:
    """Make one trial in a new folder."""
    root, said, heard = folder / name, folder / f"{name}.said", folder / f"{name}.heard"
    shutil.copytree(folder / "made", root)
    code = in_a_process(said, commit, root, before)
    outcome = fault_of_end(how, code, said.read_text())
    if outcome is None:
        again = in_a_process(heard, go_on, root)
        outcome = heard.read_text()[-600:] if again == 0 else f"then ended with {again}: {heard.read_text()[-600:]}"
    shutil.rmtree(root)
    return {"trial": name, "code": code, "outcome": outcome, "said": said.read_text()[-300:]}


def main(folder: Path, count: int) -> None:
    """Make randomly chosen trials of each way to fail, and a trial with the clock set back."""
    made, changes = folder / "made", folder / "changes"

    def count_changes() -> None:
        shutil.copytree(made, folder / "whole")
        fail(folder / "whole" / "parent", How.COUNTED)
        recorded_commits.main(folder / "whole", catalog=False)
        changes.write_text(counted())

    assert in_a_process(folder / "said", Store.create, made / recorded_commits.STORE) == 0
    assert in_a_process(folder / "said", count_changes) == 0
    every = ways(changes.read_text())
    chosen: list[tuple[How, int]] = []
    for how in dict(every):
        of_this = [trial for trial in every if trial[0] is how]
        chosen += random.Random(len(every)).sample(of_this, count)  # noqa: S311
    for how, at in chosen:
        say(tried(folder, f"{how.name} at change {at}", how, lambda root, how=how, at=at: fail(root, how, at)))
    say(tried(folder, "the clock goes back", How.COUNTED, lambda _: set_clock(-3.2e7, back=1.0)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

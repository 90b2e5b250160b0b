"""A listing of a log that has a later file and lacks an earlier file, as while commits come, does no harm."""

from __future__ import annotations

from pathlib import Path

from faults.test_system_calls import start


def test_listings_that_lack_a_file(library: Path, tmp_path: Path) -> None:
    """Whichever listing lacks a file, no log is called damaged, the store opens, and each commit counts once."""
    program = start(library, "incomplete_listings.py", tmp_path / "store")
    out, err = program.communicate()
    assert program.returncode == 0, err
    assert out.split() == ["faults", "1", "open", "1", *(word for at in range(1, 6) for word in ("commit", str(at)))]

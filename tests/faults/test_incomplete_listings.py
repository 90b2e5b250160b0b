"""A log is listed while commits come, and the listing has a later file and lacks an earlier one: nothing comes of it."""

from __future__ import annotations

from pathlib import Path

from faults.test_system_calls import start


def test_listings_that_lack_a_file(library: Path, tmp_path: Path) -> None:
    """A log is not called damaged, a store opens, and what is committed is there once, whichever listing it is."""
    program = start(library, "incomplete_listings.py", tmp_path / "store")
    out, err = program.communicate()
    assert program.returncode == 0, err
    assert out.split() == ["faults", "1", "open", "1", *(word for at in range(1, 6) for word in ("commit", str(at)))]

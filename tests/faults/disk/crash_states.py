"""Every state in which a power cut can leave recorded file operations, given their fsyncs.

The names in a folder are durable as of the folder's last fsync. Each later change may be there or not, whatever the
others are; a rename is one change. The content of a file is durable as of the file's last fsync. Later content may be
absent, zeros, torn or there. Temporary names, which no reader looks at, are left out of the states.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faults.disk.recorded_commits import ACKNOWLEDGED

State = dict[str, bytes | None]  # content by path relative to the root; None of a folder


@dataclass(frozen=True)
class Operation:
    """One recorded operation; paths are relative to the root."""

    what: str
    path: str
    other: str
    offset: int
    data: bytes


def record(library: Path, folder: Path, program: list[str], search: list[Path]) -> list[Operation]:
    """Run a Python program whose last argument is a new folder below ``folder``; return its operations there.

    ``search`` is where the program finds its modules.
    """
    root, log = folder / "root", folder / "operations"
    root.mkdir()
    environment = os.environ | {"LD_PRELOAD": str(library), "RECORDED_ROOT": str(root), "RECORDED_LOG": str(log)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, search))
    subprocess.run([sys.executable, *program, str(root)], check=True, env=environment)
    operations, data, at = [], log.read_bytes(), 0
    while at < len(data):
        end = data.index(b"\n", at)
        what, path, other, offset, size = data[at:end].decode().split("\t")
        at = end + 1 + int(size)
        short = [os.path.relpath(name, root) if name else "" for name in (path, other)]
        operations.append(Operation(what, *short, int(offset), data[end + 1 : at]))
    return operations


@dataclass(eq=False)
class _File:
    now: bytes = b""
    durable: bytes = b""

    def contents(self) -> set[bytes]:
        """Return the contents that a power cut may leave in a file."""
        if self.now == self.durable:
            return {self.now}
        torn = self.now[: max(len(self.now) // 2, 1)]
        return {self.durable, self.now, torn, bytes(len(self.now))}


@dataclass(eq=False)
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[dict[str, _File | _Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        self.changes.append(names)
        _apply(self.now, names)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.now), []


def _apply(entries: dict[str, _File | _Folder], names: dict[str, _File | _Folder | None]) -> None:
    for name, entry in names.items():
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


class Disk:
    """A folder during operations, with the part of its state that is durable."""

    def __init__(self) -> None:
        self._root = _Folder()
        self.acknowledged: list[str] = []

    def do(self, operation: Operation) -> None:
        """Do one operation."""
        if operation.path == ACKNOWLEDGED:
            if operation.what == "write":
                self.acknowledged += operation.data.decode().split()
            return
        folder, name = self._place(operation.path)
        entry = folder.now.get(name) if name else folder
        if operation.what in {"create", "mkdir"}:
            folder.change({name: _File() if operation.what == "create" else _Folder()})
        elif operation.what == "unlink":
            folder.change({name: None})
        elif operation.what in {"link", "rename"}:
            assert entry is not None
            self._name_again(folder, name, entry, operation)
        elif isinstance(entry, _Folder):
            entry.sync()
        elif entry is not None and operation.what == "fsync":
            entry.durable = entry.now
        elif entry is not None:
            self._write(entry, operation)

    def _name_again(self, folder: _Folder, name: str, entry: _File | _Folder, operation: Operation) -> None:
        target, new = self._place(operation.other)
        gone: dict[str, _File | _Folder | None] = {name: None} if operation.what == "rename" else {}
        if target is folder:
            folder.change({**gone, new: entry})
        else:
            target.change({new: entry})
            folder.change(gone)

    @staticmethod
    def _write(file: _File, operation: Operation) -> None:
        if operation.what == "write":
            before = file.now.ljust(operation.offset, b"\0")
            file.now = before[: operation.offset] + operation.data + before[operation.offset + len(operation.data) :]
        else:  # truncate and resize
            file.now = file.now[: operation.offset].ljust(operation.offset, b"\0")

    def _place(self, path: str) -> tuple[_Folder, str]:
        *folders, name = path.split("/")
        at = self._root
        for part in folders:
            below = at.now[part]
            assert isinstance(below, _Folder)
            at = below
        return (at, "" if name == "." else name)

    def states(self) -> Iterator[State]:
        """Yield every state that a power cut can leave now; some may be equal."""
        yield from _states(self._root, "")

    def not_durable(self) -> list[str]:
        """Name what a power cut could change, temporary names left out."""
        return sorted(_not_durable(self._root, ""))


def _temporary(name: str) -> bool:
    return name.endswith(".part") or "#" in name or name.startswith(".temporary-")


def _states(folder: _Folder, path: str) -> Iterator[State]:
    found = set()
    for kept in itertools.product((False, True), repeat=len(folder.changes)):
        entries = dict(folder.durable)
        for names, there in zip(folder.changes, kept, strict=True):
            if there:
                _apply(entries, names)
        shown = {name: entry for name, entry in entries.items() if not _temporary(name)}
        key = tuple(sorted((name, id(entry)) for name, entry in shown.items()))
        if key in found:
            continue
        found.add(key)
        options: list[list[State]] = []
        for name, entry in sorted(shown.items()):
            if isinstance(entry, _Folder):
                options.append([{f"{path}{name}": None} | below for below in _states(entry, f"{path}{name}/")])
            else:
                options.append([{f"{path}{name}": data} for data in sorted(entry.contents())])
        for chosen in itertools.product(*options):
            yield {name: data for part in chosen for name, data in part.items()}


def _not_durable(folder: _Folder, path: str) -> Iterator[str]:
    for name, entry in folder.now.items():
        if _temporary(name):
            continue
        if folder.durable.get(name) is not entry:
            yield f"the name {path}{name}"
        if isinstance(entry, _Folder):
            yield from _not_durable(entry, f"{path}{name}/")
        elif entry.now != entry.durable:
            yield f"the content of {path}{name}"


def put_down(state: State, root: Path) -> None:
    """Write a state to a new folder."""
    root.mkdir()
    for path, data in sorted(state.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)

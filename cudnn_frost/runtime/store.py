"""Compiled kernels in a directory that processes and machines share.

An entry is a shared library and, beside it, a description: the whole key it was compiled for and
a digest of the library. Both are renamed into place, the library first, so that a reader sees an
entry whole or not at all and needs no lock; a writer holds the entry's lock file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_SCRATCH = ".tmp"
_ENTRY_FILE = re.compile(r"([0-9a-f]{64})\.(?:so|json)")


@dataclass(frozen=True, slots=True)
class CompileKey:
    """Everything that decides what the compiler would emit.

    kernel: the kernel family, as `Row.kernel`.
    config, signature: the keys of the two arguments of its `compile`.
    fingerprint: digest of the kernel sources and versions of the compilers.
    """

    kernel: str
    config: str
    signature: str
    fingerprint: str

    def __str__(self) -> str:
        return "|".join((self.kernel, self.config, self.signature, self.fingerprint))


class DamagedEntry(Exception):
    """An entry that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one key's library is kept, whether it is there or not."""

    folder: Path
    stem: str

    @classmethod
    def of(cls, folder: Path, key: CompileKey) -> Entry:
        return cls(folder, hashlib.sha256(str(key).encode()).hexdigest())

    @property
    def library(self) -> Path:
        return self.folder / f"{self.stem}.so"

    @property
    def description(self) -> Path:
        return self.folder / f"{self.stem}.json"

    def exists(self) -> bool:
        """False too where the folder cannot be looked into."""
        try:
            return self.description.exists()
        except OSError:
            return False

    def checked_key(self) -> CompileKey:
        """The key of an entry that is whole; DamagedEntry says what is wrong with it."""
        try:
            described = json.loads(self.description.read_text())
            digest = described.pop("sha256")
            key = CompileKey(**described)
            library = self.library.read_bytes()
        except OSError as error:
            raise DamagedEntry(f"{error.filename} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedEntry(f"{self.description} is not a description") from None
        if hashlib.sha256(library).hexdigest() != digest:
            raise DamagedEntry(f"{self.library} is not the library that was stored")
        if Entry.of(self.folder, key) != self:
            raise DamagedEntry(f"{self.description} describes another entry")
        return key

    def store(self, key: CompileKey, write_library: Callable[[Path], None]) -> None:
        """Put a library in place; OSError or the writer's error leaves no new file behind."""
        handle, name = tempfile.mkstemp(_SCRATCH, f"{self.stem}.", self.folder)
        os.close(handle)
        scratch = Path(name)
        try:
            write_library(scratch)
            digest = hashlib.sha256(scratch.read_bytes()).hexdigest()
            os.replace(scratch, self.library)
            scratch.write_text(json.dumps({**asdict(key), "sha256": digest}, indent=1))
            os.replace(scratch, self.description)
        finally:
            scratch.unlink(missing_ok=True)

    def remove(self) -> None:
        """The description first, so that no reader meets half an entry.

        The lock file stays: another process may be waiting at it.
        """
        self.description.unlink(missing_ok=True)
        self.library.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held by one process at a time and released with it; OSError where no file can be made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.stem}.lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def entries(folder: Path) -> list[Entry]:
    """Every entry of a directory, whole or damaged, in the order of their names; none where there
    is no directory. Other files are not looked at. OSError when it cannot be read.
    """
    if not folder.exists():
        return []
    names = (_ENTRY_FILE.fullmatch(path.name) for path in folder.iterdir())
    return [Entry(folder, stem) for stem in sorted({name[1] for name in names if name})]


def remove_scratch(folder: Path) -> None:
    """What writers that were killed left behind; a writer at work fails and says so."""
    for path in folder.glob(f"*{_SCRATCH}"):
        if re.fullmatch(r"[0-9a-f]{64}\..*", path.name):
            path.unlink(missing_ok=True)

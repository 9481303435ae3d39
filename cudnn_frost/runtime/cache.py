"""The one compile cache: an in-process memo, then a directory shared by processes.

An entry is a shared library and, beside it, the full key it was compiled for: configuration,
signature, target architecture, package versions and a digest of the kernel sources. The file name
is a hash of that key; the key itself is compared before an entry is trusted.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import artifacts
from .device import installed_versions

_LOG = logging.getLogger("cudnn_frost")
DIRECTORY_VARIABLE = "CUDNN_FROST_CACHE_DIR"
_KERNELS = Path(__file__).parent.parent / "kernels"

_memo: dict[str, Callable[..., Any]] = {}
_memo_lock = threading.Lock()


def directory() -> Path:
    """Where entries live: `CUDNN_FROST_CACHE_DIR`, else `cudnn_frost` in the user's cache."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cudnn_frost"


@functools.cache
def fingerprint() -> str:
    """Sources and compilers that an entry depends on, as text."""
    digest = hashlib.sha256()
    for path in sorted(_KERNELS.rglob("*.py")):
        digest.update(path.relative_to(_KERNELS).as_posix().encode() + path.read_bytes())
    versions = installed_versions()
    compilers = ",".join(f"{p}={versions.get(p)}" for p in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    return f"{compilers},sources={digest.hexdigest()}"


def full_key(kernel: str, config: Any, signature: Any) -> str:
    """Everything that decides what the compiler would emit."""
    return "|".join((kernel, config.key(), signature.key(), fingerprint()))


def entry_of(kernel: str, config: Any, signature: Any) -> Callable[..., Any]:
    """The callable host entry of a kernel; compiled when neither memo nor directory has it.

    kernel: `<arch>.<family>`, a module below `cudnn_frost.kernels`. Raises ImportError when the
    DSL is missing, NotImplementedError when compilation fails.
    """
    key = full_key(kernel, config, signature)
    found = _memo.get(key)
    if found is not None:
        return found
    # per key, so that another key's compilation is not waited for
    with _key_lock(key):
        found = _memo.get(key)
        if found is None:
            found = _from_directory(kernel, config, signature, key)
            _memo[key] = found
    return found


_key_locks: dict[str, threading.Lock] = {}


def _key_lock(key: str) -> threading.Lock:
    with _memo_lock:
        return _key_locks.setdefault(key, threading.Lock())


def _from_directory(kernel: str, config: Any, signature: Any, key: str) -> Callable[..., Any]:
    stem = directory() / hashlib.sha256(key.encode()).hexdigest()
    library, described = stem.with_suffix(".so"), stem.with_suffix(".key")
    with _file_lock(stem.with_suffix(".lock")) as usable:
        try:
            if usable and _is_trusted(library, described, key):
                return artifacts.load(library)
        except (OSError, RuntimeError) as error:
            _LOG.warning("cache entry %s is damaged and is compiled again: %s", library, error)
        compiled = _compile(kernel, config, signature)
        try:
            if usable:
                _store(compiled, library, described, key)
        except (OSError, RuntimeError) as error:
            _LOG.warning("the compiled kernel was not kept in %s: %s", stem.parent, error)
        return compiled


def _is_trusted(library: Path, described: Path, key: str) -> bool:
    return library.exists() and described.exists() and described.read_text() == key


def _store(compiled: Any, library: Path, described: Path, key: str) -> None:
    """Both files appear whole or not at all, the library first."""
    scratch = library.with_suffix(f".{os.getpid()}.so")
    artifacts.export(compiled, scratch)
    os.replace(scratch, library)
    scratch = described.with_suffix(f".{os.getpid()}")
    scratch.write_text(key)
    os.replace(scratch, described)


def _compile(kernel: str, config: Any, signature: Any) -> Callable[..., Any]:
    module = importlib.import_module(f"cudnn_frost.kernels.{kernel}")
    try:
        return module.compile(config, signature)
    except (ImportError, NotImplementedError):
        raise
    except Exception as error:
        raise NotImplementedError(f"{kernel} did not compile: {error}") from error


@contextmanager
def _file_lock(path: Path) -> Iterator[bool]:
    """Held by one process at a time and released with it; False where no file can be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    except OSError as error:
        _LOG.warning("the compile cache at %s is unusable: %s", path.parent, error)
        yield False
        return
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield True

"""The one compile cache: an in-process memo, then a directory shared by processes.

A directory that cannot be written is still read: kernels compiled ahead (`cudnn-frost compile`)
serve from a read-only image.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from . import artifacts
from .device import installed_versions
from .store import CompileKey, DamagedEntry, Entry

_LOG = logging.getLogger("cudnn_frost")
DIRECTORY_VARIABLE = "CUDNN_FROST_CACHE_DIR"
_KERNELS = Path(__file__).parent.parent / "kernels"

_memo: dict[CompileKey, Callable[..., Any]] = {}
_memo_lock = threading.Lock()
_key_locks: dict[CompileKey, threading.Lock] = {}


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
    return f"{compilers},machine={platform.machine()},sources={digest.hexdigest()}"


def kernel_module(kernel: str) -> str:
    """The module of a kernel family: `decode_sm90` is `cudnn_frost.kernels.sm90.decode`."""
    family, _, arch = kernel.rpartition("_")
    return f"cudnn_frost.kernels.{arch}.{family}"


def shipped_configs(kernel: str) -> list[Any]:
    """Every configuration of a kernel family that is shipped."""
    return importlib.import_module(f"cudnn_frost.kernels.configs.{kernel}").shipped_configs()


def compile_key(kernel: str, config: Any, signature: Any) -> CompileKey:
    """What a kernel's entry is kept under; holds no length, total or pointer."""
    return CompileKey(kernel, config.key(), signature.key(), fingerprint())


def entry_of(kernel: str, config: Any, signature: Any) -> Callable[..., Any]:
    """The callable host entry of a kernel; compiled when neither memo nor directory has it.

    kernel: as `Row.kernel`. Raises ImportError when the DSL is missing, NotImplementedError when
    compilation fails.
    """
    key = compile_key(kernel, config, signature)
    found = _memo.get(key)
    if found is not None:
        return found
    # per key, so that another key's compilation is not waited for
    with _memo_lock:
        lock = _key_locks.setdefault(key, threading.Lock())
    with lock:
        found = _memo.get(key)
        if found is None:
            found = kept(
                key, lambda: _compile(kernel, config, signature), artifacts.export, artifacts.load
            )
            _memo[key] = found
    return found


def kept(
    key: CompileKey,
    make: Callable[[], Any],
    export: Callable[[Any, Path], None],
    load: Callable[[Path], Any],
) -> Any:
    """What the directory holds under a key, loaded; else made, and exported into it.

    A directory that cannot be written and an entry that is damaged are warnings.
    """
    entry = Entry.of(directory(), key)
    with suppress(DamagedEntry):
        if entry.exists():
            return _load(entry, load)
    with _locked(entry) as writable:
        try:
            # another process may have stored it while the lock was waited for
            if entry.exists():
                return _load(entry, load)
        except DamagedEntry as error:
            _LOG.warning("a cache entry is damaged and is compiled again: %s", error)
        made = make()
        try:
            if writable:
                entry.store(key, lambda path: export(made, path))
        except (OSError, RuntimeError) as error:
            _LOG.warning("the compiled kernel is not kept in %s: %s", entry.folder, error)
        return made


@contextmanager
def _locked(entry: Entry) -> Iterator[bool]:
    """False, with a warning, where the directory takes no lock."""
    with ExitStack() as held:
        try:
            held.enter_context(entry.locked())
        except OSError as error:
            _LOG.warning("the compile cache at %s cannot be written: %s", entry.folder, error)
            yield False
        else:
            yield True


def _load(entry: Entry, load: Callable[[Path], Any]) -> Any:
    """An entry's library, loaded; DamagedEntry when it cannot be used."""
    entry.checked_key()
    try:
        return load(entry.library)
    except (OSError, RuntimeError) as error:
        raise DamagedEntry(f"{entry.library} does not load: {error}") from error


def _compile(kernel: str, config: Any, signature: Any) -> Callable[..., Any]:
    try:
        return importlib.import_module(kernel_module(kernel)).compile(config, signature)
    except (ImportError, NotImplementedError):
        raise
    except Exception as error:
        raise NotImplementedError(f"{kernel} did not compile: {error}") from error

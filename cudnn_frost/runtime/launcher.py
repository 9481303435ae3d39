"""native/launch.cc: compiled once for a cache directory, loaded once for a process."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import cache
from .device import installed_versions
from .store import CompileKey

_SOURCE = Path(__file__).parent / "native" / "launch.cc"


@functools.cache
def launcher_key() -> CompileKey:
    """What the compiled launcher is kept under."""
    version = installed_versions().get("apache-tvm-ffi")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()
    where = f"apache-tvm-ffi={version},machine={platform.machine()}"
    return CompileKey("launch", "launch", "", f"{where},source={digest}")


def launcher() -> Any:
    """The launcher as a tvm-ffi module.

    Raises NotImplementedError when the cache does not hold it and it cannot be made.
    """
    found = _found()
    if isinstance(found, Exception):
        raise NotImplementedError(f"the launcher cannot be made: {found}") from found
    return found


@functools.cache
def _found() -> Any:
    """The module, or why there is none; asked once for a process."""
    made: list[tempfile.TemporaryDirectory[str]] = []

    def path() -> Path:
        return Path(made[0].name) / "launch.so"

    def make() -> Any:
        made.append(tempfile.TemporaryDirectory(prefix="cudnn_frost_"))
        return _built(path())

    def keep(_: Any, kept: Path) -> None:
        shutil.copyfile(path(), kept)

    try:
        return cache.kept(launcher_key(), make, keep, _load)
    except (OSError, RuntimeError) as error:
        return error
    finally:
        # a loaded library outlives its file
        for folder in made:
            folder.cleanup()


def _built(path: Path) -> Any:
    compile_library(_SOURCE, path)
    return _load(path)


def compile_library(source: Path, library: Path) -> None:
    """Compile a C++ file that uses tvm-ffi (`$CXX`, else c++); RuntimeError says why not."""
    from tvm_ffi import libinfo

    includes = [f"-I{folder}" for folder in libinfo.include_paths()]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-std=c++17", "-O2", "-fPIC", "-shared", *includes]
    command += ["-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"it needs a C++ compiler once ($CXX, else c++): {error}") from None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


def _load(path: Path) -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(os.fspath(path))

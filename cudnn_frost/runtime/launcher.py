"""native/launch.cc: compiled once for a cache directory, loaded once for a process."""

from __future__ import annotations

import functools
import hashlib
import os
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
    return CompileKey("launch", "launch", "", f"apache-tvm-ffi={version},source={digest}")


@functools.cache
def launcher() -> Any:
    """The launcher as a tvm-ffi module.

    Raises NotImplementedError when the cache does not hold it and no C++ compiler makes it.
    """
    with tempfile.TemporaryDirectory(prefix="cudnn_frost_") as scratch:
        path = Path(scratch) / "launch.so"

        def keep(_: Any, kept: Path) -> None:
            shutil.copyfile(path, kept)

        # a loaded library outlives its file
        return cache.kept(launcher_key(), lambda: _built(path), keep, _load)


def _built(path: Path) -> Any:
    from tvm_ffi import libinfo

    includes = [f"-I{folder}" for folder in libinfo.include_paths()]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-std=c++17", "-O2", "-fPIC", "-shared", *includes]
    command += ["-o", str(path), str(_SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NotImplementedError(
            f"the launcher needs a C++ compiler once ($CXX, else c++): {error}"
        ) from None
    if done.returncode != 0:
        raise NotImplementedError(f"{' '.join(command)} failed:\n{done.stderr}")
    return _load(path)


def _load(path: Path) -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(os.fspath(path))

"""A compiled kernel as a shared library: written once, loaded without the compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FUNCTION = "frost_kernel"
_RUNTIME = "libcute_dsl_runtime.so"


def export(compiled: Any, path: str | os.PathLike[str]) -> None:
    """Write what a kernel module's `compile` returned as a shared library at `path`.

    Needs a C linker (`$CC`, else `cc`), no GPU. RuntimeError with its output when linking fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        object_file = os.path.join(folder, "kernel.o")
        compiled.export_to_c(object_file, _FUNCTION, export_only_tvm_ffi_symbols=True)
        # the runtime's symbols stay open: `load` brings them in
        linker = shlex.split(os.environ.get("CC", "cc"))
        command = [*linker, "-shared", "-o", os.fspath(path), object_file]
        linked = subprocess.run(command, capture_output=True, text=True)
    if linked.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{linked.stderr}")


def load(path: str | os.PathLike[str]) -> Callable[..., None]:
    """The kernel in a library that `export` wrote; its arguments are the kernel's args tuple."""
    import tvm_ffi

    _load_runtime()
    return tvm_ffi.load_module(os.fspath(path)).get_function(_FUNCTION)


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


def runtime_library() -> Path:
    """The CuTe DSL's runtime library, newest CUDA first; FileNotFoundError when not installed."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(
        (path for root in roots for path in Path(root).glob(f"cu*/lib/{_RUNTIME}")), reverse=True
    )
    if not found:
        raise FileNotFoundError(f"{_RUNTIME} of nvidia-cutlass-dsl is not installed")
    return found[0]

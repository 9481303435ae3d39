"""Compiling without a GPU: host functions run here, and the instructions of compiled kernels."""

import importlib.util
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

EM_CUDA = 190


def host_compile(function, *examples):
    """A `cute.jit` host function, compiled for this machine's processor."""
    cute = pytest.importorskip("cutlass.cute")
    return cute.compile(function, *examples, options="--enable-tvm-ffi --gpu-arch sm_90a")


def nvdisasm() -> str:
    """The disassembler of the nvidia-cuda-nvdisasm package, else the one on the path."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(root).glob("cu*/bin/nvdisasm"), reverse=True):
            return str(path)
    found = shutil.which("nvdisasm")
    assert found, "install nvidia-cuda-nvdisasm (the test extra names it)"
    return found


def cubins_of(library: bytes) -> list[bytes]:
    """Every GPU binary embedded in a shared library."""
    found = []
    for match in re.finditer(b"\x7fELF", library):
        start = match.start()
        if struct.unpack_from("<H", library, start + 18)[0] == EM_CUDA:
            segments, sections = struct.unpack_from("<QQ", library, start + 32)
            sizes = struct.unpack_from("<HHHH", library, start + 54)
            end = max(segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
            found.append(library[start : start + end])
    assert found, "no GPU binary"
    return found


def sass_of(library: Path, folder: Path) -> dict[str, str]:
    """The instructions of every GPU function in a shared library, by the function's name."""
    functions = {}
    for cubin in cubins_of(library.read_bytes()):
        file = folder / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([nvdisasm(), "-c", file], capture_output=True, text=True, check=True)
        parts = re.split(r"(?m)^\s*\.section\s+\.text\.([^,\s]+)", done.stdout)
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            assert name not in functions, name
            functions[name] = text
    assert functions, "no GPU function"
    return functions


def spills(sass: str) -> list[str]:
    return re.findall(r"\b(?:LDL|STL)\b[^;]*;", sass)

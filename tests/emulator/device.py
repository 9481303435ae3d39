"""A device that is not there: graphs plan for it, and its kernels run on the CPU.

    with emulated():
        graph = cudnn_frost.Graph(...)   # plans for Hopper, takes CPU tensors

Compilation, lowering, checks and the kernels' own host code are the real ones. Below the CUDA
runtime, `native/` interprets the PTX of each launch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cudnn_frost.heuristics.assemble import PlanEntry
from cudnn_frost.runtime import artifacts, build, cache
from cudnn_frost.runtime.device import installed_versions
from cudnn_frost.runtime.plan import CompiledPlan, KernelPlan
from cudnn_frost.vocab import Target

_NATIVE = Path(__file__).parent / "native"
_FUNCTION = "frost_kernel"


@functools.cache
def library() -> ctypes.CDLL:
    """The interpreter, compiled once for its sources and loaded before any kernel is."""
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(_NATIVE.iterdir())))
    path = folder() / f"emulator-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-Wall", "-Werror"]
        source = str(_NATIVE / "runtime.cc")
        subprocess.run([*compiler, *flags, "-o", str(made), source], check=True)
        made.rename(path)
    import tvm_ffi  # noqa: F401  the interpreter raises through it

    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    loaded.emulator_error.restype = ctypes.c_char_p
    return loaded


@functools.cache
def folder() -> Path:
    """Where compiled kernels are kept between tests: beside the compile cache's own entries."""
    path = Path(os.environ.get("CUDNN_FROST_EMULATOR_DIR") or tempfile.gettempdir())
    path = path / f"cudnn_frost_emulator_{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class Program:
    """A compiled kernel: the callable host entry, and the PTX of what it launches."""

    entry: Callable[..., Any]
    ptx: bytes


_programs: dict[str, Program] = {}


def program_of(kernel: str, config: Any, signature: Any) -> Program:
    key = cache.compile_key(kernel, config, signature)
    name = hashlib.sha256(str(key).encode()).hexdigest()
    if name not in _programs:
        library()
        shared, ptx = folder() / f"{name}.so", folder() / f"{name}.ptx"
        if not shared.exists():
            _compile(kernel, config, signature, shared, ptx)
        import tvm_ffi

        entry = tvm_ffi.load_module(str(shared)).get_function(_FUNCTION)
        _programs[name] = Program(entry, ptx.read_bytes())
    return _programs[name]


def _compile(kernel: str, config: Any, signature: Any, shared: Path, ptx: Path) -> None:
    import importlib

    # read when the compiler is imported
    os.environ["CUTE_DSL_KEEP_PTX"] = "1"
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(prefix="ptx", dir=folder())
    compiled = importlib.import_module(cache.kernel_module(kernel)).compile(config, signature)
    ptx.write_text(compiled.__ptx__)
    made = shared.with_suffix(f".{os.getpid()}")
    artifacts.export(compiled, made)
    made.rename(shared)


@dataclass(frozen=True)
class EmulatedPlan:
    """A kernel plan whose launches may touch the buffers bound to it and nothing else."""

    plan: KernelPlan
    program: Program
    seed: int

    @property
    def workspace_bytes(self) -> int:
        return self.plan.workspace_bytes

    @property
    def key(self) -> str:
        return self.plan.key

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        emulator = library()
        emulator.emulator_program(self.program.ptx)
        emulator.emulator_seed(ctypes.c_uint64(self.seed))
        spans = [span_of(x) for x in bound.values() if isinstance(x, torch.Tensor)]
        if workspace is not None:
            spans.append((workspace.data_ptr(), self.workspace_bytes))
        flat = [n for span in spans for n in span]
        emulator.emulator_memory((ctypes.c_uint64 * len(flat))(*flat), len(spans))
        try:
            self.plan.execute(bound, workspace, stream)
        except RuntimeError as error:
            raise AssertionError(emulator.emulator_error().decode() or str(error)) from None
        found = emulator.emulator_error().decode()
        assert not found, found


def span_of(x: torch.Tensor) -> tuple[int, int]:
    """(first address, bytes) between a tensor's first element and its last."""
    if x.numel() == 0:
        return x.data_ptr(), 0
    reach = sum((extent - 1) * step for extent, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), (reach + 1) * x.element_size()


@contextmanager
def emulated(sm_count: int = 4, seed: int = 0) -> Iterator[None]:
    """Graphs made inside plan for a Hopper device of `sm_count` multiprocessors and run here.

    seed: of the order in which warps run and copies arrive.
    """
    target = Target("emulated Hopper", (9, 0), sm_count, 232448, 65536, installed_versions())
    programs: list[Program] = []

    def entry_of(kernel: str, config: Any, signature: Any) -> Callable[..., Any]:
        programs.append(program_of(kernel, config, signature))
        return programs[-1].entry

    def build_plan(entry: PlanEntry, facts: Any, target: Target, device: Any) -> CompiledPlan:
        # a plan of no device takes buffers wherever they are
        plan = build.build_plan(entry, facts, target, None)  # type: ignore[arg-type]
        return EmulatedPlan(plan, programs[-1], seed) if isinstance(plan, KernelPlan) else plan

    with (
        mock.patch("cudnn_frost.graph.target_here", lambda ordinal=0: target),
        mock.patch("cudnn_frost.graph.build_plan", build_plan),
        mock.patch("cudnn_frost.runtime.cache.entry_of", entry_of),
    ):
        yield

"""Timing on one GPU: cold L2, random data, medians, and the rates to read them against."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

L2_BYTES = 256 << 20


class Timer:
    """Median device time of callables, the L2 overwritten before every run.

    clean: the L2 is then read over too, so that a run does not pay for writing back what the
    flush left dirty.
    """

    def __init__(self, repeats: int = 20, warmup: int = 3, clean: bool = False) -> None:
        self.repeats, self.warmup = repeats, warmup
        self._flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
        self._clean = torch.zeros(L2_BYTES // 4, device="cuda") if clean else None

    def __call__(self, run: Callable[[], Any]) -> float:
        """Seconds."""
        return self.interleaved({"": run})[""]

    def interleaved(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of each, taking turns: what drifts in the machine drifts for all of them."""
        for run in runs.values():
            for _ in range(self.warmup):
                run()
        samples: dict[str, list[Any]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, run in runs.items():
                samples[name].append(self._sample(run))
        torch.cuda.synchronize()
        return {
            name: statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e-3
            for name, pairs in samples.items()
        }

    def _sample(self, run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        self._flush.random_(0, 255)
        if self._clean is not None:
            self._clean.amax()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        return begin, end


def plan_names(graph: Any) -> list[str]:
    """Every plan of a planned graph, best first."""
    return [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]


def plan_runner(graph: Any, pack: Any, index: int, handle: Any) -> Callable[[], Any]:
    """Builds one plan and gives what executes it; its workspace starts as 0xFF bytes, NaN."""
    graph.build_plan_at_index(index)
    need = graph.get_workspace_size_plan_at_index(index)
    space = torch.full((max(need, 1),), 0xFF, dtype=torch.uint8, device="cuda")
    return lambda: graph.execute_plan_at_index(pack, space, index, handle)


def host_seconds(run: Callable[[], Any], bursts: int = 10, calls: int = 50) -> float:
    """Median host time of one enqueue: bursts of back-to-back calls, the queue never full."""
    for _ in range(20):
        run()
    samples = []
    for _ in range(bursts):
        torch.cuda.synchronize()
        for _ in range(calls):
            begin = time.perf_counter()
            run()
            samples.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(samples)


def matmul_flops(timer: Timer, n: int = 8192) -> float:
    """FLOP/s of a bf16 n^3 matrix product in this run."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    return 2 * n**3 / timer(lambda: torch.matmul(a, b, out=out))


def copy_bytes(timer: Timer, nbytes: int = 2 << 30) -> float:
    """Bytes/s, read plus written, of a device copy in this run."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / timer(lambda: target.copy_(source))


def read_runners(nbytes: int) -> dict[str, Callable[[], Any]]:
    """Ways of reading `nbytes` of device memory once; the fastest is what a read costs.

    The data is random. Each is one or two kernels that keep next to nothing.
    """
    words = torch.empty(nbytes // 16 * 4, dtype=torch.int32, device="cuda").random_()
    rows = words.view(-1, next(n for n in (16384, 8192, 4096, 4) if words.numel() % n == 0))
    floats = rows.view(torch.float32)
    most = torch.empty(rows.shape[0], dtype=torch.int32, device="cuda")
    greatest = torch.empty(rows.shape[0], device="cuda")
    return {
        "read: int32 max": lambda: torch.amax(words, 0),
        "read: int32 max of rows": lambda: torch.amax(rows, 1, out=most),
        "read: float32 max of rows": lambda: torch.amax(floats, 1, out=greatest),
    }


def machine() -> dict[str, str]:
    """What a figure was measured on."""
    packages = ("torch", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "apache-tvm-ffi")
    versions = {}
    for package in (*packages, "flash-attn-4"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    import cudnn

    return {
        "device": torch.cuda.get_device_name(),
        "cudnn_backend": cudnn.backend_version_string(),
        "python": platform.python_version(),
        **versions,
    }


@dataclass
class Measurement:
    """One shape of one benchmark: every runner's time in the same run."""

    shape: str
    seconds: dict[str, float]
    flops: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def ratio(self, ours: str) -> float:
        """Fastest peer's time over ours: above 1 we are faster."""
        peers = [t for name, t in self.seconds.items() if name != ours]
        return min(peers) / self.seconds[ours] if peers else float("nan")


def write(path: Path, command: str, rates: dict[str, float], rows: list[Measurement]) -> None:
    """Keep a run as data: command, machine, same-run rates, every shape."""
    body = {
        "command": command,
        "machine": machine(),
        "rates": rates,
        "shapes": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")

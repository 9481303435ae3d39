"""Host time of one launch, by every way there is to make it, in one process.

    python -m bench.bench_launch [--out FILE]

For each graph: the compiled entry called bare, `Graph.execute`, `plan.launch`, a frame, the last
three also from C++, and the backend's plan through the same `execute`. Bursts of back-to-back
calls, the launch queue never full; medians of bursts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudnn
import torch
import tvm_ffi

from cudnn_frost.runtime.launcher import compile_library
from cudnn_frost.runtime.prepared import SLOTS

from . import bench_decode, bench_prefill
from .decode_cases import Case, operands
from .harness import Measurement, host_seconds, machine, plan_names, plan_runner, write

RAW = "bare entry"
BURSTS, CALLS = 20, 50
# (way, may take, times what): microseconds where `what` is empty
LIMITS = {
    "dense": [("execute", 9.0, ""), ("launch", 1.15, RAW), ("frame, C++", 1.05, RAW)],
    "paged": [("execute", 12.0, ""), ("launch", 1.15, RAW), ("frame, C++", 1.05, RAW)],
}


def graphs(handle: Any) -> dict[str, tuple[Any, dict[int, Any]]]:
    """Small problems, so that the queue drains: name -> (planned graph, variant pack)."""
    shape = bench_prefill.Shape(1, 128, 32, 8, 128, causal=True)
    dense = bench_prefill.declare(shape, bench_prefill.inputs(shape), handle)
    case = Case("8/2", "bf16", 1, 16)
    paged = bench_decode.declare(case, operands(case), bench_decode.Form(case.causal), handle)
    return {"dense": dense, "paged": paged}


def loop() -> Callable[[Any, Any, int], float]:
    """`Loop` of native/loop.cc."""
    source = Path(__file__).parent / "native" / "loop.cc"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "loop.so"
        compile_library(source, library)
        return tvm_ffi.load_module(str(library)).get_function("loop")


def in_cpp(call: Callable[..., float], function: Any, arguments: list[Any]) -> float:
    """Median seconds of one call from C++."""
    samples = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        samples.append(call(function, arguments, CALLS))
    torch.cuda.synchronize()
    return statistics.median(samples)


def measure(name: str, graph: Any, pack: dict[int, Any], handle: Any, call: Any) -> Measurement:
    names = plan_names(graph)
    ours = next(i for i, n in enumerate(names) if n.startswith("frost_") and "[" in n)
    execute = plan_runner(graph, pack, ours, handle)
    plan, prepared = graph._compiled[ours], graph.prepare(ours)
    space = torch.empty(max(prepared.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    by_uid = {uid: tensor.data_ptr() for uid, tensor in pack.items()}
    pointers = [by_uid[slot.uid] for slot in prepared.slots]
    addresses = [by_uid[slot.uid] if slot else 0 for slot in plan.pointers]
    if plan.workspace_index is not None:
        addresses[plan.workspace_index] = space.data_ptr()
    of_slot = {slot.name: by_uid[slot.uid] for slot in prepared.slots}
    frame = [prepared.version, prepared.features, *(of_slot.get(slot) for slot in SLOTS)]
    frame += [space.data_ptr(), space.numel(), 0]
    entry, constants = plan.entry, plan.constants
    seconds = {
        RAW: host_seconds(lambda: entry(tuple(addresses), *constants, 0)),
        "execute": host_seconds(execute),
        "launch": host_seconds(lambda: prepared.launch(pointers, space.data_ptr(), 0)),
        "frame": host_seconds(lambda: prepared.frame(*frame)),
        "bare entry, C++": in_cpp(call, entry, [addresses, *constants, 0]),
        "frame, C++": in_cpp(call, prepared.frame, frame),
    }
    backend = [i for i, n in enumerate(names) if not n.startswith("frost_")]
    if backend:
        seconds["cudnn execute"] = host_seconds(plan_runner(graph, pack, backend[0], handle))
    return Measurement(name, seconds, notes={"plan": names[ours]})


def line(row: Measurement) -> str:
    figures = ", ".join(f"{way} {t * 1e6:.2f}" for way, t in row.seconds.items())
    return f"{row.shape}: {row.notes['plan']}\n  us: {figures}"


def missed(row: Measurement) -> list[str]:
    """The limits that this run does not keep."""
    found = []
    for way, limit, base in LIMITS[row.shape]:
        scale = row.seconds[base] if base else 1e-6
        got = row.seconds[way] / scale
        unit = f"times {base}" if base else "us"
        if got > limit:
            found.append(f"{row.shape}: {way} takes {got:.2f} {unit}, at most {limit}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(machine())
    handle, call = cudnn.create_handle(), loop()
    rows = [measure(name, *made, handle, call) for name, made in graphs(handle).items()]
    for row in rows:
        print(line(row))
    misses = [miss for row in rows for miss in missed(row)]
    print("\n".join(f"MISSED {miss}" for miss in misses) or "every limit kept")
    if chosen.out:
        write(chosen.out, "python -m bench.bench_launch", {}, rows)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())

"""Prove the prefill row on this GPU and write its qualification record.

    python -m tests.gpu.qualify_prefill [--draws N] [--tracker DIR]

Random graphs over the row's whole capability, each asserted to be served by the row, O and Stats
against the float64 oracle within twice a same-precision baseline's error, canaries intact.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

os.environ["CUDNN_FROST_UNQUALIFIED"] = "1"

import cudnn
import torch

import cudnn_frost
from cudnn_frost.cli import qualification
from cudnn_frost.engines import ROWS
from tests.reference.compare import compare, read_outputs
from tests.reference.draws import Scope, draw_case
from tests.reference.oracle import baseline, oracle

NAME = "frost_sdpa_fwd_prefill_sm90"
ROW = next(row for row in ROWS if row.name == NAME)

COMMON = Scope(
    ops=("sdpa",),
    io_dtypes=("BFLOAT16", "HALF"),
    head_dims=((128, 128), (128, 128), (72, 80), (96, 96), (112, 128)),
    layouts=("bhsd", "bshd", "sbhd", "hbsd", "padded", "qkv", "kv", "bcast_b", "bcast_h"),
    out_layouts=("bhsd", "bshd", "sbhd", "padded"),
    s_q=(1, 600),
    s_kv=(1, 700),
    batch=(1, 3),
    kv_heads=(1, 3),
    max_heads=12,
).only(
    "stats",
    "virtual_stats",
    "plain_scale",
    "zero_scale",
    "negative_scale",
    "low_scores",
    "v_mean",
    "inert_words",
    "flat_buffers",
    "is_inference",
    "uneven_heads",
    "nonpositive_left",
    "softmax_precision",
)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    norm = float(expected.norm())
    return float((actual - expected).norm()) / norm if norm else 0.0


def prove(seed: int, handle) -> dict[str, float]:
    """One draw; its errors. Raises when another plan served or an output is wrong."""
    case = draw_case(random.Random(seed), COMMON)

    def factory(**kwargs):
        return cudnn_frost.Graph(handle=handle, **kwargs)

    built = case.build(graph_factory=factory, device="cuda")
    graph = built.graph
    graph.create_execution_plan(ROW.engine_id, KNOBS)
    graph.build_plans()
    assert graph.selected_engine is ROW, f"served by {graph.selected_engine}"
    graph.execute(built.buffers, None, handle)
    torch.cuda.synchronize()
    expected, actual = oracle(graph, built.buffers), read_outputs(graph, built.buffers)
    dtype = torch.bfloat16 if case.dtype == "BFLOAT16" else torch.float16
    compare(actual, expected, baseline(graph, built.buffers), io_dtype=dtype)
    built.check_canaries()
    errors = {"o": relative(actual["O"], expected["O"].values)}
    if "Stats" in actual:
        want = expected["Stats"].values
        live = want.isfinite()
        errors["stats"] = float((actual["Stats"] - want)[live].abs().max()) if live.any() else 0.0
    return errors


def prove_all(seeds: list[int]) -> list[tuple[int, dict[str, float] | str]]:
    """In a process of its own: (seed, errors or what went wrong)."""
    handle = cudnn.create_handle()
    answers: list[tuple[int, dict[str, float] | str]] = []
    for seed in seeds:
        try:
            answers.append((seed, prove(seed, handle)))
        except Exception:
            answers.append((seed, traceback.format_exc(limit=-2)))
    return answers


KNOBS = {cudnn.knob_type.STAGES: 2, cudnn.knob_type.TILE_M: 128, cudnn.knob_type.TILE_N: 128}


def versions() -> dict[str, str]:
    found = {p: metadata.version(p) for p in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")}
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().split() if driver.exists() else []
    found["driver"] = next((w for w in text if w.count(".") == 2 and w[0].isdigit()), "unknown")
    found["cudnn"] = cudnn.backend_version_string()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--tracker", type=Path, default=Path("tracker"))
    options = parser.parse_args()
    worst = {"o": 0.0, "stats": 0.0}
    failures = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        shares = [
            list(range(first, options.draws, options.processes))
            for first in range(options.processes)
        ]
        for seed, answer in (item for share in pool.map(prove_all, shares) for item in share):
            if isinstance(answer, str):
                failures.append(f"seed {seed}:\n{answer}")
                continue
            for name, value in answer.items():
                worst[name] = max(worst[name], value)
    print("\n".join(failures[:5]))
    failed = len(failures)
    path = qualification.write_record(
        options.tracker,
        ROW,
        device=torch.cuda.get_device_name(),
        cc=torch.cuda.get_device_capability(),
        versions=versions(),
        cases=(options.draws, failed),
        worst_error=qualification.WorstError(**worst),
        command=f"python -m tests.gpu.qualify_prefill --draws {options.draws}",
    )
    print(f"{NAME}: {options.draws - failed}/{options.draws} draws right, worst {worst}; {path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

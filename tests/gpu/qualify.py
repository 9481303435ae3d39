"""Prove a row on this GPU and write its qualification record.

    python -m tests.gpu.qualify ROW [--draws N] [--processes N] [--tracker DIR] [--seeds S ...]

Random graphs over the row's whole capability. Every plan that the row puts into a graph's list
runs, into poisoned outputs and out of a poisoned workspace: O, Stats and the maxima against the
float64 oracle within twice a same-precision baseline's error, canaries intact. A draw that the row
declines counts as declined; many of those are a failure of the run. With --seeds only these draws
run, with whole tracebacks, and no record is written.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["CUDNN_FROST_UNQUALIFIED"] = "1"

import cudnn
import torch

import cudnn_frost
from cudnn_frost.cli import qualification
from cudnn_frost.engines import ROWS, Row
from tests.gpu.serving import plan_names, plans_of, run_plan
from tests.reference.compare import compare, read_outputs
from tests.reference.declaration import DTYPES, FP8
from tests.reference.draws import FEATURES, Case, Scope, draw_case
from tests.reference.oracle import Output, baseline, oracle

ALIGNED = ("bhsd", "bshd", "sbhd", "hbsd", "padded", "qkv", "kv", "bcast_b", "bcast_h")
ALIGNED_OUT = ("bhsd", "bshd", "sbhd", "padded")
MOST_DECLINED = 0.1

PREFILL = Scope(
    ops=("sdpa",),
    io_dtypes=("BFLOAT16", "HALF"),
    head_dims=((128, 128), (128, 128), (72, 80), (96, 96), (112, 128)),
    layouts=ALIGNED,
    out_layouts=ALIGNED_OUT,
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

# what a decode row does not serve
_NOT_IN_DECODE = {
    "ragged_kv",
    "bias",
    "alibi",
    "dropout",
    "kv_mask",
    "prefolded",
    "score_outputs",
    "tensor_scale",
    "int_scale",
    "uneven_heads",
}
DECODE = Scope(
    ops=("sdpa",),
    io_dtypes=("BFLOAT16", "HALF"),
    head_dims=(
        (128, 128),
        (64, 64),
        (192, 128),
        (256, 256),
        (128, 128),
        (72, 80),
        (96, 96),
        (112, 128),
        (136, 120),
        (160, 160),
        (248, 200),
    ),
    layouts=ALIGNED,
    out_layouts=ALIGNED_OUT,
    s_q=(1, 80),
    s_kv=(1, 400),
    batch=(1, 6),
    kv_heads=(1, 3),
    max_heads=32,
    page_sizes=(16, 64, 8, 32, 128, 256),
    features=frozenset(FEATURES) - _NOT_IN_DECODE,
)
DECODE_FP8 = replace(
    DECODE,
    ops=("sdpa_fp8",),
    head_dims=(
        (128, 128),
        (64, 64),
        (192, 128),
        (256, 256),
        (128, 128),
        (96, 96),
        (80, 112),
        (144, 112),
        (160, 160),
        (240, 208),
    ),
)


def _decode_scopes(scope: Scope) -> tuple[Scope, ...]:
    """One query and few, long rows and short, in pages and dense, packed."""
    one = replace(scope, s_q=(1, 1), s_kv=(1, 3000), kv_heads=(1, 4))
    speculative = replace(
        scope,
        s_q=(2, 8),
        s_kv=(1, 3000),
        batch=(1, 4),
        masks=("causal_br", "causal_br", "window_br", "band_br", "none"),
    )
    return (
        one.with_always("paging"),
        scope,
        speculative.with_always("paging"),
        scope.with_always("paging"),
        replace(one, s_kv=(1, 700)),
        scope.with_always("ragged_q"),
    )


# row -> scopes that its draws take in turn
SCOPES: dict[str, tuple[Scope, ...]] = {
    "frost_sdpa_fwd_prefill_sm90": (PREFILL,),
    "frost_sdpa_fwd_decode_sm90": _decode_scopes(DECODE),
    "frost_sdpa_fwd_decode_sm90_fp8": _decode_scopes(DECODE_FP8),
}


@dataclass(frozen=True)
class Answer:
    """What came of one draw: the worst errors over the row's plans, or why the row declined it, or
    what went wrong."""

    seed: int
    errors: dict[str, float] = field(default_factory=dict)
    declines: tuple[str, ...] = ()
    failure: str = ""


def case_of(row: str, seed: int) -> Case:
    scopes = SCOPES[row]
    return draw_case(random.Random(seed), scopes[seed % len(scopes)])


def row_named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def declines(graph: Any, row: Row) -> tuple[str, ...]:
    """Why the row does not serve a graph; empty when it does."""
    verdict = next(v for v in graph.explain().verdicts if v.row is row)
    return tuple(decline.render() for decline in verdict.declines)


def prove(
    case: Case, row: Row, handle: Any, device: str = "cuda"
) -> tuple[dict[str, float], tuple[str, ...]]:
    """(worst errors, reasons of a decline) of one case through every plan of the row.

    Raises when another engine serves such a plan, or an output or a canary is wrong.
    """
    options = {} if handle is None else {"handle": handle}
    built = case.build(
        graph_factory=lambda **words: cudnn_frost.Graph(**options, **words), device=device
    )
    graph = built.graph
    reasons = declines(graph, row)
    if reasons:
        return {}, reasons
    graph.create_execution_plans([cudnn.heur_mode.A])
    plans = plans_of(graph, row.name)
    assert plans, f"{row.name} has no plan in {plan_names(graph)}"
    expected, base = oracle(graph, built.buffers), baseline(graph, built.buffers)
    worst: dict[str, float] = {}
    for index in plans:
        built.poison()
        try:
            run_plan(graph, index, row.name, built.buffers, handle)
            actual = read_outputs(graph, built.buffers)
            compare(actual, expected, base, io_dtype=DTYPES[case.dtype])
            built.check_canaries()
        except Exception as error:
            error.add_note(f"in {graph.get_plan_name_at_index(index)}")
            raise
        for name, value in errors_of(case, actual, expected):
            worst[name] = max(worst.get(name, 0.0), value)
    return worst, ()


def errors_of(
    case: Case, actual: dict[str, torch.Tensor], expected: dict[str, Output]
) -> Iterator[tuple[str, float]]:
    """o: relative L2, of an 8-bit O against the oracle's rounded as O is: the distance of small
    values to their format says nothing about a kernel. stats: absolute, natural-log units.
    amax_*: relative."""
    for port, got in actual.items():
        output = expected[port]
        want = (output.stored() if output.dtype in FP8 else output.values).double()
        judged = output.defined & want.isfinite()
        error, want = torch.where(judged, got - want, 0), torch.where(judged, want, 0)
        if port == "Stats":
            unit = math.log(2.0) if "log2" in case.on else 1.0
            yield "stats", float(error.abs().max()) * unit if error.numel() else 0.0
        else:
            norm = float(want.norm())
            yield port.lower(), float(error.norm()) / norm if norm else 0.0


def prove_all(name: str, seeds: list[int], limit: int | None) -> list[Answer]:
    """In a process of its own; limit: lines of a traceback, as `traceback.format_exc`."""
    # the backend warns of each graph that it declines
    logging.getLogger("cudnn.pygraph").setLevel(logging.ERROR)
    row, handle = row_named(name), cudnn.create_handle()
    answers = []
    for seed in seeds:
        try:
            errors, reasons = prove(case_of(name, seed), row, handle)
            answers.append(Answer(seed, errors, reasons))
        except Exception:
            answers.append(Answer(seed, failure=traceback.format_exc(limit=limit)))
    return answers


def run(name: str, seeds: list[int], processes: int, limit: int | None) -> list[Answer]:
    """Every draw, spread over processes."""
    shares = [share for i in range(processes) if (share := seeds[i::processes])]
    threads = max(1, (os.cpu_count() or 1) // processes)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        futures = [pool.submit(prove_all, name, share, limit) for share in shares]
        answers = [answer for future in futures for answer in future.result()]
    return sorted(answers, key=lambda answer: answer.seed)


def report(answers: list[Answer], most: int) -> dict[str, float]:
    """Print failures, up to `most`, and declines; the worst error by kind."""
    failed = [a for a in answers if a.failure]
    for answer in failed[:most]:
        print(f"seed {answer.seed}:\n{answer.failure}")
    if failed:
        print(f"failed seeds: {' '.join(str(a.seed) for a in failed)}")
    reasons = Counter(reason for a in answers for reason in a.declines)
    for reason, count in reasons.most_common():
        print(f"declined {count} times: {reason}")
    worst: dict[str, float] = {}
    for answer in answers:
        for kind, value in answer.errors.items():
            worst[kind] = max(worst.get(kind, 0.0), value)
    return worst


def versions() -> dict[str, str]:
    found = {p: metadata.version(p) for p in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")}
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().split() if driver.exists() else []
    found["driver"] = next((w for w in text if w.count(".") == 2 and w[0].isdigit()), "unknown")
    found["cudnn"] = cudnn.backend_version_string()
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("row", choices=list(SCOPES))
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tracker", type=Path, default=Path("tracker"))
    parser.add_argument("--seeds", type=int, nargs="+", help="these draws alone; no record")
    return parser.parse_args()


def main() -> int:
    options = parse()
    seeds = options.seeds or list(range(options.draws))
    limit = None if options.seeds else -3
    answers = run(options.row, seeds, min(options.processes, len(seeds)), limit)
    worst = report(answers, most=len(seeds) if options.seeds else 5)
    failed = sum(bool(a.failure) for a in answers)
    declined = sum(bool(a.declines) for a in answers)
    ran = len(answers) - declined
    shown = ", ".join(f"{kind} {value:.2e}" for kind, value in sorted(worst.items()))
    print(f"{options.row}: {ran - failed}/{ran} draws right, {declined} declined; worst {shown}")
    if declined > MOST_DECLINED * len(answers):
        print("too many draws were declined: this proves nothing")
        return 1
    if not options.seeds:
        path = qualification.write_record(
            options.tracker,
            row_named(options.row),
            device=torch.cuda.get_device_name(),
            cc=torch.cuda.get_device_capability(),
            versions=versions(),
            cases=(ran, failed),
            worst_error=qualification.WorstError(o=worst.get("o", 0.0), stats=worst.get("stats")),
            command=f"python -m tests.gpu.qualify {options.row} --draws {options.draws}",
        )
        print(path)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

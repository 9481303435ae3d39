"""Paged decode: every plan of the graph on the same inputs, beside a cold read of the same bytes.

    python -m bench.bench_decode [--shapes 96/8 ...] [--dtypes bf16 ...] [--sq 1 8 64]
        [--pages 16 64] [--nhd] [--clean-l2] [--repeats N] [--out FILE]

Correctness is checked before anything is timed. Prints, per problem: microseconds of our first
plan, of its alternatives and of the backend's first plan, the share of the cold read, the host time
of one execute, and at the end what the rows must show. Exit status 1 when a plan is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cudnn
import torch

import cudnn_frost

from .decode_cases import KINDS, LONG_QUERY, SHAPES, Case, Operands, cases, operands, reference
from .decode_criteria import Figures, judge
from .harness import (
    Measurement,
    Timer,
    copy_bytes,
    host_seconds,
    machine,
    plan_names,
    plan_runner,
    read_runners,
    write,
)

OURS, BACKEND = "frost", "cudnn"
# a plan slower than this is timed once, not in turns with the others
SLOW_SECONDS = 2e-3
# what a plan that cannot serve raises while it is built
REFUSALS = (NotImplementedError, ImportError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Form:
    """How a case is declared: with its mask or without, with Stats or without."""

    causal: bool
    stats: bool = False

    def __str__(self) -> str:
        return ("bottom right" if self.causal else "no mask") + (", Stats" if self.stats else "")


def declare(case: Case, x: Operands, form: Form, handle: Any) -> tuple[Any, dict[int, Any]]:
    """The planned graph and its variant pack."""
    data_type = cudnn.data_type
    names = {
        torch.bfloat16: data_type.BFLOAT16,
        torch.float8_e4m3fn: data_type.FP8_E4M3,
        torch.int32: data_type.INT32,
        torch.float32: data_type.FLOAT,
    }
    g = cudnn_frost.Graph(
        io_data_type=names[case.types.io],
        intermediate_data_type=data_type.FLOAT,
        compute_data_type=data_type.FLOAT,
        handle=handle,
    )
    pack: dict[int, Any] = {}

    def tensor(name: str, value: torch.Tensor) -> Any:
        uid = len(pack) + 1
        pack[uid] = value
        dim, stride = list(value.shape), list(value.stride())
        return g.tensor(dim=dim, stride=stride, data_type=names[value.dtype], name=name, uid=uid)

    words: dict[str, Any] = {
        "attn_scale": 1 / math.sqrt(case.dims.d),
        "generate_stats": form.stats,
        "use_padding_mask": True,
        "seq_len_q": tensor("seq_len_q", x.rows),
        "seq_len_kv": tensor("seq_len_kv", x.lengths),
        "paged_attention_k_table": tensor("k_table", x.table),
        "paged_attention_v_table": tensor("v_table", x.table),
        "paged_attention_max_seq_len_kv": case.dims.keys[1],
        **{name: tensor(name, value) for name, value in x.scales.items()},
    }
    if form.causal:
        words["use_causal_mask_bottom_right"] = True
    op = g.sdpa_fp8 if case.types.fp8 else g.sdpa
    o, stats, *_ = op(*(tensor(n, getattr(x, n)) for n in "qkv"), **words)
    outputs = [(o, x.o)]
    if form.stats:
        outputs.append((stats, torch.empty(*x.q.shape[:3], 1, device="cuda")))
    for out, value in outputs:
        uid = len(pack) + 1
        pack[uid] = value
        out.set_output(True).set_uid(uid).set_data_type(names[value.dtype])
        out.set_dim(list(value.shape)).set_stride(list(value.stride()))
    g.validate()
    g.create_execution_plans([cudnn.heur_mode.A])
    return g, pack


@dataclass
class Found:
    """The plans of one case that are right: runner -> callable, plan name and relative error;
    and why others are not here."""

    runs: dict[str, Callable[[], Any]] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def alternatives(self) -> list[str]:
        """Our runners behind the first."""
        return [name for name in self.runs if name not in (OURS, BACKEND)]


class Bench:
    """One case on its operands."""

    def __init__(self, case: Case, handle: Any) -> None:
        self.case, self.handle = case, handle
        self.x = operands(case)
        self.found = Found()
        self._references: dict[bool, torch.Tensor] = {}

    def error(self, run: Callable[[], Any], causal: bool) -> float:
        """Relative error of O after one run into poisoned memory."""
        o = self.x.o
        o.view(torch.uint8).fill_(0xFF)
        run()
        torch.cuda.synchronize()
        if causal not in self._references:
            self._references[causal] = reference(self.case, self.x, causal)
        expected = self._references[causal]
        got = o.float() / self.case.types.scale_o
        return float((got - expected).norm() / expected.norm())

    def admit(self, runner: str, plan: str, run: Callable[[], Any], causal: bool) -> None:
        """Keep a plan that is right."""
        error = self.error(run, causal)
        if not error < self.case.types.tolerance:
            self.found.wrong.append(f"{plan}: relative error {error:.3g}")
            return
        self.found.runs[runner] = run
        self.found.plans[runner], self.found.errors[runner] = plan, error

    def collect(self) -> Found:
        form = Form(self.case.causal)
        g, pack = declare(self.case, self.x, form, self.handle)
        for index, plan in enumerate(plan_names(g)):
            ours = plan.startswith("frost_")
            if not ours or plan == "frost_sdpa_fwd_reference":
                continue
            try:
                run = plan_runner(g, pack, index, self.handle)
            except REFUSALS as refusal:
                self.found.refused[plan] = str(refusal)
                continue
            self.admit(plan if OURS in self.found.runs else OURS, plan, run, form.causal)
        self._backend()
        return self.found

    def _backend(self) -> None:
        """The backend's first plan; where it declines the graph, of the nearest one it takes."""
        causal = self.case.causal
        forms = [Form(causal), Form(causal, True), Form(False), Form(False, True)]
        for form in dict.fromkeys(forms):
            g, pack = declare(self.case, self.x, form, self.handle)
            names = plan_names(g)
            index = next((i for i, n in enumerate(names) if not n.startswith("frost_")), None)
            if index is None:
                self.found.refused[f"{BACKEND} ({form})"] = g.explain().backend
                continue
            try:
                run = plan_runner(g, pack, index, self.handle)
                self.admit(BACKEND, names[index], run, form.causal)
            except REFUSALS as refusal:
                self.found.refused[f"{BACKEND} ({form})"] = str(refusal)
                continue
            if form != forms[0]:
                self.found.plans[BACKEND] = f"{names[index]} ({form})"
            return

    def measure(self, timer: Timer) -> Measurement:
        found, notes = self.collect(), {}
        slow = {}
        if BACKEND in found.runs:
            once = Timer(repeats=1, warmup=1)(found.runs[BACKEND])
            if once > SLOW_SECONDS:
                slow[BACKEND] = once
                del found.runs[BACKEND]
        reads = read_runners(self.x.live_bytes)
        seconds = timer.interleaved({**found.runs, **reads})
        read = min(seconds.pop(name) for name in reads)
        notes = {
            "plans": found.plans,
            "errors": found.errors,
            "live_kv_bytes": self.x.live_bytes,
            "read_seconds": read,
            "host_seconds": {
                n: host_seconds(found.runs[n]) for n in (OURS, BACKEND) if n in found.runs
            },
            "alternatives": {name: seconds.pop(name) for name in found.alternatives},
            "slow_seconds": slow,
            "refused": found.refused,
            "wrong": found.wrong,
        }
        return Measurement(str(self.case), seconds, self._flops(), notes)

    def _flops(self) -> float:
        """Multiply-adds of visible scores, twice each, QK^T and PV."""
        dims, rows = self.case.dims, self.case.sq
        pairs = rows * sum(self.x.host_lengths)
        if self.case.causal:
            pairs -= dims.b * rows * (rows - 1) // 2
        return 4 * dims.h_q * pairs * dims.d


def _microseconds(values: Iterator[float] | list[float]) -> str:
    return "/".join(f"{t * 1e6:.1f}" for t in values) or "-"


def line(row: Measurement) -> str:
    """One problem's row of the table."""
    notes, ours = row.notes, row.seconds.get(OURS)
    other = {**row.seconds, **notes["slow_seconds"]}.get(BACKEND)
    cells = [
        f"{row.shape:44}",
        f"ours {_microseconds([ours] if ours else []):>7}",
        f"others {_microseconds(list(notes['alternatives'].values())):>13}",
        f"cudnn {_microseconds([other] if other else []):>7}",
        f"read {notes['read_seconds'] * 1e6:6.1f}",
    ]
    if ours:
        cells.append(f"share {notes['read_seconds'] / ours:.2f}")
        cells.append(f"{notes['live_kv_bytes'] / ours / 1e12:.2f} TB/s")
    if ours and other:
        cells.append(f"x {other / ours:.2f}")
    cells.append(f"host {_microseconds(list(notes['host_seconds'].values()))}")
    cells.append("err " + "/".join(f"{e:.1e}" for e in notes["errors"].values()))
    return "  ".join(cells)


def figures(row: Measurement) -> Figures:
    host = row.notes["host_seconds"]
    read = row.notes["read_seconds"]
    return Figures(row.seconds[OURS], read, host.get(OURS), host.get(BACKEND))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--sq", nargs="+", type=int, default=[1, 8, LONG_QUERY])
    parser.add_argument("--pages", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--nhd", action="store_true", help="token-major pages")
    parser.add_argument("--clean-l2", action="store_true", help="no dirty lines in the cold L2")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the run as JSON")
    return parser.parse_args()


def main() -> int:
    options = parse()
    # a kernel is measured before it is qualified
    os.environ["CUDNN_FROST_UNQUALIFIED"] = "1"
    handle = cudnn.create_handle()
    timer = Timer(options.repeats, clean=options.clean_l2)
    rates = {"copy_bytes": copy_bytes(timer)}
    rows: list[Measurement] = []
    run: dict[Case, Figures] = {}
    shown: set[str] = set()
    wanted = (options.shapes, options.dtypes, options.sq, options.pages, options.nhd)
    for case in cases(*wanted):
        row = Bench(case, handle).measure(timer)
        rows.append(row)
        print(line(row), flush=True)
        for text in row.notes["wrong"]:
            print(f"    WRONG {text}", flush=True)
        for plan, why in row.notes["refused"].items():
            if f"{plan}{why}" not in shown:
                print(f"    {plan}: {why[:200]}", flush=True)
            shown.add(f"{plan}{why}")
        if OURS in row.seconds:
            run[case] = figures(row)
        if options.out and row.seconds:
            kept = [r for r in rows if r.seconds]
            write(
                options.out, " ".join(["python -m bench.bench_decode", *sys.argv[1:]]), rates, kept
            )
    plans = dict.fromkeys(r.notes["plans"][OURS] for r in rows if OURS in r.notes["plans"])
    print("\n".join(plans))
    print("\n".join(str(c) for c in judge(run)))
    print(f"copy {rates['copy_bytes'] / 1e12:.2f} TB/s on {machine()}")
    return int(any(r.notes["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Prefill: every plan of the graph and every installed peer on the same inputs, in one process.

    python -m bench.bench_prefill [--quick] [--out FILE]

Correctness is checked before anything is timed. Prints TFLOP/s, the ratio to the fastest peer, the
share of a matrix product measured in the same run, and the host time of one execute.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cudnn
import torch

import cudnn_frost

from .harness import (
    Measurement,
    Timer,
    host_seconds,
    machine,
    matmul_flops,
    plan_names,
    plan_runner,
    write,
)

OURS = "frost"


@dataclass(frozen=True)
class Shape:
    """A dense BSHD self-attention problem in bf16."""

    b: int
    s: int
    h_q: int
    h_kv: int
    d: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"d{self.d} {self.h_q}/{self.h_kv} {mask} B={self.b} S={self.s}"

    @property
    def flops(self) -> float:
        """Multiply-adds of visible scores, twice each, QK^T and PV."""
        pairs = self.s * self.s / (2 if self.causal else 1)
        return 4 * self.b * self.h_q * pairs * self.d


SHAPES = [
    Shape(16384 // s, s, 32, 8, 128, causal)
    for causal in (True, False)
    for s in (1024, 4096, 16384)
]


def inputs(shape: Shape) -> dict[str, torch.Tensor]:
    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(shape.b, shape.s, heads, shape.d, device="cuda")
        return x.to(torch.bfloat16).transpose(1, 2)

    q = draw(shape.h_q)
    stats = torch.full((shape.b, shape.h_q, shape.s, 1), float("nan"), device="cuda")
    return {
        "q": q,
        "k": draw(shape.h_kv),
        "v": draw(shape.h_kv),
        "o": torch.full_like(q, float("nan")),
        "stats": stats,
    }


def declare(shape: Shape, x: dict[str, torch.Tensor], handle: Any) -> tuple[Any, dict[int, Any]]:
    g = cudnn_frost.Graph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    q, k, v = (
        g.tensor(dim=list(x[n].shape), stride=list(x[n].stride()), name=n, uid=i)
        for i, n in enumerate("qkv", 1)
    )
    o, stats = g.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=1 / math.sqrt(shape.d),
        use_causal_mask=shape.causal,
        generate_stats=True,
        name="sdpa",
    )
    o.set_output(True).set_uid(4).set_dim(list(x["o"].shape)).set_stride(list(x["o"].stride()))
    stats.set_output(True).set_uid(5).set_data_type(cudnn.data_type.FLOAT)
    g.validate()
    g.create_execution_plans([cudnn.heur_mode.A])
    return g, {1: x["q"], 2: x["k"], 3: x["v"], 4: x["o"], 5: x["stats"]}


def runners(
    shape: Shape, x: dict[str, torch.Tensor], handle: Any
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Callables that write x["o"] or return O, and the plan names behind the first two."""
    g, pack = declare(shape, x, handle)
    names = plan_names(g)
    frost = next(i for i, n in enumerate(names) if n.startswith("frost_sdpa_fwd_prefill"))
    backend = next(i for i, n in enumerate(names) if not n.startswith("frost_"))
    found: dict[str, Callable[[], Any]] = {
        key: plan_runner(g, pack, index, handle)
        for key, index in ((OURS, frost), ("cudnn", backend))
    }
    found |= _peers(shape, x)
    return found, {OURS: names[frost], "cudnn": names[backend]}


def _peers(shape: Shape, x: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    q, k, v = x["q"], x["k"], x["v"]

    def torch_sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=True
        )

    peers: dict[str, Callable[[], Any]] = {"torch": torch_sdpa}
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return peers
    tokens = [t.transpose(1, 2) for t in (q, k, v)]
    peers["fa4"] = lambda: flash_attn_func(*tokens, causal=shape.causal)[0].transpose(1, 2)
    return peers


def error(actual: torch.Tensor, shape: Shape, x: dict[str, torch.Tensor]) -> float:
    """Relative error of O's first batch and head against float32 attention."""
    q, k, v = (x[n][:1, :1].float() for n in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(shape.d)
    if shape.causal:
        hidden = torch.ones(shape.s, shape.s, dtype=torch.bool, device="cuda").triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    expected = scores.softmax(-1) @ v
    return float((actual[:1, :1].float() - expected).norm() / expected.norm())


def measure(shape: Shape, timer: Timer, handle: Any) -> Measurement:
    x = inputs(shape)
    found, plans = runners(shape, x, handle)
    errors = {}
    for name, run in found.items():
        x["o"].fill_(float("nan"))
        result = run()
        torch.cuda.synchronize()
        errors[name] = error(x["o"] if result is None else result, shape, x)
        if not errors[name] < 1e-2:
            raise SystemExit(f"{shape}: {name} is wrong, relative error {errors[name]}")
    seconds = {name: timer(run) for name, run in found.items()}
    host = {name: host_seconds(found[name]) for name in (OURS, "cudnn")}
    notes = {"plans": plans, "errors": errors, "host_seconds": host}
    return Measurement(str(shape), seconds, shape.flops, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="B=4 S=4096 only")
    parser.add_argument("--out", type=Path, help="write the run as JSON")
    options = parser.parse_args()
    # a kernel is measured before it is qualified
    os.environ["CUDNN_FROST_UNQUALIFIED"] = "1"
    handle = cudnn.create_handle()
    timer = Timer()
    matmul = matmul_flops(timer)
    rows = []
    for shape in [s for s in SHAPES if s.s == 4096] if options.quick else SHAPES:
        row = measure(shape, timer, handle)
        rows.append(row)
        rates = "  ".join(f"{n} {row.flops / t / 1e12:6.1f}" for n, t in row.seconds.items())
        host = "/".join(f"{t * 1e6:.1f}" for t in row.notes["host_seconds"].values())
        share = row.flops / row.seconds[OURS] / matmul
        print(
            f"{row.shape:28} {rates} TFLOP/s  vs best {row.ratio(OURS):.3f}  "
            f"vs cudnn {row.seconds['cudnn'] / row.seconds[OURS]:.3f}  "
            f"of matmul {share:.2f}  host {host} us"
        )
    print(f"matmul 8192^3 {matmul / 1e12:.1f} TFLOP/s on {machine()}")
    if options.out:
        write(options.out, " ".join(sys.argv), {"matmul_flops": matmul}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

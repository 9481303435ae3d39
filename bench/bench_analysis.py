"""Host time of judging one graph: declaration -> facts -> verdicts -> ranked list, no backend.

    python -m bench.bench_analysis [--repeats N] [--target sm90]

Prints medians in milliseconds, per stage and whole, of several graphs. The whole stays below
the limit, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from cudnn_frost.analyzer.extract import analyze
from cudnn_frost.analyzer.record import GraphRecord, NodeRecord, TensorRecord
from cudnn_frost.engines import verdicts
from cudnn_frost.engines.registry import UNQUALIFIED_VARIABLE
from cudnn_frost.heuristics.assemble import PlanEntry, _assemble
from cudnn_frost.heuristics.propose import judge_and_propose
from cudnn_frost.vocab import KNOWN_TARGETS, DType, Target

LIMIT_MS = 2.0
ENVIRONMENT: Mapping[str, str] = {UNQUALIFIED_VARIABLE: "1"}
MODES = ("A", "FALLBACK")


def tensor(uid: int, dim: tuple[int, ...], dtype: DType, virtual: bool = False) -> TensorRecord:
    """A (B, H, S, D) tensor that lies in memory as (B, S, H, D); anything else is compact."""
    _, h, s, d = dim
    stride = (h * s * d, d, h * d, 1) if s > 1 else (h * s * d, s * d, d, 1)
    return TensorRecord(
        uid=uid, name=f"t{uid}", dtype=dtype, dim=dim, stride=stride, virtual=virtual
    )


def prefill() -> GraphRecord:
    """Dense causal bf16 with Stats."""
    q, kv, dtype = (4, 32, 4096, 128), (4, 8, 4096, 128), DType.BFLOAT16
    inputs = {"q": tensor(1, q, dtype), "k": tensor(2, kv, dtype), "v": tensor(3, kv, dtype)}
    stats = tensor(5, (*q[:3], 1), DType.FLOAT)
    params = {"attn_scale": 0.088, "use_causal_mask": True, "generate_stats": True}
    return _record("sdpa", inputs, {"O": tensor(4, q, dtype), "Stats": stats}, params)


def paged_fp8_decode() -> GraphRecord:
    """Paged E4M3 decode with lengths, scales and virtual amax outputs."""
    q, pool, dtype = (64, 32, 1, 128), (8192, 8, 64, 128), DType.FP8_E4M3
    one, index = (1, 1, 1, 1), DType.INT32
    inputs = {"q": tensor(1, q, dtype), "k": tensor(2, pool, dtype), "v": tensor(3, pool, dtype)}
    scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    inputs |= {name: tensor(10 + i, one, DType.FLOAT) for i, name in enumerate(scales)}
    inputs |= {
        f"seq_len_{side}": tensor(20 + i, (64, 1, 1, 1), index)
        for i, side in enumerate(("q", "kv"))
    }
    inputs |= {
        f"paged_attention_{side}_table": tensor(30 + i, (64, 1, 128, 1), index)
        for i, side in enumerate("kv")
    }
    outputs = {
        "O": tensor(4, q, DType.BFLOAT16),
        "Amax_S": tensor(6, one, DType.FLOAT, virtual=True),
        "Amax_O": tensor(7, one, DType.FLOAT, virtual=True),
    }
    params = {
        "attn_scale": 0.088,
        "use_padding_mask": True,
        "use_causal_mask_bottom_right": True,
        "paged_attention_max_seq_len_kv": 8192,
        "generate_stats": False,
    }
    return _record("sdpa_fp8", inputs, outputs, params)


def misspelt() -> GraphRecord:
    """The prefill graph with arguments nobody knows: the dearest text to write."""
    node = prefill().nodes[0]
    params = {**node.params, "use_casual_mask": True, "sliding_windw_length": 64}
    return _record(node.op, node.inputs, node.outputs, params)


def _record(op: str, inputs: Any, outputs: Any, params: Any) -> GraphRecord:
    node = NodeRecord(op=op, name="attention", inputs=inputs, outputs=outputs, params=params)
    return GraphRecord(nodes=(node,))


GRAPHS = {"prefill": prefill, "paged fp8 decode": paged_fp8_decode, "misspelt": misspelt}


def ranked(record: GraphRecord, target: Target) -> list[PlanEntry]:
    """What planning does without the backend."""
    _, proposals = judge_and_propose(analyze(record), target, ENVIRONMENT)
    return _assemble(MODES, lambda mode: proposals, [])


def stages(record: GraphRecord, target: Target) -> dict[str, Callable[[], Any]]:
    """The whole, then its parts, each callable alone."""
    analysis = analyze(record)
    _, proposals = judge_and_propose(analysis, target, ENVIRONMENT)
    return {
        "whole": lambda: ranked(record, target),
        "facts": lambda: analyze(record),
        "verdicts": lambda: verdicts(analysis, target, ENVIRONMENT),
        "verdicts and plans": lambda: judge_and_propose(analysis, target, ENVIRONMENT),
        "ranked list": lambda: _assemble(MODES, lambda mode: proposals, []),
    }


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Median wall time of a call, after a warm-up."""
    for _ in range(max(repeats // 10, 1)):
        run()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--target", choices=sorted(KNOWN_TARGETS), default="sm90")
    options = parser.parse_args()
    target = KNOWN_TARGETS[options.target]
    worst = 0.0
    for name, build in GRAPHS.items():
        record = build()
        print(f"{name}: {', '.join(plan.name for plan in ranked(record, target)) or 'no plan'}")
        for stage, run in stages(record, target).items():
            taken = median_ms(run, options.repeats)
            worst = max(worst, taken if stage == "whole" else 0.0)
            print(f"    {stage:<20} {taken:8.3f} ms")
    print(f"slowest graph {worst:.3f} ms, limit {LIMIT_MS:g} ms")
    return int(worst > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())

"""What each rank of tests/unit/test_context_parallel.py runs, in a process of its own."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cudnn_frost.context_parallel import (
    ForwardProvider,
    Sharding,
    all_to_all_attention,
    ring_attention,
)


@dataclass(frozen=True)
class Case:
    """way: all_to_all, ring or gather. scale: what is asked for, where not the usual one."""

    way: str
    lengths: tuple[int, ...]
    balanced: bool
    causal: bool
    heads: tuple[int, int]
    head_dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None


def whole(case: Case) -> list[torch.Tensor]:
    """Q, K and V of all tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    (h_q, h_kv), (d_qk, d_v) = case.heads, case.head_dims
    shapes = ((h_q, d_qk), (h_kv, d_qk), (h_kv, d_v))
    tokens = sum(case.lengths)
    return [torch.randn(tokens, *s, generator=generator).to(case.dtype) for s in shapes]


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """O and Stats of all tokens, in float64."""
    q, k, v = (x.double() for x in whole(case))
    group = case.heads[0] // case.heads[1]
    outputs, sums = [], []
    for q1, k1, v1 in zip(*(x.split(list(case.lengths)) for x in (q, k, v)), strict=True):
        k1, v1 = (x.repeat_interleave(group, 1) for x in (k1, v1))
        scores = torch.einsum("qhd,khd->hqk", q1, k1) * case.head_dims[0] ** -0.5
        if case.causal:
            hidden = torch.ones(len(q1), len(k1), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v1))
        sums.append(scores.logsumexp(-1).T)
    return torch.cat(outputs), torch.cat(sums)


def run_case(case: Case, rank: int, ranks: int) -> None:
    sharding = Sharding(case.lengths, ranks, case.balanced)
    provider = ForwardProvider("fallback")
    shards = [sharding.shard(x, rank) for x in whole(case)]
    words: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
    if case.way == "all_to_all":
        o, stats = all_to_all_attention(*shards, sharding, provider, **words)
    else:
        gather = case.way == "gather"
        o, stats = ring_attention(*shards, sharding, provider, gather=gather, **words)
    wanted_o, wanted_stats = (sharding.shard(x, rank) for x in expected(case))
    assert o.dtype is case.dtype and stats.dtype is torch.float32
    torch.testing.assert_close(o.double(), wanted_o, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(stats.double(), wanted_stats, atol=2e-5, rtol=2e-5)


def _rank(rank: int, ranks: int, port: int, cases: list[Case], failures: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for case in cases:
        try:
            run_case(case, rank, ranks)
        except Exception:
            failures.append(f"rank {rank}, {case}:\n{traceback.format_exc()}")
        dist.barrier()
    dist.destroy_process_group()


def failures_of(ranks: int, cases: list[Case]) -> list[str]:
    """Run every case on so many gloo ranks of this machine."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.get_context("spawn").Manager() as manager:
        failures = manager.list()
        mp.spawn(_rank, (ranks, port, cases, failures), nprocs=ranks)
        return list(failures)

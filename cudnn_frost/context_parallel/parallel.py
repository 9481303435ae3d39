"""Attention of sharded sequences: heads exchanged for tokens, or K and V passed round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .provider import ForwardProvider, Mode, PackedSequences
from .sharding import Sharding

Partial = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def all_to_all_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sharding: Sharding,
    provider: ForwardProvider,
    *,
    scale: float | None = None,
    causal: bool = True,
    group: Any = None,
) -> Partial:
    """O (T, H_q, D_v) and Stats (T, H_q) of this rank's T tokens.

    q (T, H_q, D_qk), k (T, H_kv, D_qk), v (T, H_kv, D_v): this rank's tokens, in the order of
    `sharding`. Each rank attends over all tokens with its share of the heads: H_q must be a
    multiple of the ranks, H_kv a multiple or a divisor (then K and V heads are repeated).
    ValueError names what does not fit.
    """
    rank = _check(q, k, v, sharding, provider, group)
    ranks, h_q, h_kv = sharding.ranks, q.shape[1], k.shape[1]
    if h_q % ranks:
        raise ValueError(f"q: {h_q} heads are no multiple of {ranks} ranks")
    if h_kv % ranks:
        if ranks % h_kv:
            raise ValueError(f"k: {h_kv} heads neither divide {ranks} ranks nor are a multiple")
        k, v = (x.repeat_interleave(ranks // h_kv, dim=1) for x in (k, v))
    tokens = [sharding.tokens_of(r) for r in range(ranks)]
    to_sequence = sharding.scatter_index(q.device)
    q, k, v = (_heads_for_tokens(x, tokens, rank, group)[to_sequence] for x in (q, k, v))
    most, cu = _bound(sharding.lengths), sharding.cu_seqlens(sharding.lengths, q.device)
    sequences = PackedSequences(cu, cu, most, most)
    result = provider.forward(q, k, v, sequences, scale=scale, causal=causal)
    assert result is not None
    to_ranks = sharding.gather_index(q.device)
    o, stats = (_tokens_for_heads(x[to_ranks], tokens, rank, group) for x in result)
    return o, stats


@torch.no_grad()
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sharding: Sharding,
    provider: ForwardProvider,
    *,
    scale: float | None = None,
    causal: bool = True,
    gather: bool = False,
    group: Any = None,
) -> Partial:
    """O (T, H_q, D_v) and Stats (T, H_q) of this rank's T tokens; arguments as
    `all_to_all_attention`, without its conditions on heads.

    K and V of every rank pass by, one rank's at a time; partial results are merged by their Stats
    in fp32. gather: all K and V are fetched at once instead of round the ring.
    """
    rank = _check(q, k, v, sharding, provider, group)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float32, device=q.device)
    stats = torch.full(q.shape[:2], float("-inf"), device=q.device)
    passing = _gathered if gather else _ring
    for source, key, value in passing(k, v, sharding, rank, group):
        step = _Step(sharding, rank, source, causal)
        if not step.is_empty:
            step.attend(provider, scale, (q, key, value), (o, stats))
    return o.to(q.dtype), stats


def merge(o: torch.Tensor, stats: torch.Tensor, more: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    o (..., D) and stats (...): fp32; more: the other set's, any float type. A row that saw no key
    has Stats -inf. Source: the parallel merge of "Online normalizer calculation for softmax"
    (Milakov and Gimelshein, 2018), written with log-sum-exps.
    """
    other_o, other_stats = more[0].float(), more[1].float()
    total = torch.logaddexp(stats, other_stats)
    # rows that no set holds a key for weigh nothing, not NaN
    shift = total.nan_to_num(neginf=0.0)
    kept, added = (torch.exp(x - shift)[..., None] for x in (stats, other_stats))
    unseen = (other_stats == float("-inf"))[..., None]
    return o * kept + other_o.masked_fill(unseen, 0.0) * added, total


class _Step:
    """One rank's queries against the keys of one source rank: which of either, and the mask.

    Balanced shards leave three cases under a causal mask. The rank's own keys: its early and late
    parts are in order, so plain causal. Keys of a lower rank: every query follows the source's
    early part and precedes its late one. Keys of a higher rank: the late queries follow both.
    """

    def __init__(self, sharding: Sharding, rank: int, source: int, causal: bool) -> None:
        self.sharding, self.rank, self.source = sharding, rank, source
        self.causal = causal and source == rank
        partly = causal and source != rank
        self.is_empty = partly and not sharding.balanced and source > rank
        halves = partly and sharding.balanced
        self.q_half = 1 if halves and source > rank else None
        self.kv_half = 0 if halves and source < rank else None

    def attend(self, provider: ForwardProvider, scale: float, qkv: Any, into: Partial) -> None:
        """Merge this step's attention into O and Stats, in place."""
        q, k, v = qkv
        o, stats = into
        device, sharding = q.device, self.sharding
        kv_lengths = sharding.held(self.source, self.kv_half)
        # a sequence without keys here has nothing to add
        has_keys = tuple(length > 0 for length in kv_lengths)
        live = tuple(
            length if seen else 0
            for length, seen in zip(sharding.held(self.rank, self.q_half), has_keys, strict=True)
        )
        rows = sharding.rows(self.rank, self.q_half, has_keys, device)
        keys = sharding.rows(self.source, self.kv_half, None, device)
        if not sum(live):
            return
        q = q if rows is None else q[rows]
        k, v = (x if keys is None else x[keys] for x in (k, v))
        cu_q, cu_kv = (sharding.cu_seqlens(lengths, device) for lengths in (live, kv_lengths))
        sequences = PackedSequences(cu_q, cu_kv, _bound(live), _bound(kv_lengths))
        part = provider.forward(q, k, v, sequences, scale=scale, causal=self.causal)
        assert part is not None
        if rows is None:
            merged = merge(o, stats, part)
            o.copy_(merged[0])
            stats.copy_(merged[1])
        else:
            o[rows], stats[rows] = merge(o[rows], stats[rows], part)


def _bound(lengths: Iterable[int]) -> int:
    """Of lengths, a power of two: batches of like lengths share plans."""
    return 1 << (max(1, *lengths) - 1).bit_length()


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sharding: Sharding,
    provider: ForwardProvider,
    group: Any,
) -> int:
    """This rank; ValueError names what does not fit the sharding."""
    if provider.mode is Mode.OFF:
        raise ValueError("provider: its mode is off; make it with mode='fallback' or 'strict'")
    if dist.get_world_size(group) != sharding.ranks:
        world = dist.get_world_size(group)
        raise ValueError(f"sharding: is for {sharding.ranks} ranks, the group has {world}")
    rank = dist.get_rank(group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name}: must be (tokens, heads, head_dim), got {list(x.shape)}")
        if len(x) != sharding.tokens_of(rank):
            want = sharding.tokens_of(rank)
            raise ValueError(f"{name}: has {len(x)} tokens, rank {rank} holds {want}")
    return rank


def _heads_for_tokens(x: torch.Tensor, tokens: list[int], rank: int, group: Any) -> torch.Tensor:
    """(T_rank, H, D) on each rank -> (all T, H / ranks, D), tokens rank by rank."""
    ranks, heads, rest = len(tokens), x.shape[1] // len(tokens), x.shape[2:]
    sent = x.unflatten(1, (ranks, heads)).transpose(0, 1).contiguous()
    got = x.new_empty(sum(tokens), heads, *rest)
    row = heads * rest.numel()
    splits = [row * n for n in tokens]
    dist.all_to_all_single(
        got.view(-1), sent.view(-1), splits, [row * tokens[rank]] * ranks, group=group
    )
    return got


def _tokens_for_heads(x: torch.Tensor, tokens: list[int], rank: int, group: Any) -> torch.Tensor:
    """Inverse of `_heads_for_tokens`."""
    ranks, heads, rest = len(tokens), x.shape[1], x.shape[2:]
    got = x.new_empty(ranks, tokens[rank], heads, *rest)
    row = heads * rest.numel()
    splits = [row * n for n in tokens]
    dist.all_to_all_single(
        got.view(-1), x.contiguous().view(-1), [row * tokens[rank]] * ranks, splits, group=group
    )
    return got.transpose(0, 1).flatten(1, 2)


def _ring(
    k: torch.Tensor, v: torch.Tensor, sharding: Sharding, rank: int, group: Any
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Own K and V first, then each lower neighbour's; the next pair travels meanwhile."""
    ranks = sharding.ranks
    after, before = (_peer((rank + step) % ranks, group) for step in (1, -1))
    for step in range(ranks):
        source = (rank - step) % ranks
        if step + 1 == ranks:
            yield source, k, v
            return
        length = sharding.tokens_of((source - 1) % ranks)
        next_k, next_v = (x.new_empty(length, *x.shape[1:]) for x in (k, v))
        operations = [dist.P2POp(dist.isend, x, after, group) for x in (k, v)]
        operations += [dist.P2POp(dist.irecv, x, before, group) for x in (next_k, next_v)]
        travelling = dist.batch_isend_irecv(operations)
        yield source, k, v
        for request in travelling:
            request.wait()
        k, v = next_k, next_v


def _peer(rank: int, group: Any) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _gathered(
    k: torch.Tensor, v: torch.Tensor, sharding: Sharding, rank: int, group: Any
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Every rank's K and V, fetched at once; shorter shards travel padded."""
    lengths = [sharding.tokens_of(r) for r in range(sharding.ranks)]
    fetched = []
    for x in (k, v):
        padded = x.new_zeros(max(lengths), *x.shape[1:])
        padded[: len(x)] = x
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(every, padded, group=group)
        fetched.append(every)
    for source, length in enumerate(lengths):
        yield source, fetched[0][source][:length], fetched[1][source][:length]

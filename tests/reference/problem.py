"""The live part of an sdpa node as dense tensors, batch by batch and head by head.

Everything dead stays unread: rows past a length, pages past the last live one, table entries past
the live pages, gaps and tails of ragged tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .declaration import Band, Reader, alibi_slopes, resolve_band


@dataclass(frozen=True)
class Head:
    """One query head of one batch; n live rows, m live keys, all in the working precision.

    q (n,Dqk), k (m,Dqk), v (m,Dv); terms: (n,m) or broadcastable summands of the scaled logits, in
    order; visible (n,m) bool; drop (n,m) multipliers of P before their common factor, or None;
    sink: an extra natural logit, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    terms: tuple[torch.Tensor, ...]
    visible: torch.Tensor
    drop: torch.Tensor | None
    drop_scale: float
    sink: float | None


@dataclass(frozen=True)
class Problem:
    """One forward attention problem. Lengths are effective: clamped to the declared extents and to
    what the page tables can address."""

    reader: Reader
    batch: int
    hq: int
    hk: int
    hv: int
    sq: int
    dv: int
    len_q: tuple[int, ...]
    len_kv: tuple[int, ...]
    band: Band
    qk_scale: float
    pv_scale: float
    o_scale: float
    io_dtype: torch.dtype
    fp8: bool
    device: torch.device

    def ragged(self, port: str) -> bool:
        """Whether an output has no rows past len_q. A port the node lacks follows O."""
        tensor = self.reader.output(port) or self.reader.output("O")
        return tensor.ragged_offset is not None

    def keys(self, b: int, precision: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(Hk, len_kv, Dqk) and (Hv, len_kv, Dv) of batch `b`."""
        sides = ((name, f"paged_attention_{name}_table") for name in ("k", "v"))
        return tuple(self._side(*side, b).to(precision) for side in sides)  # type: ignore

    def _side(self, name: str, table_port: str, b: int) -> torch.Tensor:
        reader, count = self.reader, self.len_kv[b]
        pool, table = reader.input(name), reader.input(table_port)
        if table is None:
            return reader.rows(pool, b, count)
        _, heads, page_size, d = pool.get_dim()
        pages = -(-count // page_size)
        ids = reader.rows(table, b, pages).flatten().tolist()
        parts = [torch.empty(heads, 0, d, dtype=reader.dtype(pool), device=self.device)]
        for index, page in enumerate(ids):
            live = min(page_size, count - index * page_size)
            if not 0 <= page < pool.get_dim()[0]:
                raise IndexError(f"page {page} of batch {b} is outside the pool of {name}")
            parts.append(reader.rows(pool, page, live))
        return torch.cat([p.view(torch.uint8) for p in parts], 1).view(reader.dtype(pool))

    def head(self, b: int, h: int, keys, precision: torch.dtype) -> Head:
        """Query head `h` of batch `b` with key head h // (Hq/Hk) and value head h // (Hq/Hv)."""
        reader, n, m = self.reader, self.len_q[b], self.len_kv[b]
        k, v = keys
        drop, drop_scale = self._dropout(b, h, precision)
        sink = reader.input("sink_token")
        return Head(
            q=reader.rows(reader.input("q"), b, n)[h].to(precision),
            k=k[h // (self.hq // self.hk)],
            v=v[h // (self.hq // self.hv)],
            terms=self._terms(b, h, n, m, precision),
            visible=self.visible(b),
            drop=drop,
            drop_scale=drop_scale,
            sink=None if sink is None else float(reader.whole(sink)[0, h, 0, 0].item()),
        )

    def _terms(self, b: int, h: int, n: int, m: int, precision) -> tuple[torch.Tensor, ...]:
        """Bias, ALiBi and an additive kv_mask, in the order of contract 1.5."""
        reader, terms = self.reader, []
        bias = reader.input("bias")
        if bias is not None:
            terms.append(self._plane(bias, b, h, n, m).to(precision))
        if reader.node.params.get("use_alibi_mask"):
            i, j = self._indices(n, m)
            terms.append(alibi_slopes(self.hq)[h] * (j - i).to(precision))
        mask = reader.input("kv_mask")
        if mask is not None and reader.dtype(mask) is not torch.bool:
            terms.append(self._plane(mask, b, 0, 1, m).to(precision))
        return tuple(terms)

    def _plane(self, tensor, b: int, h: int, n: int, m: int) -> torch.Tensor:
        """[n, m] of a tensor [1 or B, 1 or Hq, rows, keys] of which all else is unread."""
        heads = tensor.get_dim()[1]
        stride = tensor.get_stride()
        offset = self.reader.origin(tensor, b) + (h if heads > 1 else 0) * stride[1]
        return self.reader.strided(tensor, (n, m), stride[2:], offset)

    def _dropout(self, b: int, h: int, precision) -> tuple[torch.Tensor | None, float]:
        """The caller's keep mask and its scale; the Philox form is not reproducible here."""
        node, reader = self.reader.node, self.reader
        if not node.params.get("_dropout_n"):
            return None, 1.0
        if "dropout_0" in node.params:
            if node.params["dropout_0"] == 0.0:
                return None, 1.0
            raise NotImplementedError("dropout by probability")
        mask = self._plane(node.inputs["dropout_0"], b, h, self.len_q[b], self.len_kv[b])
        return mask.to(precision), reader.scalar(node.inputs["dropout_1"])

    def _indices(self, n: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        i = torch.arange(n, device=self.device)[:, None]
        return i, torch.arange(m, device=self.device)[None, :]

    def visible(self, b: int) -> torch.Tensor:
        """(len_q, len_kv) bool, the formula of contract 1.5 on live rows and keys."""
        n, m = self.len_q[b], self.len_kv[b]
        i, j = self._indices(n, m)
        diagonal = i + (m - n if self.band.bottom_right else 0)
        seen = torch.ones(n, m, dtype=torch.bool, device=self.device)
        if self.band.right is not None:
            seen &= j <= diagonal + self.band.right
        if self.band.left is not None:
            seen &= j > diagonal - self.band.left
        mask = self.reader.input("kv_mask")
        if mask is not None and self.reader.dtype(mask) is torch.bool:
            seen &= self._plane(mask, b, 0, 1, m)
        return seen


def read_problem(graph, buffers: Mapping[int, torch.Tensor]) -> Problem:
    """The problem a graph and its buffers pose; raises on what has no meaning in the contract."""
    reader = Reader(graph, buffers)
    q, k, v = (reader.input(p) for p in "qkv")
    batch, hq, sq, _ = q.get_dim()
    hk, hv, dv = k.get_dim()[1], v.get_dim()[1], v.get_dim()[3]
    if hq % hk or hq % hv:
        raise ValueError(f"{hq} query heads over {hk} key and {hv} value heads")
    band = resolve_band(reader.op, reader.node.params)
    if reader.node.params.get("use_alibi_mask") and band.right != 0:
        raise ValueError("ALiBi needs a right bound of 0")
    len_q, len_kv = _lengths(reader, batch, sq)
    fp8 = reader.op == "sdpa_fp8"
    scale = {p: reader.scalar(t) for p, t in reader.node.inputs.items() if "scale_" in p}
    scale.pop("attn_scale", None)
    return Problem(
        reader=reader,
        batch=batch,
        hq=hq,
        hk=hk,
        hv=hv,
        sq=sq,
        dv=dv,
        len_q=len_q,
        len_kv=len_kv,
        band=band,
        qk_scale=reader.attn_scale()
        * math.prod(scale[s] for s in ("descale_q", "descale_k") if fp8),
        pv_scale=math.prod(scale[s] for s in ("scale_s", "descale_s", "descale_v") if fp8),
        o_scale=scale["scale_o"] if fp8 else 1.0,
        io_dtype=reader.dtype(q),
        fp8=fp8,
        device=buffers[q.get_uid()].device,
    )


def _lengths(reader: Reader, batch: int, sq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Effective lengths per batch: the dims without a padding mask; else as bound, clamped to the
    declared extents, and for paged sides to the capacity of the table."""
    capacity = logical_kv(reader)
    bound_q, bound_kv = reader.lengths("q"), reader.lengths("kv")
    padding = reader.node.params.get("use_padding_mask", False)
    if padding != (bound_q is not None) or padding != (bound_kv is not None):
        raise ValueError("a padding mask needs lengths of both sides, lengths need a padding mask")
    if not padding:
        return (sq,) * batch, (capacity,) * batch
    if len(bound_q) != batch or len(bound_kv) != batch:
        raise ValueError(f"{len(bound_q)} and {len(bound_kv)} lengths for {batch} batches")
    len_q = tuple(min(max(n, 0), sq) for n in bound_q)
    return len_q, tuple(min(max(n, 0), capacity) for n in bound_kv)


def logical_kv(reader: Reader) -> int:
    """Keys a batch can have: the least of the dense extents, the tables' capacities and
    paged_attention_max_seq_len_kv (contract 1.2, 1.5)."""
    limits = []
    for name in ("k", "v"):
        tensor, table = reader.input(name), reader.input(f"paged_attention_{name}_table")
        rows = tensor.get_dim()[2]
        limits.append(rows if table is None else table.get_dim()[2] * rows)
    maximum = reader.node.params.get("paged_attention_max_seq_len_kv")
    return min(limits if maximum is None else [*limits, maximum])

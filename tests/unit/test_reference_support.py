"""What the reference row's tests share: poisoned memory, facts over it, the formula row by row.

Memory is a few flat torch tensors, NaN wherever no operand put a value, so every case also shows
that nothing else is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cudnn_frost.analyzer.facts import Band, Lengths, Operand, Ragged, SdpaFacts
from cudnn_frost.analyzer.layout import span_elements
from cudnn_frost.engines.reference import run_reference
from cudnn_frost.vocab import DType

INF, NAN = math.inf, math.nan
TORCH = {
    DType.HALF: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT: torch.float32,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
    DType.UINT8: torch.uint8,
    DType.BOOLEAN: torch.bool,
}
DTYPE = {value: key for key, value in TORCH.items()}
CANARY = 7.0
CAUSAL = Band(right=0)
CAUSAL_BR = Band(right=0, alignment="BOTTOM_RIGHT")


def row_major(dim: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))


def token_major(dim: tuple[int, ...]) -> tuple[int, ...]:
    """BSHD strides of a (B, H, S, D) tensor."""
    _, h, s, d = dim
    return (s * h * d, d, h * d, 1)


@dataclass
class Memory:
    """Flat tensors by uid. dead: what fills the places that no operand put a value in."""

    dead: float = NAN
    flat: dict[int, torch.Tensor] = field(default_factory=dict)

    def view(self, operand, dim, stride, offset=0):
        flat = self.flat[operand.uid]
        assert flat.dtype == TORCH[operand.dtype]
        if 0 in dim:
            return torch.empty(dim, dtype=flat.dtype)
        assert offset >= 0
        assert offset + span_elements(dim, stride) <= flat.numel(), "view outside the buffer"
        return torch.as_strided(flat, dim, stride, offset)

    def blank(self, dtype: torch.dtype, elements: int, value: float | None = None) -> int:
        """A new buffer; the uid."""
        fill = self.dead if value is None else value
        if not dtype.is_floating_point:
            fill = 0 if value is None else value
        uid = len(self.flat) + 1
        self.flat[uid] = torch.full((elements,), fill).to(dtype)
        return uid

    def add(self, name, values, stride=None, *, dead_rows=None) -> Operand:
        """An operand holding `values`; batch b is dead from row dead_rows[b] on."""
        dim = tuple(values.shape)
        stride = stride or row_major(dim)
        uid = self.blank(values.dtype, span_elements(dim, stride))
        operand = Operand(uid=uid, name=name, dtype=DTYPE[values.dtype], dim=dim, stride=stride)
        view = self.view(operand, dim, stride)
        view.copy_(values)
        for batch, start in enumerate(dead_rows or ()):
            view[batch, :, start:] = torch.tensor(self.dead).to(values.dtype)
        return operand

    def out(self, name, dim, dtype, stride=None) -> Operand:
        """An output full of canaries."""
        stride = stride or row_major(dim)
        uid = self.blank(dtype, span_elements(dim, stride), CANARY)
        return Operand(uid=uid, name=name, dtype=DTYPE[dtype], dim=dim, stride=stride)

    def ints(self, name, values, dtype=torch.int32, dim=None) -> Operand:
        tensor = torch.tensor(values, dtype=dtype)
        return self.add(name, tensor.reshape(dim or (len(values), 1, 1, 1)))

    def read(self, operand: Operand) -> torch.Tensor:
        return self.view(operand, operand.dim, operand.stride).double()

    def packed(self, name, values, lengths, origins, *, unit=1, dtype=torch.int32, room=None):
        """[B, H, S, D] values packed token-major at `origins` (tokens); offsets in `unit`s."""
        batch, h, s, d = values.shape
        token = h * d
        room = room or max(o + n for o, n in zip(origins, lengths, strict=True))
        uid = self.blank(values.dtype, max(room, 1) * token)
        offsets = torch.tensor([*origins, room]) * token // unit
        index = self.add(f"{name}.offsets", offsets.to(dtype).reshape(-1, 1, 1, 1))
        ragged = Ragged(uid=index.uid, dtype=index.dtype, dim=index.dim, multiplier=unit)
        operand = Operand(
            uid=uid,
            name=name,
            dtype=DTYPE[values.dtype],
            dim=(batch, h, s, d),
            stride=(token, d, token, 1),
            ragged=ragged,
        )
        for b, (length, origin) in enumerate(zip(lengths, origins, strict=True)):
            if length:
                rows = self.view(operand, (h, length, d), (d, token, 1), origin * token)
                rows.copy_(values[b, :, :length])
        return operand

    def paged(self, name, values, lengths, table, size, *, pages, table_stride=None, nhd=False):
        """A pool holding `values` by `table` (rows of page ids), and the table's operand."""
        _, h, _, d = values.shape
        dim = (pages, h, size, d)
        stride = (size * h * d, d, h * d, 1) if nhd else row_major(dim)
        uid = self.blank(values.dtype, span_elements(dim, stride))
        pool = Operand(uid=uid, name=name, dtype=DTYPE[values.dtype], dim=dim, stride=stride)
        view = self.view(pool, dim, stride)
        for b, length in enumerate(lengths):
            for j in range(min(length, len(table[b]) * size)):
                view[table[b][j // size], :, j % size] = values[b, :, j]
        ids = torch.tensor(table, dtype=torch.int32).reshape(len(table), 1, -1, 1)
        return pool, self.add(f"{name}.table", ids, table_stride)


@dataclass
class Run:
    """Facts, their memory, and the outputs after `go`."""

    memory: Memory
    facts: SdpaFacts

    def go(self, precision: str = "fp64") -> Run:
        run_reference(self.facts, self.memory, precision=precision)
        return self

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.memory.read(getattr(self.facts, name))


def prepare(memory, q, k, v, *, o_dtype=torch.float32, want=("stats",), **fields: Any) -> Run:
    """A graph over these operands; paged ones pass extents in `fields`. Nothing is run yet."""
    b, h_q, s_q, d_qk = q.dim
    d_v = v.dim[3]
    if "o" not in fields:
        fields["o"] = memory.out("O", (b, h_q, s_q, d_v), o_dtype)
    for name in want:
        dim = (1, 1, 1, 1) if name.startswith("amax") else (b, h_q, s_q, 1)
        fields.setdefault(name, memory.out(name, dim, torch.float32))
    base = {
        "op": "sdpa_fp8" if q.dtype.is_fp8 else "sdpa",
        "b": b,
        "h_q": h_q,
        "h_k": k.dim[1],
        "h_v": v.dim[1],
        "s_q": s_q,
        "s_kv": k.dim[2],
        "d_qk": d_qk,
        "d_v": d_v,
        "q": q,
        "k": k,
        "v": v,
    }
    if "seq_len_q" in fields or "seq_len_kv" in fields:
        base["padding"] = True
    return Run(memory, SdpaFacts(**{**base, **fields}))


def draw(*dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(dim))
    return torch.randn(dim, generator=generator).to(dtype)


def qkv(b=2, h_q=2, h_k=None, h_v=None, s_q=5, s_kv=7, d=4, d_v=None, dtype=torch.float32):
    h_k = h_k or h_q
    q, k = draw(b, h_q, s_q, d, dtype=dtype), draw(b, h_k, s_kv, d, seed=1, dtype=dtype)
    return q, k, draw(b, h_v or h_k, s_kv, d_v or d, seed=2, dtype=dtype)


def dense(memory, tensors, **fields: Any) -> Run:
    operands = [memory.add(name, x) for name, x in zip("QKV", tensors, strict=True)]
    return prepare(memory, *operands, **fields)


def lengths(memory, q=None, kv=None, dtype=torch.int32) -> dict[str, Lengths]:
    given = {"seq_len_q": q, "seq_len_kv": kv}
    return {
        name: Lengths(form="seq_len", operand=memory.ints(name, values, dtype))
        for name, values in given.items()
        if values is not None
    }


def by_hand(q, k, v, visible, *, scale=1.0, add=None, sink=None):
    """One head, [S, D] each, fp64: (O, Stats) with the rows' visible keys taken one by one."""
    q, k, v = q.double(), k.double(), v.double()
    output = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    stats = torch.full((q.shape[0],), -INF, dtype=torch.float64)
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if visible(i, j)]
        scores = [scale * float(q[i] @ k[j]) + (add(i, j) if add else 0.0) for j in keys]
        top = max([*scores, -INF if sink is None else sink], default=-INF)
        if top == -INF:
            continue
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
        stats[i] = top + math.log(total)
        for j, weight in zip(keys, weights, strict=True):
            output[i] += weight / total * v[j]
    return output, stats


def check_by_hand(run: Run, tensors, visible, head=None, **terms: Any) -> None:
    """Every batch and head against `by_hand`; visible(b, i, j). head: terms of one head."""
    q, k, v = tensors
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            own = head(b, h) if head else {}
            o, stats = by_hand(
                q[b, h],
                k[b, h * k.shape[1] // q.shape[1]],
                v[b, h * v.shape[1] // q.shape[1]],
                lambda i, j, b=b: visible(b, i, j),
                **terms,
                **own,
            )
            torch.testing.assert_close(run.o[b, h], o, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(run.stats[b, h, :, 0], stats, rtol=1e-6, atol=1e-6)


def one_row(scores, values, **fields: Any) -> Run:
    """One query whose score of key j is scores[j], V of that key values[j]; d = 1."""
    memory = Memory()
    q = torch.ones(1, 1, 1, 1)
    k, v = (torch.tensor(x).reshape(1, 1, -1, 1) for x in (scores, values))
    return dense(memory, (q, k, v), **{"want": ("stats", "score_max", "score_sum_exp"), **fields})


def test_memory_refuses_a_view_outside_a_buffer() -> None:
    memory = Memory()
    operand = memory.add("Q", torch.zeros(1, 1, 2, 4))
    assert memory.view(operand, (1, 4), (4, 1), 4).shape == (1, 4)
    for dim, offset in (((2, 4), 4), ((1, 4), -1)):
        with pytest.raises(AssertionError):
            memory.view(operand, dim, (4, 1), offset)


def test_memory_is_poisoned_between_values() -> None:
    memory = Memory()
    operand = memory.add("Q", torch.zeros(1, 1, 2, 4), (16, 16, 8, 1))
    assert torch.isnan(memory.flat[operand.uid]).sum() == 4


def test_formula_by_hand_agrees_with_torch() -> None:
    q, k, v = (x[0, 0] for x in qkv())
    o, stats = by_hand(q, k, v, lambda i, j: j <= i, scale=0.5)
    mask = torch.ones(5, 7).tril() == 0
    scores = (q.double() @ k.double().T * 0.5).masked_fill(mask, -INF)
    torch.testing.assert_close(o, torch.softmax(scores, -1) @ v.double())
    torch.testing.assert_close(stats, torch.logsumexp(scores, -1))

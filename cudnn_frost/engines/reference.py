"""The reference row's computation: the whole forward contract in plain torch, on any device.

One sequence at a time, one KV head's group of query heads at a time, query rows in chunks. Lengths,
ragged offsets and page tables are read on the host, so it synchronizes, and it allocates its
intermediates; everything a kernel must not do, which is why it is last in every list.

Not done here: score modifiers, Philox dropout, block masks, an RNG dump, block-scaled outputs and
half-precision softmax. `unfuse_fma` and `implementation` change no meaning and are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from ..analyzer.facts import Lengths, Operand, SdpaFacts
from ..vocab import DType

if TYPE_CHECKING:
    import torch

_CHUNK_ELEMENTS = 1 << 25
"""Scores held at once, in elements."""

LOG2_E = math.log2(math.e)


class Buffers(Protocol):
    """Access to bound memory: views of an operand's elements, as declared."""

    def view(
        self, operand: Operand, dim: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> torch.Tensor:
        """A strided view, `offset` elements behind the operand's address."""


def run_reference(facts: SdpaFacts, buffers: Buffers, *, precision: str = "fp32") -> None:
    """Compute every requested output in place.

    facts: a graph the reference row accepts. precision: `fp32` or `fp64`, of all arithmetic.
    Raises ValueError naming the tensor when a bound buffer is too small for what it must hold.
    """
    import torch

    dtype = torch.float64 if precision == "fp64" else torch.float32
    # inputs may be leaves of somebody's autograd graph
    with torch.no_grad():
        _Run(facts, buffers, dtype).all()


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slope of each head (Press et al., 2022), the power-of-two rule with interleaving."""
    n = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
    slopes += [2.0 ** (-4.0 * (t + 1) / n) for t in range(0, 2 * (heads - n), 2)]
    return slopes[:heads]


@dataclass(frozen=True)
class _Sequence:
    """One batch entry: its lengths, and what its rows see past the dead keys."""

    index: int
    len_q: int
    len_kv: int


class _Run:
    """One execution: facts, memory and the values read from it once."""

    def __init__(self, facts: SdpaFacts, buffers: Buffers, dtype: torch.dtype) -> None:
        self.facts = facts
        self.buffers = buffers
        self.dtype = dtype
        self.scale = self._score_scale()
        self.sink = self._whole(facts.sink)
        self.output_scale = self._product(facts.scale_s, facts.descale_s, facts.descale_v)
        self.scale_o = self._product(facts.scale_o)
        self.drop_scale = self._product(facts.dropout.scale if facts.dropout else None)
        self.amax_o = self.amax_s = 0.0
        self.offsets = {name: self._offsets(getattr(facts, name)) for name in facts.ragged}

    # ---- reading

    def _whole(self, operand: Operand | None) -> torch.Tensor | None:
        if operand is None:
            return None
        return self.buffers.view(operand, operand.dim, operand.stride).to(self.dtype)

    def _product(self, *operands: Operand | None) -> torch.Tensor | float:
        """The product of one-element tensors; an absent one counts as 1."""
        result: torch.Tensor | float = 1.0
        for operand in operands:
            value = self._whole(operand)
            result = result if value is None else value.reshape(()) * result
        return result

    def _score_scale(self) -> torch.Tensor | float:
        """attn_scale with the dequantization of Q and K folded in."""
        facts = self.facts
        if facts.attn_scale_prefolded:
            base: torch.Tensor | float = 1.0 / LOG2_E
        elif facts.attn_scale.value is not None:
            base = facts.attn_scale.value
        else:
            base = self._product(facts.attn_scale.operand)
        return base * self._product(facts.descale_q) * self._product(facts.descale_k)

    def _offsets(self, operand: Operand) -> list[int]:
        """Element offset of each sequence in a packed operand."""
        ragged = operand.ragged
        assert ragged is not None
        index = Operand(
            uid=ragged.uid,
            name=f"{operand.name}.ragged_offset",
            dtype=ragged.dtype,
            dim=ragged.dim,
            stride=(1,) * len(ragged.dim),
        )
        values = self.buffers.view(index, (self.facts.b + 1,), (1,))
        return [value * ragged.multiplier for value in values.tolist()]

    def _lengths(self, side: Lengths, extent: int) -> list[int]:
        """Each sequence's length, held to what the declaration has room for."""
        batch = self.facts.b
        if side.operand is None:
            return [extent] * batch
        step = (side.operand.stride or (1,))[0]
        count = batch if side.form == "seq_len" else batch + 1
        values = self.buffers.view(side.operand, (count,), (step,)).tolist()
        if side.form == "cu_seq_len":
            values = [after - before for before, after in pairwise(values)]
        return [min(max(int(value), 0), extent) for value in values]

    def _capacity(self) -> int:
        """Keys there is memory for: the dense extent, the tables' pages, the declared maximum."""
        facts, paging = self.facts, self.facts.paging
        room = [facts.s_kv]
        for operand, size in (
            (facts.k, paging.page_size_k if paging else None),
            (facts.v, paging.page_size_v if paging else None),
        ):
            pages = paging.pages_per_seq if paging else 0
            room.append(operand.dim[2] if size is None else pages * size)
        return min(room)

    def _keys(self, name: str, sequence: _Sequence, head: int) -> torch.Tensor:
        """K or V of one head, live keys only: [len_kv, d]."""
        facts = self.facts
        operand: Operand = getattr(facts, name)
        paging = facts.paging
        table = getattr(paging, f"{name}_table") if paging else None
        _, head_stride, row_stride, unit = operand.stride
        width, length = operand.dim[3], sequence.len_kv
        if table is None or paging is None:
            offset = self._origin(name, operand, sequence.index) + head * head_stride
            keys = self.buffers.view(operand, (length, width), (row_stride, unit), offset)
            return keys.to(self.dtype)
        size = getattr(paging, f"page_size_{name}")
        live = -(-length // size)
        start = sequence.index * table.stride[0]
        pages = self.buffers.view(table, (live,), (table.stride[2],), start).long()
        pool = self.buffers.view(
            operand,
            (operand.dim[0], size, width),
            (operand.stride[0], row_stride, unit),
            head * head_stride,
        )
        return pool[pages].to(self.dtype).reshape(-1, width)[:length]

    def _origin(self, name: str, operand: Operand, batch: int) -> int:
        """First element of a sequence: its ragged offset, or its batch stride away."""
        if operand.ragged is not None:
            return self.offsets[name][batch]
        return batch * operand.stride[0]

    def _rows(self, name: str, sequence: _Sequence, heads: slice, rows: slice) -> torch.Tensor:
        """A view [heads, rows, width] of one sequence of a Q-shaped operand."""
        operand: Operand = getattr(self.facts, name)
        _, head_stride, row_stride, unit = operand.stride
        origin = self._origin(name, operand, sequence.index)
        return self.buffers.view(
            operand,
            (heads.stop - heads.start, rows.stop - rows.start, operand.dim[3]),
            (head_stride, row_stride, unit),
            origin + heads.start * head_stride + rows.start * row_stride,
        )

    # ---- the computation

    def all(self) -> None:
        facts = self.facts
        lens_q = self._lengths(facts.seq_len_q, facts.s_q)
        lens_kv = self._lengths(facts.seq_len_kv, self._capacity())
        for index in range(facts.b):
            sequence = _Sequence(index, lens_q[index], lens_kv[index])
            for heads, k_head, v_head in self._head_groups():
                k = self._keys("k", sequence, k_head)
                v = self._keys("v", sequence, v_head)
                for rows in self._chunks(heads, sequence.len_q, sequence.len_kv):
                    self._attend(sequence, heads, rows, k, v)
                self._blank(sequence, heads)
        for name in ("amax_o", "amax_s"):
            operand = getattr(facts, name)
            if operand is not None:
                target = self.buffers.view(operand, operand.dim, operand.stride)
                target.fill_(getattr(self, name))

    def _head_groups(self) -> Iterator[tuple[slice, int, int]]:
        """Query heads that share both their K head and their V head."""
        facts = self.facts
        per_k, per_v = facts.h_q // facts.h_k, facts.h_q // facts.h_v
        width = math.gcd(per_k, per_v)
        for start in range(0, facts.h_q, width):
            yield slice(start, start + width), start // per_k, start // per_v

    def _chunks(self, heads: slice, len_q: int, len_kv: int) -> Iterator[slice]:
        width = max(1, _CHUNK_ELEMENTS // ((heads.stop - heads.start) * max(len_kv, 1)))
        for start in range(0, len_q, width):
            yield slice(start, min(start + width, len_q))

    def _attend(
        self, sequence: _Sequence, heads: slice, rows: slice, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Scores, softmax with the sink, output: one chunk of one group's rows."""
        import torch

        scores = self._scores(sequence, heads, rows, k)
        row_max = scores.amax(-1, keepdim=True) if k.shape[0] else self._empty(scores)
        if self.sink is not None:
            sink = self.sink.reshape(-1)[heads].view(-1, 1, 1)
            row_max = torch.maximum(row_max, sink)
        # a keyless row's maximum is -inf: shifting by it would make NaN of -inf - -inf
        shift = torch.where(row_max == -math.inf, 0.0, row_max)
        weights = torch.exp(scores - shift)
        row_sum = weights.sum(-1, keepdim=True)
        if self.sink is not None:
            row_sum = row_sum + torch.exp(sink - shift)
        probabilities = weights / torch.where(row_sum == 0, 1.0, row_sum)
        self._note_amax_s(probabilities)
        dropped = self._drop(sequence, heads, rows, probabilities)
        output = (dropped @ v) * self.output_scale
        self._store(sequence, heads, rows, output)
        self._store_statistics(sequence, heads, rows, row_max, row_sum)

    @staticmethod
    def _empty(scores: torch.Tensor) -> torch.Tensor:
        """The maximum over no keys."""
        return scores.new_full((*scores.shape[:-1], 1), -math.inf)

    def _scores(
        self, sequence: _Sequence, heads: slice, rows: slice, k: torch.Tensor
    ) -> torch.Tensor:
        """[heads, rows, len_kv]: scaled scores, bias and ALiBi added, hidden keys at -inf."""
        import torch

        facts = self.facts
        q = self._rows("q", sequence, heads, rows).to(self.dtype)
        scores = (q @ k.T) * self.scale
        row = torch.arange(rows.start, rows.stop, device=k.device).view(-1, 1)
        key = torch.arange(sequence.len_kv, device=k.device).view(1, -1)
        if facts.bias is not None:
            scores = scores + self._bias(facts.bias, sequence, heads, rows)
        if facts.alibi:
            slopes = torch.tensor(alibi_slopes(facts.h_q)[heads], device=k.device)
            scores = scores + slopes.to(self.dtype).view(-1, 1, 1) * (key - row)
        if facts.kv_mask is not None:
            scores = self._mask_keys(facts.kv_mask, sequence, scores)
        return scores.masked_fill(~self._visible(sequence, row, key), -math.inf)

    def _visible(self, sequence: _Sequence, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The band of the contract, with this sequence's own lengths."""
        band = self.facts.band
        offset = sequence.len_kv - sequence.len_q if band.alignment == "BOTTOM_RIGHT" else 0
        visible = (row >= 0) & (key >= 0)
        if band.right is not None:
            visible = visible & (key <= row + offset + band.right)
        if band.left is not None:
            visible = visible & (key > row + offset - band.left)
        return visible

    def _bias(self, bias: Operand, sequence: _Sequence, heads: slice, rows: slice) -> torch.Tensor:
        """The bias of these rows; an axis of extent 1 is broadcast."""
        batch, head, row, key = (
            0 if extent == 1 else stride
            for extent, stride in zip(bias.dim, bias.stride, strict=True)
        )
        shape = (heads.stop - heads.start, rows.stop - rows.start, sequence.len_kv)
        offset = sequence.index * batch + heads.start * head + rows.start * row
        return self.buffers.view(bias, shape, (head, row, key), offset).to(self.dtype)

    def _mask_keys(self, mask: Operand, sequence: _Sequence, scores: torch.Tensor) -> torch.Tensor:
        """A boolean mask hides keys where False, any other type is added to the scores."""
        batch, key = (0 if mask.dim[axis] == 1 else mask.stride[axis] for axis in (0, 3))
        offset = sequence.index * batch
        values = self.buffers.view(mask, (sequence.len_kv,), (key,), offset)
        if mask.dtype is DType.BOOLEAN:
            return scores.masked_fill(~values, -math.inf)
        return scores + values.to(self.dtype)

    def _drop(
        self, sequence: _Sequence, heads: slice, rows: slice, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Dropout by the caller's mask and scale."""
        dropout = self.facts.dropout
        if dropout is None or dropout.mask is None:
            return probabilities
        kept = self._bias(dropout.mask, sequence, heads, rows)
        return probabilities * kept * self.drop_scale

    # ---- writing

    def _note_amax_s(self, probabilities: torch.Tensor) -> None:
        if self.facts.amax_s is not None and probabilities.numel():
            self.amax_s = max(self.amax_s, float(probabilities.amax()))

    def _store(self, sequence: _Sequence, heads: slice, rows: slice, output: torch.Tensor) -> None:
        if self.facts.amax_o is not None and output.numel():
            self.amax_o = max(self.amax_o, float(output.abs().amax()))
        target = self._rows("o", sequence, heads, rows)
        scaled = output * self.scale_o
        dtype = self.facts.o.dtype
        if dtype.is_fp8:
            scaled = scaled.clamp(-dtype.max_finite, dtype.max_finite)
        target.copy_(scaled.to(target.dtype))

    def _store_statistics(
        self,
        sequence: _Sequence,
        heads: slice,
        rows: slice,
        row_max: torch.Tensor,
        row_sum: torch.Tensor,
    ) -> None:
        """Stats = max + ln(sum), in bits when asked; the sink is part of both terms."""
        values = {
            "stats": (row_max + row_sum.log()) * (LOG2_E if self.facts.stats_use_log2 else 1.0),
            "score_max": row_max,
            "score_sum_exp": row_sum,
        }
        for name, value in values.items():
            if getattr(self.facts, name) is not None:
                self._rows(name, sequence, heads, rows).copy_(value)

    def _blank(self, sequence: _Sequence, heads: slice) -> None:
        """Rows past the sequence: O = 0 and Stats = -inf when dense, nothing when packed."""
        blanks = {"o": 0.0, "stats": -math.inf, "score_max": -math.inf, "score_sum_exp": 0.0}
        rows = slice(sequence.len_q, self.facts.s_q)
        for name, value in blanks.items():
            operand = getattr(self.facts, name)
            if operand is not None and operand.ragged is None and rows.start < rows.stop:
                self._rows(name, sequence, heads, rows).fill_(value)

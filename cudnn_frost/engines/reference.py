"""The reference row's computation: the whole forward contract in plain torch, on any device.

One sequence at a time, all heads at once, query rows in chunks. Lengths, ragged offsets and the
live part of page tables are read on the host, so it synchronizes, and it allocates its
intermediates; everything a kernel must not do, which is why it is last in every list. Scales and
sinks stay on the device.

The formulas are the op contract of `cudnn.pygraph.sdpa` and `sdpa_fp8`; per batch, with i a query
row and j a key:

    S = (Q K^T) * attn_scale * descale_q * descale_k + bias + slope * (j - i), hidden keys at -inf
    P = exp(S - m) / l        m = max(S, sink)        l = sum_j exp(S - m) + exp(sink - m)
    O = (dropout(P) V) * scale_s * descale_s * descale_v, stored as O * scale_o
    Stats = m + ln l          Amax_S = max P          Amax_O = max |O|

P is not rounded to FP8: scale_s and descale_s act as the net factor they document. Memory that
no live row sees (dead rows, dead pages and their table entries, keys in front of a window) is not
read, and a key of weight zero contributes nothing whatever its V holds.

`unfuse_fma` and `implementation` change no meaning and are ignored; the token totals are bounds of
allocations and are not needed. What is not done: `NOT_SERVED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from ..analyzer.band import visible_range
from ..analyzer.facts import Lengths, Operand, SdpaFacts
from ..vocab import DType

if TYPE_CHECKING:
    import torch

NOT_SERVED: dict[str, str] = {
    "score_mod": "a callable over graph tensors, which the facts do not carry",
    "dropout": "Philox, whose stream cuDNN does not document; a caller's mask is served",
    "rng_dump": "nothing random is drawn",
    "sf_o": "block-scaled outputs, FP4 among them",
    "softmax_precision": "HALF: the softmax is computed in the run's precision, fp32 or fp64",
    "paging": "packed (ragged) page tables",
}
"""What the row cannot do, by the fact that asks for it, and why or what of it."""

_SCORE_BYTES = 1 << 26
"""Size of one chunk's score matrix; about four of that size are alive at once."""

_BLOCK_MASK_TILE = 128

LOG2_E = math.log2(math.e)


class Buffers(Protocol):
    """Access to bound memory: views of an operand's elements, as declared."""

    def view(
        self, operand: Operand, dim: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> torch.Tensor:
        """A strided view of the operand's type, `offset` elements behind its address.

        dim, stride: elements. A view without elements touches no memory, whatever its offset.
        """


def run_reference(facts: SdpaFacts, buffers: Buffers, *, precision: str = "fp32") -> None:
    """Compute every requested output in place.

    facts: a graph the reference row accepts. precision: `fp32` or `fp64`, of all arithmetic.
    Raises ValueError for another precision, for facts that ask for something in `NOT_SERVED`, for
    a live page-table entry outside its pool, and (from `buffers`) for memory that is too small.
    """
    import torch

    if precision not in ("fp32", "fp64"):
        raise ValueError(f"precision is {precision!r}; takes 'fp32' or 'fp64'")
    for name in _asked_and_not_served(facts):
        raise ValueError(f"{facts.op}: the reference row does not serve this {name}")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    with _plain_arithmetic(buffers.view(facts.o, (0,), (1,)).device):
        _Attention(facts, _Memory(facts, buffers, dtype)).run()


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slope of each head (Press et al., 2022), the power-of-two rule with interleaving."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
    slopes += [2.0 ** (-4.0 * (t + 1) / n) for t in range(0, 2 * (heads - n), 2)]
    return slopes


def _asked_and_not_served(facts: SdpaFacts) -> Iterator[str]:
    """The keys of `NOT_SERVED` that these facts ask for; the row's rules decline them first."""
    paging, dropout = facts.paging, facts.dropout
    tables = (paging.k_table, paging.v_table) if paging else ()
    asked = {
        "score_mod": facts.score_mod,
        "dropout": dropout is not None and dropout.form == "philox",
        "rng_dump": facts.rng_dump is not None,
        "sf_o": facts.sf_o is not None,
        "softmax_precision": facts.softmax_precision not in (None, DType.FLOAT),
        "paging": any(table is not None and table.ragged is not None for table in tables),
    }
    return (name for name, wanted in asked.items() if wanted)


def _plain_arithmetic(device: torch.device) -> AbstractContextManager[object]:
    """No autograd graph (inputs may be somebody's leaves) and no autocast around the run."""
    import torch

    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def _matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to multiply matrices in: fp64 where this process lets torch round fp32 operands.

    TF32 and BF16 matmuls are process-wide settings, so they are not switched off here: another
    thread may rely on them.
    """
    import torch

    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # set through the per-backend interface, which the older query refuses to summarize
        exact = False
    return dtype if exact else torch.float64


def _table(facts: SdpaFacts, name: str) -> Operand | None:
    """The page table of `k` or `v`; None where that side is dense."""
    table: Operand | None = getattr(facts.paging, f"{name}_table", None)
    return table


@dataclass(frozen=True)
class _Sequence:
    """One batch entry. keys: those that at least one of its rows may see by the band."""

    index: int
    len_q: int
    len_kv: int
    keys: slice

    @property
    def key_count(self) -> int:
        return self.keys.stop - self.keys.start


class _Memory:
    """Reads and writes of one run: where each sequence of an operand is, and its values."""

    def __init__(self, facts: SdpaFacts, buffers: Buffers, dtype: torch.dtype) -> None:
        self.facts = facts
        self.buffers = buffers
        self.dtype = dtype
        self._offsets = {name: self._read_offsets(getattr(facts, name)) for name in facts.ragged}

    # ---- whole operands

    def whole(self, operand: Operand | None) -> torch.Tensor | None:
        """All of a small operand in the run's precision; None when it is not declared."""
        if operand is None:
            return None
        return self.buffers.view(operand, operand.dim, operand.stride).to(self.dtype)

    def product(self, *operands: Operand | None) -> torch.Tensor | float:
        """The product of one-element tensors, on their device; an absent one counts as 1."""
        result: torch.Tensor | float = 1.0
        for operand in operands:
            value = self.whole(operand)
            result = result if value is None else value.reshape(()) * result
        return result

    def fill(self, operand: Operand, value: torch.Tensor) -> None:
        """Store one value over the whole operand."""
        self.buffers.view(operand, operand.dim, operand.stride).copy_(value)

    # ---- sequences

    def sequences(self) -> Iterator[_Sequence]:
        """Every batch entry, its lengths held to what the declaration has room for."""
        facts = self.facts
        lens_q = self._lengths(facts.seq_len_q, facts.s_q)
        lens_kv = self._lengths(facts.seq_len_kv, facts.kv_capacity)
        for index, (len_q, len_kv) in enumerate(zip(lens_q, lens_kv, strict=True)):
            # both ends of the band only move forward with the row
            first, _ = visible_range(facts.band, 0, len_q, len_kv)
            _, last = visible_range(facts.band, len_q - 1, len_q, len_kv)
            keys = slice(first, last) if len_q and first < last else slice(0, 0)
            yield _Sequence(index, len_q, len_kv, keys)

    def _lengths(self, side: Lengths, extent: int) -> list[int]:
        batch = self.facts.b
        if side.operand is None:
            return [extent] * batch
        count = batch if side.form == "seq_len" else batch + 1
        view = self.buffers.view(side.operand, (count,), (side.operand.stride[0],))
        values = view.tolist()
        if side.form == "cu_seq_len":
            values = [after - before for before, after in pairwise(values)]
        return [min(max(value, 0), extent) for value in values]

    def _read_offsets(self, operand: Operand) -> list[int]:
        """Element offset of each sequence of a packed operand."""
        ragged = operand.ragged
        assert ragged is not None
        index = Operand(
            uid=ragged.uid,
            name=f"{operand.name}.ragged_offset",
            dtype=ragged.dtype,
            dim=ragged.dim,
            stride=(1,) * len(ragged.dim),
        )
        # the end of the last sequence follows from its length
        values = self.buffers.view(index, (self.facts.b,), (1,))
        return [value * ragged.multiplier for value in values.tolist()]

    def _origin(self, name: str, batch: int) -> int:
        """First element of a sequence: its ragged offset, or its batch stride away."""
        if name in self._offsets:
            return self._offsets[name][batch]
        operand: Operand = getattr(self.facts, name)
        return batch * operand.stride[0]

    # ---- rows of one sequence

    def rows(self, name: str, sequence: _Sequence, rows: slice) -> torch.Tensor:
        """The view [H, rows, D] of one sequence of Q, a dense K or V, O, Stats or their kin."""
        operand: Operand = getattr(self.facts, name)
        _, heads, _, width = operand.dim
        row_stride = operand.stride[2]
        offset = self._origin(name, sequence.index) + rows.start * row_stride
        dim = (heads, rows.stop - rows.start, width)
        return self.buffers.view(operand, dim, operand.stride[1:], offset)

    def keys(self, name: str, sequence: _Sequence) -> torch.Tensor:
        """K or V: [H, keys of the sequence, D]. Pages without one of them are not looked up."""
        table = _table(self.facts, name)
        if table is None or sequence.key_count == 0:
            return self.rows(name, sequence, sequence.keys).to(self.dtype)
        operand: Operand = getattr(self.facts, name)
        _, heads, size, width = operand.dim
        first, last = sequence.keys.start // size, -(-sequence.keys.stop // size)
        indices = self._pages(table, sequence.index, slice(first, last), operand.dim[0])
        pages = self.buffers.view(operand, operand.dim, operand.stride)[indices]
        start = sequence.keys.start - first * size
        rows = pages.transpose(0, 1).reshape(heads, -1, width)
        return rows[:, start : start + sequence.key_count].to(self.dtype)

    def _pages(self, table: Operand, batch: int, pages: slice, pool: int) -> torch.Tensor:
        """Page indices from one row of a table; ValueError for one outside the pool."""
        step = table.stride[2]
        offset = batch * table.stride[0] + pages.start * step
        indices = self.buffers.view(table, (pages.stop - pages.start,), (step,), offset).long()
        wrong = (indices < 0) | (indices >= pool)
        if bool(wrong.any()):
            # a negative index would silently count from the pool's end
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"page table {table.name!r}, uid {table.uid}: page {pages.start + at} of batch "
                f"{batch} is {int(indices[at])}, the pool has {pool} pages"
            )
        return indices

    def scores_shaped(self, operand: Operand, sequence: _Sequence, rows: slice) -> torch.Tensor:
        """The view [H_q, rows, keys] of a [B, H_q, S_q, S_kv] operand; extents 1 broadcast."""
        batch, head, row, key = _broadcast_strides(operand)
        dim = (self.facts.h_q, rows.stop - rows.start, sequence.key_count)
        offset = sequence.index * batch + rows.start * row + sequence.keys.start * key
        return self.buffers.view(operand, dim, (head, row, key), offset)

    def key_shaped(self, operand: Operand, sequence: _Sequence) -> torch.Tensor:
        """The view [keys] of a [B, 1, 1, S_kv] operand; extents 1 broadcast."""
        batch, _, _, key = _broadcast_strides(operand)
        offset = sequence.index * batch + sequence.keys.start * key
        return self.buffers.view(operand, (sequence.key_count,), (key,), offset)

    def tile_bits(self, operand: Operand, sequence: _Sequence) -> torch.Tensor:
        """A block mask's bits, [H_q, row tiles, 8 * bytes] booleans, least significant first."""
        import torch

        batch, head, row, byte = _broadcast_strides(operand)
        dim = (self.facts.h_q, operand.dim[2], operand.dim[3])
        tiles = self.buffers.view(operand, dim, (head, row, byte), sequence.index * batch)
        weights = 1 << torch.arange(8, device=tiles.device)
        return ((tiles.unsqueeze(-1) & weights) != 0).flatten(-2)


def _broadcast_strides(operand: Operand) -> tuple[int, ...]:
    """Strides with 0 along axes of extent 1, which hold for every index."""
    pairs = zip(operand.dim, operand.stride, strict=True)
    return tuple(0 if extent == 1 else stride for extent, stride in pairs)


@dataclass(frozen=True)
class _Softmax:
    """p: [H_q, rows, keys]; row_max and row_sum, the sink in both: [H_q, rows, 1]."""

    p: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor


class _Attention:
    """The mathematics of one run."""

    def __init__(self, facts: SdpaFacts, memory: _Memory) -> None:
        self.facts = facts
        self.memory = memory
        self.dtype = memory.dtype
        self.matmul_dtype = _matmul_dtype(memory.dtype)
        self.score_scale = self._score_scale()
        self.sink = memory.whole(facts.sink)
        self.o_scale = memory.product(facts.scale_s, facts.descale_s, facts.descale_v)
        self.store_scale = memory.product(facts.scale_o)
        self.drop_scale = memory.product(facts.dropout.scale if facts.dropout else None)
        # running maxima of what the caller asked for
        self.amax: dict[str, torch.Tensor] = {}

    def _score_scale(self) -> torch.Tensor | float:
        """attn_scale with the dequantization of Q and K folded in."""
        facts, scale = self.facts, self.facts.attn_scale
        base: torch.Tensor | float = 1.0
        if facts.attn_scale_prefolded:
            # Q carries scale * log2(e): its scores are in bits
            base = 1.0 / LOG2_E
        elif scale.value is not None:
            base = scale.value
        elif scale.operand is not None:
            base = self.memory.product(scale.operand)
        return base * self.memory.product(facts.descale_q, facts.descale_k)

    def run(self) -> None:
        """Every sequence, then the maxima over all of them."""
        import torch

        facts = self.facts
        for sequence in self.memory.sequences():
            k = self.memory.keys("k", sequence)
            v = self.memory.keys("v", sequence)
            for rows in self._chunks(sequence):
                self._attend(sequence, rows, k, v)
            self._blank(sequence)
        for name in ("amax_s", "amax_o"):
            operand = getattr(facts, name)
            if operand is not None:
                self.memory.fill(operand, self.amax.get(name, torch.zeros(())))

    def _chunks(self, sequence: _Sequence) -> Iterator[slice]:
        """Query rows in pieces whose scores fit the budget, one row at least."""
        row_bytes = self.facts.h_q * max(sequence.key_count, 1) * self.dtype.itemsize
        step = max(1, _SCORE_BYTES // row_bytes)
        for start in range(0, sequence.len_q, step):
            yield slice(start, min(start + step, sequence.len_q))

    def _attend(self, sequence: _Sequence, rows: slice, k: torch.Tensor, v: torch.Tensor) -> None:
        """One chunk of rows: scores, softmax, output, and what is stored of them."""
        softmax = self._softmax(self._scores(sequence, rows, k))
        self._note("amax_s", softmax.p)
        p = self._drop(sequence, rows, softmax.p)
        output = self._weighted(p, v) * self.o_scale
        self._note("amax_o", output.abs())
        self._store(sequence, rows, output)
        self._store_statistics(sequence, rows, softmax)

    # ---- scores

    def _grouped(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [H_q, rows, x] times b [H, x, y], each head of b serving H_q / H heads of a."""
        heads, rows, width = a.shape
        stacked = a.reshape(b.shape[0], heads // b.shape[0] * rows, width)
        product = stacked.to(self.matmul_dtype) @ b.to(self.matmul_dtype)
        return product.to(self.dtype).reshape(heads, rows, b.shape[2])

    def _scores(self, sequence: _Sequence, rows: slice, k: torch.Tensor) -> torch.Tensor:
        """[H_q, rows, keys]: scaled scores, bias and ALiBi added, hidden keys at -inf."""
        import torch

        facts, memory = self.facts, self.memory
        q = memory.rows("q", sequence, rows).to(self.dtype)
        scores = self._grouped(q, k.mT) * self.score_scale
        row = torch.arange(rows.start, rows.stop, device=k.device).view(-1, 1)
        key = torch.arange(sequence.keys.start, sequence.keys.stop, device=k.device)
        if facts.bias is not None:
            scores = scores + memory.scores_shaped(facts.bias, sequence, rows).to(self.dtype)
        if facts.alibi:
            slopes = torch.tensor(alibi_slopes(facts.h_q), dtype=self.dtype, device=k.device)
            # plain indices: the alignment of the band does not move the diagonal of ALiBi
            scores = scores + slopes.view(-1, 1, 1) * (key - row)
        visible = self._in_band(sequence, row, key)
        if facts.kv_mask is not None:
            values = memory.key_shaped(facts.kv_mask, sequence)
            if facts.kv_mask.dtype is DType.BOOLEAN:
                visible = visible & values
            else:
                scores = scores + values.to(self.dtype)
        if facts.block_mask is not None:
            bits = memory.tile_bits(facts.block_mask, sequence)
            row_tiles, key_tiles = row.view(-1) // _BLOCK_MASK_TILE, key // _BLOCK_MASK_TILE
            visible = visible & bits[:, row_tiles][:, :, key_tiles]
        # filled, not added: whatever a hidden key's score is, NaN too, it is gone
        return scores.masked_fill(~visible, -math.inf)

    def _in_band(self, sequence: _Sequence, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[rows, keys]: the band of the contract, with this sequence's own lengths."""
        band = self.facts.band
        diagonal = row
        if band.alignment == "BOTTOM_RIGHT":
            diagonal = row + (sequence.len_kv - sequence.len_q)
        visible = (key >= 0) & (row >= 0)
        if band.right is not None:
            visible = visible & (key <= diagonal + band.right)
        if band.left is not None:
            visible = visible & (key > diagonal - band.left)
        return visible

    # ---- softmax and output

    def _softmax(self, scores: torch.Tensor) -> _Softmax:
        """The softmax over keys; the sink takes part in maximum and sum, and has no V."""
        import torch

        if scores.shape[-1]:
            row_max = scores.amax(-1, keepdim=True)
        else:
            row_max = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        sink = None if self.sink is None else self.sink.reshape(-1, 1, 1)
        if sink is not None:
            row_max = torch.maximum(row_max, sink)
        # a keyless row's maximum is -inf: shifting by it would make NaN of -inf - -inf
        shift = torch.where(row_max == -math.inf, 0.0, row_max)
        weights = torch.exp(scores - shift)
        row_sum = weights.sum(-1, keepdim=True)
        if sink is not None:
            row_sum = row_sum + torch.exp(sink - shift)
        p = weights / torch.where(row_sum == 0, 1.0, row_sum)
        return _Softmax(p, row_max, row_sum)

    def _drop(self, sequence: _Sequence, rows: slice, p: torch.Tensor) -> torch.Tensor:
        """Dropout by the caller's mask and scale."""
        import torch

        dropout = self.facts.dropout
        if dropout is None or dropout.mask is None:
            return p
        kept = self.memory.scores_shaped(dropout.mask, sequence, rows).to(self.dtype)
        # the mask of a hidden key is nobody's value
        return torch.where(p == 0, 0.0, p * kept * self.drop_scale)

    def _weighted(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[H_q, rows, D_v]: the sum of V weighted by P, where a weight of zero means no term.

        A matrix product alone would spread a NaN or Inf of V into rows that do not see its key,
        as 0 x NaN.
        """
        import torch

        finite = torch.isfinite(v)
        if bool(finite.all()):
            return self._grouped(p, v)
        output = self._grouped(p, torch.where(finite, v, 0.0))
        seen = (p != 0).to(self.dtype)
        for value, where in ((math.inf, v == math.inf), (-math.inf, v == -math.inf)):
            reached = self._grouped(seen, where.to(self.dtype)) > 0
            output = torch.where(reached, output + value, output)
        reached = self._grouped(seen, torch.isnan(v).to(self.dtype)) > 0
        return output.masked_fill(reached, math.nan)

    # ---- writing

    def _note(self, name: str, values: torch.Tensor) -> None:
        """Take values into a running maximum; a NaN of a live row stays in it."""
        import torch

        if getattr(self.facts, name) is None or not values.numel():
            return
        largest = values.amax()
        so_far = self.amax.get(name)
        self.amax[name] = largest if so_far is None else torch.maximum(so_far, largest)

    def _store(self, sequence: _Sequence, rows: slice, output: torch.Tensor) -> None:
        """O in its own type; FP8 saturates, which a cast alone does not."""
        target = self.memory.rows("o", sequence, rows)
        scaled = output * self.store_scale
        dtype = self.facts.o.dtype
        if dtype.is_fp8:
            scaled = scaled.clamp(-dtype.max_finite, dtype.max_finite)
        target.copy_(scaled.to(target.dtype))

    def _store_statistics(self, sequence: _Sequence, rows: slice, softmax: _Softmax) -> None:
        """Stats = max + ln(sum), in bits when asked; the other two stay natural."""
        facts, row_max, row_sum = self.facts, softmax.row_max, softmax.row_sum
        stats = row_max + row_sum.log()
        values = {
            "stats": stats * LOG2_E if facts.stats_use_log2 else stats,
            "score_max": row_max,
            "score_sum_exp": row_sum,
        }
        for name, value in values.items():
            if getattr(facts, name) is not None:
                self.memory.rows(name, sequence, rows).copy_(value)

    def _blank(self, sequence: _Sequence) -> None:
        """Rows past the sequence: those of a row without keys when dense, nothing when packed."""
        blanks = {"o": 0.0, "stats": -math.inf, "score_max": -math.inf, "score_sum_exp": 0.0}
        rows = slice(sequence.len_q, self.facts.s_q)
        for name, value in blanks.items():
            operand = getattr(self.facts, name)
            if operand is not None and operand.ragged is None and rows.start < rows.stop:
                self.memory.rows(name, sequence, rows).fill_(value)

"""What decode kernels share: the problem's arguments, finished rows, and joining partial results.

A row's sums are relative to a reference exponent: acc_O = sum of 2^(s - reference) V and
row_sum = sum of 2^(s - reference), so partial results join by their references.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from cudnn_frost.kernels.common.sequences import Lengths, Sequences, read_offset
from cudnn_frost.kernels.common.softmax import LOG2_E
from cudnn_frost.kernels.configs.decode_sm90 import (
    O_TYPES,
    ROW_STATE,
    SLOTS_PER_CHUNK,
    DecodeExtents,
    DecodeForms,
    DecodePointers,
    DecodeSm90Config,
    DecodeStrides,
)
from cudnn_frost.vocab import DType

ELEMENT = {
    DType.HALF: cutlass.Float16,
    DType.BFLOAT16: cutlass.BFloat16,
    DType.FP8_E4M3: cutlass.Float8E4M3FN,
    DType.FP8_E5M2: cutlass.Float8E5M2,
    DType.INT32: Int32,
    DType.FLOAT: Float32,
}
COMBINE_WARPS = 4
_ANY = 1 << 30

# the host arguments of DecodeArgs with their device types
HostPointers = NamedTuple("HostPointers", [(n, cute.Pointer) for n in DecodePointers._fields])
HostExtents = NamedTuple("HostExtents", [(n, Int32) for n in DecodeExtents._fields])
HostStrides = NamedTuple("HostStrides", [(n, Int64) for n in DecodeStrides._fields])
HostForms = NamedTuple("HostForms", [(n, Int32) for n in DecodeForms._fields])


class Row(NamedTuple):
    """A packed row: its query and query head, and whether that query exists in its sequence."""

    query: Int32
    head: Int32
    is_live: Boolean


@dataclass(frozen=True)
class Problem:
    """A launch's arguments, as both kernels read them."""

    pointers: HostPointers
    extents: HostExtents
    strides: HostStrides
    forms: HostForms
    stats_scale: Float32
    num_chunks: Int32
    num_m_blocks: Int32

    def group(self) -> Int32:
        """Query heads of a K head, which is how many packed rows a query has."""
        return self.extents.num_heads_q // self.extents.num_heads_k

    def sequences(self, tile_n: int) -> Sequences:
        p, e, f = self.pointers, self.extents, self.forms
        return Sequences(
            e.batch,
            e.num_heads_k,
            Lengths(p.seqlen_q, f.seqlen_q, f.seqlen_q_words, e.seqlen_q),
            Lengths(p.seqlen_k, f.seqlen_k, f.seqlen_k_words, e.seqlen_k),
            f.left,
            f.right,
            f.bottom_right,
            tile_n,
        )

    @cute.jit
    def row(self, packed: Int32, head_k: Int32, len_q: Int32) -> Row:
        group = self.group()
        query = packed // group
        return Row(query, head_k * group + packed % group, query < len_q)


@cute.jit
def load_scalar(pointer: cute.Pointer) -> Float32:
    """The number there, 1 where there is none."""
    value = Float32(1.0)
    if pointer.toint() != 0:
        value = cute.make_tensor(pointer, cute.make_layout(1))[0]
    return value


@cute.jit
def operand_start(
    offsets: cute.Pointer, width: Int32, multiplier: Int64, stride: Int64, batch: Int32
) -> Int64:
    """Where a sequence of an operand starts, in elements."""
    start = Int64(batch) * stride
    if offsets.toint() != 0:
        start = read_offset(offsets, width, batch, multiplier)
    return start


@dataclass(frozen=True)
class RowWriter:
    """Writes finished rows of one sequence: O, Stats and the maxima.

    descale: what acc_O / row_sum is multiplied by; the maximum of |O| is taken then, `scale_o`
    applied after it.
    """

    problem: Problem
    o_start: Int64
    stats_start: Int64
    descale: Float32
    scale_o: Float32
    config: Constexpr[DecodeSm90Config]

    @classmethod
    def make(cls, problem: Problem, batch: Int32, config: DecodeSm90Config) -> "RowWriter":
        p, s, f = problem.pointers, problem.strides, problem.forms
        descale, scale_o = Float32(1.0), Float32(1.0)
        if config.is_fp8:
            descale = load_scalar(p.descale_v) * load_scalar(p.scale_s) * load_scalar(p.descale_s)
            scale_o = load_scalar(p.scale_o)
        return cls(
            problem,
            operand_start(p.o_offsets, f.o_offset_words, s.o_multiplier, s.o_batch, batch),
            operand_start(
                p.stats_offsets, f.stats_offset_words, s.stats_multiplier, s.stats_batch, batch
            ),
            descale,
            scale_o,
            config,
        )

    @cute.jit
    def finish(self, row: Row, reference: Float32, row_sum: Float32) -> tuple[Float32, Float32]:
        """(what acc_O is multiplied by, log-sum-exp in base 2) with the sink; 0 without a key."""
        has_key = row_sum != 0.0
        lse = reference + cute.math.log2(row_sum, True) if has_key else -Float32.inf
        multiplier = cute.arch.rcp_approx(row_sum) if has_key else Float32(0.0)
        sink = self.problem.pointers.sink
        if sink.toint() != 0:
            extra = Float32(-Float32.inf)
            if row.head < self.problem.extents.num_heads_q:
                extra = (sink + row.head * self.problem.strides.sink_head).load() * LOG2_E
            largest = cute.arch.fmax(lse, extra)
            shift = Float32(0.0) if largest == -Float32.inf else largest
            both = cute.math.exp2(lse - shift, True) + cute.math.exp2(extra - shift, True)
            lse = shift + cute.math.log2(both, True)
            multiplier = cute.math.exp2(reference - lse, True) if has_key else Float32(0.0)
        return multiplier, lse

    @cute.jit
    def store(self, row: Row, column: Int32, values: cute.Tensor) -> None:
        """Neighbouring columns of a row of O, in float; a packed O has no row that is not live."""
        problem = self.problem
        pointer, strides = problem.pointers.o, problem.strides
        end = problem.extents.seqlen_q if pointer_is_null(problem.pointers.o_offsets) else Int32(0)
        is_stored = (row.is_live or row.query < end) and column < problem.extents.head_dim_v
        if is_stored:
            offset = self.o_start + row.query * strides.o_row + row.head * strides.o_head + column
            count = cutlass.const_expr(cute.size(values))
            if cutlass.const_expr(self.config.is_fp8):
                for i in cutlass.range_constexpr(len(O_TYPES)):
                    if problem.forms.o_type == i:
                        _store(pointer, ELEMENT[O_TYPES[i]], offset, count, values)
            else:
                _store(pointer, ELEMENT[self.config.o_dtype], offset, count, values)

    @cute.jit
    def store_stats(self, row: Row, lse: Float32) -> None:
        problem = self.problem
        pointers, strides = problem.pointers, problem.strides
        if pointers.stats.toint() != 0:
            is_dense = pointer_is_null(pointers.stats_offsets)
            end = problem.extents.seqlen_q if is_dense else Int32(0)
            if row.is_live or row.query < end:
                stats = cute.make_tensor(pointers.stats, cute.make_layout(_ANY))
                offset = self.stats_start + row.query * strides.stats_row
                offset += row.head * strides.stats_head
                value = lse * problem.stats_scale if row.is_live else -Float32.inf
                (stats.iterator + offset).store(value)

    @cute.jit
    def store_amax(self, amax_o: Float32, amax_s: Float32) -> None:
        """Join a warp's maxima into the outputs, which were reset before."""
        pointers = self.problem.pointers
        for pointer, value in ((pointers.amax_o, amax_o), (pointers.amax_s, amax_s)):
            if pointer.toint() != 0:
                largest = cute.arch.warp_reduction_max(value)
                if cute.arch.lane_idx() == 0:
                    cute.arch.atomic_fmax(pointer, largest, sign_bit=False)


def pointer_is_null(pointer: cute.Pointer) -> Boolean:
    return pointer.toint() == 0


@cute.jit
def _store(pointer: cute.Pointer, element, offset: Int64, count: int, values: cute.Tensor) -> None:
    typed = cute.recast_ptr(pointer, dtype=element) + cute.assume(offset, divby=count)
    cute.make_tensor(typed, cute.make_layout(count)).store(values.load().to(element))


class PartialRow(NamedTuple):
    """Where a packed row's partial results are in the workspace, in floats."""

    o: Int64
    state: Int64


class Combine:
    """Joins the partial results of divided sequences; a warp for each packed row."""

    def __init__(self, config: DecodeSm90Config):
        self.config = config
        self.columns = config.head_dim_v // 32

    def partial_row(self, problem: Problem, chunk: Int32, slot: Int32, row: Int32) -> PartialRow:
        """slot: 0 for the sequence that was begun before this chunk, 1 for one that ends later."""
        rows = problem.num_m_blocks * self.config.tile_m
        total = Int64(problem.num_chunks * SLOTS_PER_CHUNK) * rows
        index = Int64(chunk * SLOTS_PER_CHUNK + slot) * rows + row
        return PartialRow(
            index * self.config.head_dim_v, total * self.config.head_dim_v + index * ROW_STATE
        )

    @cute.jit
    def launch(self, problem: Problem, stream):
        num_rows = problem.extents.seqlen_q * problem.group()
        self.kernel(problem).launch(
            grid=(
                problem.extents.batch * problem.extents.num_heads_k,
                cutlass.min(cute.ceil_div(num_rows, COMBINE_WARPS), 64),
                1,
            ),
            block=[32 * COMBINE_WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, problem: Problem):
        block, part, _ = cute.arch.block_idx()
        _, parts, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        heads = problem.extents.num_heads_k
        batch, head = block // heads, block % heads
        sequences = problem.sequences(self.config.tile_n)
        keys = sequences.keys(batch)
        chunk = cute.ceil_div(sequences.total_tiles(), problem.num_chunks)
        start = sequences.tiles_before(batch) + head * keys.n_tiles
        first, last = start // chunk, (start + keys.n_tiles - 1) // chunk
        cute.arch.griddepcontrol_wait()
        if last > first:
            writer = RowWriter.make(problem, batch, self.config)
            amax_o, amax_s = Float32(0.0), Float32(0.0)
            num_rows = problem.extents.seqlen_q * problem.group()
            step = parts * COMBINE_WARPS
            for packed in cutlass.range(part * COMBINE_WARPS + warp, num_rows, step, unroll=1):
                row = problem.row(packed, head, keys.len_q)
                row_o, row_s = self._row(problem, writer, row, packed, first, last)
                amax_o, amax_s = cute.arch.fmax(amax_o, row_o), cute.arch.fmax(amax_s, row_s)
            if cutlass.const_expr(self.config.is_fp8):
                writer.store_amax(amax_o, amax_s)

    @cute.jit
    def _row(self, problem: Problem, writer: RowWriter, row: Row, packed, first, last):
        """One row from its parts in chunks first..last; (max|O| of this lane, max P)."""
        workspace = cute.make_tensor(problem.pointers.workspace, cute.make_layout(_ANY))
        column = cute.arch.lane_idx() * self.columns
        acc = cute.make_rmem_tensor(self.columns, Float32)
        acc.fill(0.0)
        reference, row_sum = Float32(-Float32.inf), Float32(0.0)
        if row.is_live:
            for chunk in cutlass.range(first, last + 1, unroll=2):
                slot = Int32(1) if chunk == first else Int32(0)
                part = self.partial_row(problem, chunk, slot, packed)
                state = cute.make_tensor(workspace.iterator + part.state, cute.make_layout(2))
                offset = cute.assume(part.o + column, divby=self.columns)
                values = cute.make_tensor(
                    workspace.iterator + offset, cute.make_layout(self.columns)
                ).load()
                larger = cute.arch.fmax(reference, state[0])
                shift = Float32(0.0) if larger == -Float32.inf else larger
                old = cute.math.exp2(reference - shift, True)
                new = cute.math.exp2(state[0] - shift, True)
                row_sum = row_sum * old + state[1] * new
                acc.store(acc.load() * old + values * new)
                reference = larger
        multiplier, lse = writer.finish(row, reference, row_sum)
        acc.store(acc.load() * (multiplier * writer.descale))
        amax_o = _largest(acc)
        acc.store(acc.load() * writer.scale_o)
        writer.store(row, column, acc)
        if cute.arch.lane_idx() == 0:
            writer.store_stats(row, lse)
        return amax_o, peak(self.config, reference, lse, row_sum)


@cute.jit
def peak(config: DecodeSm90Config, reference: Float32, lse: Float32, row_sum: Float32) -> Float32:
    """The largest probability of a row, 0 without a key."""
    largest = cute.math.exp2(reference + config.p_shift - lse, True)
    return largest if row_sum != 0.0 else Float32(0.0)


@cute.jit
def _largest(values: cute.Tensor) -> Float32:
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[i], -values[i]))
    return largest

"""Configurations of the Hopper decode kernel, and the order of its host arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from cudnn_frost.vocab import KNOWN_TARGETS, Decline, DeclineCode, DType

from .signature import Operand, Signature

WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64
SMEM_ALIGNMENT = 1024
MBARRIER_BYTES = 8
# a bound that no row reaches; sums of three such values fit 32 bits
UNBOUNDED = 1 << 29
# slots a thread-block group leaves partial results in: of its first and of its last sequence
SLOTS_PER_CHUNK = 2
# running maximum and sum of a row, beside its partial O
ROW_STATE = 2
# forms of per-batch lengths
LENGTH_FORMS = {"none": 0, "seq_len": 1, "cu_seq_len": 2}
# what `o_type` numbers
O_TYPES = (DType.HALF, DType.BFLOAT16, DType.FP8_E4M3, DType.FP8_E5M2)
PAGE_BOXES = (8, 16, 64)

_HALF = (DType.HALF, DType.BFLOAT16)
_FP8 = (DType.FP8_E4M3, DType.FP8_E5M2)
# V in 16 bits, being read and being written
_VALUE_STAGES = 2
# setmaxnreg values (producer, converter, consumer) by number of consumer warpgroups
_REGISTERS = {
    False: {1: (120, 0, 240), 2: (56, 0, 224)},
    True: {1: (104, 128, 240), 2: (40, 64, 200)},
}
# addresses, loop state, softmax state and mask limits beside the tiles, per consumer thread
_SCALAR_REGISTERS = 40


class DecodePointers(NamedTuple):
    """Device addresses as integers; 0 for an operand that the declaration lacks.

    k_table, v_table: page indices. seqlen_*: lengths or their prefix sums. *_offsets: where packed
    sequences start. amax_*: maxima to be written. workspace: partial results of divided sequences.
    """

    q: int
    k: int
    v: int
    o: int
    stats: int
    sink: int
    k_table: int
    v_table: int
    seqlen_q: int
    seqlen_k: int
    q_offsets: int
    o_offsets: int
    stats_offsets: int
    descale_q: int
    descale_k: int
    descale_v: int
    descale_s: int
    scale_s: int
    scale_o: int
    amax_s: int
    amax_o: int
    workspace: int


class DecodeExtents(NamedTuple):
    """Int32. seqlen_k: the most keys a sequence can have. *_pages, *_rows: the pools' extents.

    Dense K and V are pools of `batch` pages that hold a whole sequence each.
    """

    batch: int
    num_heads_q: int
    num_heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim_qk: int
    head_dim_v: int
    k_pages: int
    k_rows: int
    v_pages: int
    v_rows: int


class DecodeStrides(NamedTuple):
    """Int64, in elements; `batch` of K and V is the page. *_multiplier: elements per offset."""

    q_batch: int
    q_head: int
    q_row: int
    k_batch: int
    k_head: int
    k_row: int
    v_batch: int
    v_head: int
    v_row: int
    o_batch: int
    o_head: int
    o_row: int
    stats_batch: int
    stats_head: int
    stats_row: int
    k_table_batch: int
    k_table_page: int
    v_table_batch: int
    v_table_page: int
    q_multiplier: int
    o_multiplier: int
    stats_multiplier: int
    sink_head: int


class DecodeForms(NamedTuple):
    """Int32. seqlen_*: a value of LENGTH_FORMS. *_words: 32-bit words from one integer to the next.

    left, right: row i sees keys i + shift + left <= j <= i + shift + right, with shift =
    seqlen_k - seqlen_q of the sequence where bottom_right is 1; +-UNBOUNDED is no bound.
    o_type: index into O_TYPES.
    """

    seqlen_q: int
    seqlen_q_words: int
    seqlen_k: int
    seqlen_k_words: int
    q_offset_words: int
    o_offset_words: int
    stats_offset_words: int
    left: int
    right: int
    bottom_right: int
    o_type: int


class DecodeArgs(NamedTuple):
    """The compiled function's positional arguments, in order, with nested tuples as given.

    softmax_scale: Float32, multiplies Q K^T; any sign, zero included.
    stats_scale: Float32, what turns a base-2 log-sum-exp into the caller's Stats.
    num_chunks: Int32, parts that all keys together are divided into, one for each group of thread
        blocks; a sequence is divided where a part ends, unless `divide` is 0.
    divide: Int32, 1 or 0.
    stream: a CUstream as an integer.
    """

    pointers: DecodePointers
    extents: DecodeExtents
    strides: DecodeStrides
    forms: DecodeForms
    softmax_scale: float
    stats_scale: float
    num_chunks: int
    divide: int
    stream: int


@dataclass(frozen=True, slots=True)
class DecodeSm90Config:
    """One compiled variant.

    dtype: element type of Q, K and V.
    o_dtype: element type of O; NOT_SET where `o_type` chooses it at launch (8-bit operands).
    head_dim_qk, head_dim_v: widest head dimensions served; narrower tensors are zero-filled.
    tile_m, tile_n: packed query rows and keys of a block; 64 rows to a consumer warpgroup.
    num_stages: K blocks, and V blocks, in flight.
    page_box: keys that one copy brings; divides the page size, or any where K and V are dense.
    """

    dtype: DType
    o_dtype: DType
    head_dim_qk: int = 128
    head_dim_v: int = 128
    tile_m: int = 64
    tile_n: int = 128
    num_stages: int = 3
    page_box: int = 16

    @property
    def is_fp8(self) -> bool:
        """8-bit K and V: V is converted to 16 bits on the way, by a warpgroup of its own."""
        return self.dtype in _FP8

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def num_threads(self) -> int:
        return WARPGROUP_THREADS * (1 + self.is_fp8 + self.num_consumers)

    @property
    def num_value_stages(self) -> int:
        """Blocks of V in 16 bits; 0 where V arrives so."""
        return _VALUE_STAGES if self.is_fp8 else 0

    @property
    def p_shift(self) -> int:
        """P is 2^(s - m + p_shift): half precision holds small ones without losing bits."""
        return 10 if self.is_fp8 else 0

    @property
    def num_mbarriers(self) -> int:
        """A full and an empty barrier for each stage of K, of V and of V in 16 bits."""
        return 2 * (2 * self.num_stages + self.num_value_stages)

    def smem_bytes(self) -> int:
        """Shared memory of a block: barriers, Q, K stages, V stages, V in 16 bits."""
        q = self.tile_m * self.head_dim_qk
        k_and_v = self.num_stages * self.tile_n * (self.head_dim_qk + self.head_dim_v)
        barriers = -(-self.num_mbarriers * MBARRIER_BYTES // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
        values = self.num_value_stages * self.tile_n * self.head_dim_v * DType.HALF.bytes
        return barriers + (q + k_and_v) * self.dtype.bytes + values

    def registers(self) -> tuple[int, int, int]:
        """Per thread after redistribution: (producer, converter or 0, consumer)."""
        return _REGISTERS[self.is_fp8][self.num_consumers]

    def tile_registers(self) -> int:
        """Registers a consumer thread keeps tiles in: acc_S, P at 16 bits, acc_O."""
        acc_s = WARPGROUP_ROWS * self.tile_n // WARPGROUP_THREADS
        acc_o = WARPGROUP_ROWS * self.head_dim_v // WARPGROUP_THREADS
        return acc_s + acc_s // 2 + acc_o

    def workspace_bytes(self, num_chunks: int, num_m_blocks: int) -> int:
        """Partial O, maximum and sum of each row in each slot, in float."""
        rows = num_chunks * SLOTS_PER_CHUNK * num_m_blocks * self.tile_m
        return rows * (self.head_dim_v + ROW_STATE) * DType.FLOAT.bytes

    def infeasible(self) -> Decline | None:
        """The first reason this kernel cannot be built so, None when it can."""
        if self.dtype not in (*_HALF, *_FP8):
            return _decline("dtype", self.dtype, "HALF, BFLOAT16, FP8_E4M3 or FP8_E5M2")
        wanted = DType.NOT_SET if self.is_fp8 else self.dtype
        if self.o_dtype is not wanted:
            return _decline("o_dtype", self.o_dtype, str(wanted))
        step = 32 if self.is_fp8 else 16
        if not (64 <= self.head_dim_qk <= 256 and self.head_dim_qk % step == 0):
            return _decline("head_dim_qk", self.head_dim_qk, f"a multiple of {step} from 64 to 256")
        # a warp's lanes, and a warpgroup's threads, share a row of V evenly
        if self.head_dim_v not in (64, 128, 256):
            return _decline("head_dim_v", self.head_dim_v, "64, 128 or 256")
        if self.tile_m not in (WARPGROUP_ROWS * count for count in (1, 2)):
            return _decline("tile_m", self.tile_m, "64 or 128")
        if self.page_box not in PAGE_BOXES:
            return _decline("page_box", self.page_box, "8, 16 or 64")
        if self.tile_n not in (64, 128):
            return _decline("tile_n", self.tile_n, "64 or 128")
        if self.num_stages < 2:
            return _decline("num_stages", self.num_stages, "2 or more")
        consumer = self.registers()[-1]
        if self.tile_registers() + _SCALAR_REGISTERS > consumer:
            return _decline(
                "registers",
                f"{self.tile_registers()} for tiles and {_SCALAR_REGISTERS} beside them",
                f"{consumer} a thread with {self.num_consumers} consumer warpgroups",
            )
        limit = KNOWN_TARGETS["sm90"].smem_per_block
        if self.smem_bytes() > limit:
            return _decline("shared_memory", f"{self.smem_bytes()} bytes", f"{limit} bytes")
        return None

    def signature(self) -> Signature:
        """The operands a kernel of this configuration takes, absent ones included."""
        element = {"q": self.dtype, "k": self.dtype, "v": self.dtype, "o": self.o_dtype}
        operands = [
            Operand(name, element[name], 16)
            if name in element
            else Operand(name, DType.INT32 if name in _INTEGERS else DType.FLOAT, 4)
            for name in DecodePointers._fields
            if name != "workspace"
        ]
        return Signature.of(operands)

    def key(self) -> str:
        """Stable text; equal exactly when the configurations are."""
        values = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"decode_sm90({values})"


_INTEGERS = frozenset(
    ("k_table", "v_table", "seqlen_q", "seqlen_k", "q_offsets", "o_offsets", "stats_offsets")
)

# flavor -> (tile_n, stages by tile_m) for 16-bit operands and for 8-bit ones
_SHAPES: dict[bool, dict[tuple[int, int], tuple[int, dict[int, int]]]] = {
    False: {
        (64, 64): (128, {64: 6, 128: 6}),
        (128, 128): (128, {64: 3, 128: 3}),
        (192, 128): (64, {64: 5, 128: 4}),
        (256, 256): (64, {64: 3, 128: 2}),
    },
    True: {
        (64, 64): (128, {64: 8, 128: 8}),
        (128, 128): (128, {64: 4, 128: 4}),
        (192, 128): (64, {64: 8, 128: 7}),
        (256, 256): (64, {64: 4, 128: 4}),
    },
}


def page_box(page_sizes: Iterable[int]) -> int:
    """The widest copy that no page of these sizes cuts; the narrowest where there is none."""
    sizes = tuple(page_sizes)
    fitting = (box for box in sorted(PAGE_BOXES, reverse=True) if all(s % box == 0 for s in sizes))
    return next(fitting, min(PAGE_BOXES))


def config_for(
    dtype: DType, flavor: tuple[int, int], tile_m: int, page_box: int
) -> DecodeSm90Config:
    """The shipped configuration of a flavor and tile."""
    is_fp8 = dtype in _FP8
    tile_n, stages = _SHAPES[is_fp8][flavor]
    o_dtype = DType.NOT_SET if is_fp8 else dtype
    return DecodeSm90Config(
        dtype, o_dtype, *flavor, tile_m, tile_n, num_stages=stages[tile_m], page_box=page_box
    )


def shipped_configs() -> list[DecodeSm90Config]:
    """Every configuration that is shipped."""
    configs = (
        config_for(dtype, flavor, tile_m, page_box)
        for dtype in (*_HALF, *_FP8)
        for flavor in _SHAPES[dtype in _FP8]
        for tile_m in (64, 128)
        for page_box in PAGE_BOXES
    )
    return [config for config in configs if config.infeasible() is None]


def _decline(subject: str, got: object, want: str) -> Decline:
    return Decline(DeclineCode.KERNEL_CONFIG, subject, str(got), want)

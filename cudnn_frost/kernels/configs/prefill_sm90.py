"""Configurations of the Hopper prefill kernel, and the order of its host arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from cudnn_frost.vocab import KNOWN_TARGETS, Decline, DeclineCode, DType

from .signature import Operand, Signature

WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64
SMEM_ALIGNMENT = 1024
MBARRIER_BYTES = 8

# setmaxnreg values (producer, consumer) by number of consumer warpgroups
_REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}
# addresses, loop state, softmax state and mask limits beside the tiles, per consumer thread
_SCALAR_REGISTERS = 40


class PrefillPointers(NamedTuple):
    """Device addresses as integers; `stats` is 0 when the configuration writes none."""

    q: int
    k: int
    v: int
    o: int
    stats: int


class PrefillExtents(NamedTuple):
    """Int32. Head dimensions are the tensors' own, at most the configuration's."""

    batch: int
    num_heads_q: int
    num_heads_k: int
    num_heads_v: int
    seqlen_q: int
    seqlen_k: int
    head_dim_qk: int
    head_dim_v: int


class PrefillStrides(NamedTuple):
    """Int64, in elements. The head-dimension stride is 1; the stats strides are 0 without stats."""

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


class PrefillBand(NamedTuple):
    """Int32. Row i sees keys i + left < j <= i + right; a side without a bound is ignored.

    Causal is right = 0 (top left) or seqlen_k - seqlen_q (bottom right).
    """

    left: int
    right: int


class PrefillArgs(NamedTuple):
    """The compiled function's positional arguments, in order, with nested tuples as given.

    softmax_scale: Float32, multiplies Q K^T; any sign, zero included.
    num_ctas: Int32, thread blocks to run at once (the multiprocessor count).
    stream: a CUstream as an integer.
    """

    pointers: PrefillPointers
    extents: PrefillExtents
    strides: PrefillStrides
    band: PrefillBand
    softmax_scale: float
    num_ctas: int
    stream: int


@dataclass(frozen=True, slots=True)
class PrefillSm90Config:
    """One compiled variant.

    dtype: element type of Q, K, V and O.
    head_dim_qk, head_dim_v: widest head dimensions served; narrower tensors are zero-filled.
    tile_m, tile_n: query rows and keys of a block; 64 query rows to a consumer warpgroup.
    num_stages: K blocks, and V blocks, in flight.
    num_q_stages: Q tiles in flight; with 2, the next tile's Q arrives during the current one.
    left_bound, right_bound: whether the band has that side.
    stats: whether the log-sum-exp is written.
    """

    dtype: DType
    head_dim_qk: int = 128
    head_dim_v: int = 128
    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 2
    num_q_stages: int = 2
    left_bound: bool = False
    right_bound: bool = False
    stats: bool = False

    @property
    def num_consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def num_threads(self) -> int:
        return WARPGROUP_THREADS * (1 + self.num_consumers)

    @property
    def num_mbarriers(self) -> int:
        """A full and an empty barrier for each slab of Q, K stage and V stage."""
        return 2 * (self.num_q_stages * self.num_consumers + 2 * self.num_stages)

    def smem_bytes(self) -> int:
        """Shared memory of a block: barriers, Q stages, O, K stages, V stages."""
        q_and_o = self.tile_m * (self.num_q_stages * self.head_dim_qk + self.head_dim_v)
        k_and_v = self.num_stages * self.tile_n * (self.head_dim_qk + self.head_dim_v)
        barriers = -(-self.num_mbarriers * MBARRIER_BYTES // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
        return barriers + (q_and_o + k_and_v) * self.dtype.bytes

    def registers(self) -> tuple[int, int]:
        """Per thread after redistribution: (producer, consumer)."""
        return _REGISTERS[self.num_consumers]

    def tile_registers(self) -> int:
        """Registers a consumer thread keeps tiles in: acc_S, P at 16 bits, acc_O."""
        acc_s = WARPGROUP_ROWS * self.tile_n // WARPGROUP_THREADS
        acc_o = WARPGROUP_ROWS * self.head_dim_v // WARPGROUP_THREADS
        return acc_s + acc_s // 2 + acc_o

    def infeasible(self) -> Decline | None:
        """The first reason this kernel cannot be built so, None when it can."""
        if self.dtype not in (DType.HALF, DType.BFLOAT16):
            return _decline("dtype", self.dtype, "HALF or BFLOAT16")
        for name in ("head_dim_qk", "head_dim_v"):
            extent = getattr(self, name)
            if not (16 <= extent <= 256 and extent % 16 == 0):
                return _decline(name, extent, "a multiple of 16 from 16 to 256")
        if self.tile_m not in (WARPGROUP_ROWS * count for count in _REGISTERS):
            return _decline("tile_m", self.tile_m, "64, 128 or 192")
        if not (16 <= self.tile_n <= 256 and self.tile_n % 16 == 0):
            return _decline("tile_n", self.tile_n, "a multiple of 16 from 16 to 256")
        if self.num_stages < 2:
            return _decline("num_stages", self.num_stages, "2 or more")
        if self.num_q_stages < 1:
            return _decline("num_q_stages", self.num_q_stages, "1 or more")
        _, consumer = self.registers()
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
        """The operands a kernel of this configuration takes."""
        operands = [Operand(name, self.dtype, 16) for name in ("q", "k", "v", "o")]
        if self.stats:
            operands.append(Operand("stats", DType.FLOAT, 4))
        return Signature.of(operands)

    def key(self) -> str:
        """Stable text; equal exactly when the configurations are."""
        values = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"prefill_sm90({values})"


def shipped_configs() -> list[PrefillSm90Config]:
    """Every configuration that is shipped."""
    return [
        PrefillSm90Config(dtype=dtype, left_bound=left, right_bound=right, stats=stats)
        for dtype in (DType.BFLOAT16, DType.HALF)
        for left in (False, True)
        for right in (False, True)
        for stats in (False, True)
    ]


def _decline(subject: str, got: object, want: str) -> Decline:
    return Decline(DeclineCode.KERNEL_CONFIG, subject, str(got), want)

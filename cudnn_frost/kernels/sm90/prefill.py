"""Forward attention for Hopper: 16-bit operands, dense layouts, a band mask.

Roles. Warpgroup 0 loads: its warp 0 issues every TMA load, its other warps leave. Each further
warpgroup (1, 2 or 3) owns 64 query rows from Q tile to stored O, and takes turns with the others
at issuing matrix products. Registers a thread: the configuration's `registers()`; with two
consumers 128 * 24 + 256 * 240 = 64,512 of 65,536.

Pipelines (full: one arrival and the bytes of the TMA load; empty: one arrival per warp)
  q    num_q_stages slabs per consumer, 4 empty arrivals; released after a tile's last Q K^T
  k    num_stages, 4 * consumers empty arrivals; released when S is complete
  v    num_stages, likewise; released when the product with P is complete
Order of loads, which is the order of use: K(n) Q K(n-1) V(n) K(n-2) V(n-1) ... V(first).

Shared memory: the mbarriers, then at 1,024-byte boundaries sQ and sO in slabs of 64 rows (sO one
for each consumer, sQ num_q_stages), sK and sV with num_stages blocks each. O leaves through sO
by TMA, so rows past seqlen_q and columns past head_dim_v are dropped by the descriptor; rows of
Q, K and V past their extents, and columns past their head dimension, arrive as zeros.

A thread block is persistent: it computes one tile in each round of `TileSchedule`. The loading
role and the consumers derive tile and key range from the same `TileSchedule` and `Band`, so a
tile without keys is skipped by both, and its O = 0 and log-sum-exp = -inf are still written.

Units: extents and offsets in elements; `softmax_scale_log2` = |attn_scale| * log2(e). A negative
or zero attn_scale is folded into Q in shared memory (Q *= sign), where it costs nothing
in the loop and keeps the running maximum a maximum. Stats are natural logarithms.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, nullptr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_frost.kernels.common.band import Band
from cudnn_frost.kernels.common.layouts import (
    ROWS_PER_THREAD,
    acc_column_offset,
    acc_row,
    as_operand_a,
)
from cudnn_frost.kernels.common.schedule import Tile, TileSchedule
from cudnn_frost.kernels.common.softmax import LOG2_E, OnlineSoftmax, scale_rows
from cudnn_frost.kernels.common.turns import Turns
from cudnn_frost.kernels.configs.prefill_sm90 import (
    SMEM_ALIGNMENT,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    PrefillBand,
    PrefillExtents,
    PrefillPointers,
    PrefillSm90Config,
    PrefillStrides,
)
from cudnn_frost.kernels.configs.signature import Signature
from cudnn_frost.vocab import DType

WARPS_PER_WARPGROUP = WARPGROUP_THREADS // 32
VECTOR = 8

_ELEMENT = {DType.HALF: cutlass.Float16, DType.BFLOAT16: cutlass.BFloat16}


# the host arguments of PrefillArgs with their device types
HostPointers = NamedTuple("HostPointers", [(n, cute.Pointer) for n in PrefillPointers._fields])
HostExtents = NamedTuple("HostExtents", [(n, Int32) for n in PrefillExtents._fields])
HostStrides = NamedTuple("HostStrides", [(n, Int64) for n in PrefillStrides._fields])
HostBand = NamedTuple("HostBand", [(n, Int32) for n in PrefillBand._fields])


@dataclass(frozen=True)
class Tma:
    """Copy atoms and coordinate tensors: q, k, v, o as (row, column, head, batch)."""

    atom_q: cute.CopyAtom
    atom_k: cute.CopyAtom
    atom_v: cute.CopyAtom
    atom_o: cute.CopyAtom
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor


@dataclass(frozen=True)
class Scalars:
    """What a block reads besides tensors.

    q_sign: 1, -1 or 0, the sign of attn_scale.
    softmax_scale_log2: |attn_scale| * log2(e), or log2(e) where attn_scale is 0.
    """

    extents: HostExtents
    band: HostBand
    q_sign: Float32
    softmax_scale_log2: Float32


class SmemLayouts(NamedTuple):
    """q: (64, d, slab). k, v: (tile_n, d, stage). o: (64, d, consumer)."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout


@dataclass(frozen=True)
class Smem:
    """The tensors of SmemLayouts."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor


@dataclass(frozen=True)
class Pipelines:
    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


@dataclass(frozen=True)
class Work:
    """The predicate objects every role reads."""

    band: Band
    schedule: TileSchedule


@dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup's operands and state.

    tidx: thread within the warpgroup. mma_*: tiled products. tS*, tO*: their fragments.
    """

    tidx: Int32
    turns: Turns
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor
    acc_O: cute.Tensor
    softmax: OnlineSoftmax


class QTile(NamedTuple):
    """A consumer's 64 query rows: their query block, slab of sQ, and barrier phase."""

    m_block: Int32
    slab: Int32
    phase: Int32


class PrefillSm90:
    """The kernel of one configuration."""

    def __init__(self, config: PrefillSm90Config):
        self.config = config
        self.dtype = _ELEMENT[config.dtype]
        self.num_consumers = config.num_consumers
        self.tile_n = config.tile_n
        self.num_stages = config.num_stages
        self.num_q_slabs = config.num_q_stages * config.num_consumers

    # host builders

    def _smem_layout(self, rows: int, columns: int, count: int) -> cute.ComposedLayout:
        """(rows, columns, count), columns contiguous, swizzled for TMA and wgmma."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))

    def _make_layouts(self) -> SmemLayouts:
        """Static, but made anew on each side: host and device do not share values."""
        config = self.config
        return SmemLayouts(
            self._smem_layout(WARPGROUP_ROWS, config.head_dim_qk, self.num_q_slabs),
            self._smem_layout(self.tile_n, config.head_dim_qk, self.num_stages),
            self._smem_layout(self.tile_n, config.head_dim_v, self.num_stages),
            self._smem_layout(WARPGROUP_ROWS, config.head_dim_v, self.num_consumers),
        )

    def _make_storage(self, layouts: SmemLayouts):
        def tile(layout):
            return cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(layout)], SMEM_ALIGNMENT
            ]

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[Int64, 2 * self.num_q_slabs]
            k_barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            q: tile(layouts.q)
            o: tile(layouts.o)
            k: tile(layouts.k)
            v: tile(layouts.v)

        size, stated = Storage.size_in_bytes(), self.config.smem_bytes()
        assert size == stated, f"shared memory is {size} bytes, smem_bytes() says {stated}"
        return Storage

    def _make_mma(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T from shared memory; O += P V with P in registers."""
        mma_qk = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, self.tile_n),
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, self.config.head_dim_v),
            hopper.OperandSource.RMEM,
        )
        return mma_qk, mma_pv

    def _operand(self, pointer, rows, columns, heads, batch, strides) -> cute.Tensor:
        """(row, column, head, batch); strides (batch, head, row) are multiples of 16 bytes."""
        d_batch, d_head, d_row = [cute.assume(stride, divby=VECTOR) for stride in strides]
        layout = cute.make_layout((rows, columns, heads, batch), stride=(d_row, 1, d_head, d_batch))
        return cute.make_tensor(pointer, layout)

    def _make_tma(self, pointers: HostPointers, e: HostExtents, s: HostStrides) -> Tma:
        layouts = self._make_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q = self._operand(pointers.q, e.seqlen_q, e.head_dim_qk, e.num_heads_q, e.batch, s[0:3])
        k = self._operand(pointers.k, e.seqlen_k, e.head_dim_qk, e.num_heads_k, e.batch, s[3:6])
        v = self._operand(pointers.v, e.seqlen_k, e.head_dim_v, e.num_heads_v, e.batch, s[6:9])
        o = self._operand(pointers.o, e.seqlen_q, e.head_dim_v, e.num_heads_q, e.batch, s[9:12])
        made = []
        for op, tensor, layout in (
            (load, q, layouts.q),
            (load, k, layouts.k),
            (load, v, layouts.v),
            (store, o, layouts.o),
        ):
            tile = (layout.outer.shape[0], layout.outer.shape[1])
            box = tuple(cute.size(extent) for extent in tile)
            made.append(cpasync.make_tiled_tma_atom(op, tensor, layout, box))
        atoms, tensors = [m[0] for m in made], [m[1] for m in made]
        return Tma(*atoms, *tensors)

    def _make_schedule(self, e: HostExtents, num_ctas: Int32) -> TileSchedule:
        config = self.config
        num_m_blocks = cute.ceil_div(e.seqlen_q, config.tile_m)
        num_heads = e.batch * e.num_heads_q
        num_ctas = cutlass.min(num_ctas, num_m_blocks * num_heads)
        if not config.right_bound:
            return TileSchedule.in_order(num_ctas, num_m_blocks, num_heads)
        group = e.num_heads_q // e.num_heads_k
        return TileSchedule.longest(num_ctas, num_m_blocks, num_heads, group)

    def _make_stats(self, pointers: HostPointers, e: HostExtents, s: HostStrides):
        """(row, head, batch) of float32, None when the configuration writes none."""
        if not self.config.stats:
            return None
        layout = cute.make_layout(
            (e.seqlen_q, e.num_heads_q, e.batch),
            stride=(s.stats_row, s.stats_head, s.stats_batch),
        )
        return cute.make_tensor(pointers.stats, layout)

    @cute.jit
    def __call__(
        self,
        pointers: HostPointers,
        extents: HostExtents,
        strides: HostStrides,
        band: HostBand,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """The host entry; its arguments are PrefillArgs."""
        tma = self._make_tma(pointers, extents, strides)
        stats = self._make_stats(pointers, extents, strides)
        schedule = self._make_schedule(extents, num_ctas)
        q_sign = Float32(1.0)
        magnitude = softmax_scale
        if softmax_scale < 0.0:
            q_sign = Float32(-1.0)
            magnitude = -softmax_scale
        if softmax_scale == 0.0:
            q_sign = Float32(0.0)
            magnitude = Float32(1.0)
        scalars = Scalars(extents, band, q_sign, magnitude * LOG2_E)
        self.kernel(tma, stats, scalars, schedule).launch(
            grid=(schedule.num_ctas, 1, 1),
            block=[self.config.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: Tma,
        stats: cute.Tensor | None,
        scalars: Scalars,
        schedule: TileSchedule,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (tma.atom_q, tma.atom_k, tma.atom_v, tma.atom_o):
                cpasync.prefetch_descriptor(atom)
        layouts = self._make_layouts()
        storage = SmemAllocator().allocate(self._make_storage(layouts))
        pipes = self._make_pipelines(storage)
        smem = self._smem_tensors(storage, layouts)
        work = Work(self._make_band(scalars), schedule)
        producer_registers, consumer_registers = self.config.registers()
        if warp_idx < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_idx == 0:
                self.load(tma, smem, pipes, work, scalars)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.mma(tma, stats, smem, pipes, work, scalars)

    # shared by the roles

    def _make_pipelines(self, storage) -> Pipelines:
        config = self.config
        element_bytes = config.dtype.bytes
        num_warps = WARPS_PER_WARPGROUP * self.num_consumers

        def make(barriers, num_stages, consumer_warps, rows, columns):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=num_stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps),
                tx_count=rows * columns * element_bytes,
                defer_sync=True,
            )

        pipes = Pipelines(
            make(
                storage.q_barriers,
                self.num_q_slabs,
                WARPS_PER_WARPGROUP,
                WARPGROUP_ROWS,
                config.head_dim_qk,
            ),
            make(storage.k_barriers, self.num_stages, num_warps, self.tile_n, config.head_dim_qk),
            make(storage.v_barriers, self.num_stages, num_warps, self.tile_n, config.head_dim_v),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return pipes

    def _smem_tensors(self, storage, layouts: SmemLayouts) -> Smem:
        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        return Smem(
            tensor(storage.q, layouts.q),
            tensor(storage.k, layouts.k),
            tensor(storage.v, layouts.v),
            tensor(storage.o, layouts.o),
        )

    def _make_band(self, scalars: Scalars) -> Band:
        config = self.config
        return Band(
            scalars.extents.seqlen_q,
            scalars.extents.seqlen_k,
            scalars.band.left,
            scalars.band.right,
            config.left_bound,
            config.right_bound,
            config.tile_m,
            config.tile_n,
        )

    @staticmethod
    def _tma_blocks(atom, tensor, head, batch, box, smem):
        """(shared memory by stage, global memory by block) of one head, as TMA boxes."""
        blocks = cute.local_tile(tensor[None, None, head, batch], box, (None, 0))
        return cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(blocks, 0, 2),
        )

    # the loading role

    @cute.jit
    def load(self, tma: Tma, smem: Smem, pipes: Pipelines, work: Work, scalars: Scalars):
        """One warp: the loads of every tile, in the order the consumers use them."""
        extents = scalars.extents
        cta = cute.arch.block_idx()[0]
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_q_slabs)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        for round_idx in cutlass.range(work.schedule.num_rounds, unroll=1):
            tile = work.schedule.tile(cta, round_idx)
            if tile.is_valid:
                n_first, n_end = work.band.n_block_range(tile.m_block)
                if n_first < n_end:
                    batch = tile.head // extents.num_heads_q
                    head = tile.head % extents.num_heads_q
                    head_k = head // (extents.num_heads_q // extents.num_heads_k)
                    head_v = head // (extents.num_heads_q // extents.num_heads_v)
                    config = self.config
                    sQ, gQ = self._tma_blocks(
                        tma.atom_q,
                        tma.q,
                        head,
                        batch,
                        (WARPGROUP_ROWS, config.head_dim_qk),
                        smem.q,
                    )
                    sK, gK = self._tma_blocks(
                        tma.atom_k, tma.k, head_k, batch, (self.tile_n, config.head_dim_qk), smem.k
                    )
                    sV, gV = self._tma_blocks(
                        tma.atom_v, tma.v, head_v, batch, (self.tile_n, config.head_dim_v), smem.v
                    )
                    k_state = self._load_block(tma.atom_k, pipes.k, k_state, gK, sK, n_end - 1)
                    for wg in cutlass.range_constexpr(self.num_consumers):
                        q_block = tile.m_block * self.num_consumers + wg
                        q_state = self._load_block(tma.atom_q, pipes.q, q_state, gQ, sQ, q_block)
                    for i in cutlass.range(n_end - 1 - n_first, unroll=1):
                        n_block = n_end - 1 - i
                        k_state = self._load_block(
                            tma.atom_k, pipes.k, k_state, gK, sK, n_block - 1
                        )
                        v_state = self._load_block(tma.atom_v, pipes.v, v_state, gV, sV, n_block)
                    v_state = self._load_block(tma.atom_v, pipes.v, v_state, gV, sV, n_first)
        # every stage free again: no consumer's arrival is left to come when the block ends
        pipes.v.producer_tail(v_state)

    @cute.jit
    def _load_block(self, atom, pipe, state, source, target, block):
        pipe.producer_acquire(state)
        cute.copy(
            atom,
            source[None, block],
            target[None, state.index],
            tma_bar_ptr=pipe.producer_get_barrier(state),
        )
        state.advance()
        return state

    # the consuming role

    def _make_consumer(self, smem: Smem, scalars: Scalars) -> Consumer:
        config = self.config
        mma_qk, mma_pv = self._make_mma()
        thread = cute.arch.thread_idx()[0]
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS) - 1
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        v_transposed = cute.make_tensor(smem.v.iterator, cute.select(smem.v.layout, mode=[1, 0, 2]))
        tSrQ = qk.make_fragment_A(qk.partition_A(smem.q))
        shape_p = pv.partition_shape_A((WARPGROUP_ROWS, self.tile_n))
        shape_o = pv.partition_shape_C((WARPGROUP_ROWS, config.head_dim_v))
        return Consumer(
            thread % WARPGROUP_THREADS,
            Turns(wg, self.num_consumers),
            mma_qk,
            mma_pv,
            tSrQ,
            qk.make_fragment_B(qk.partition_B(smem.k)),
            cute.make_rmem_tensor(shape_p, self.dtype),
            pv.make_fragment_B(pv.partition_B(v_transposed)),
            cute.make_rmem_tensor(shape_o, Float32),
            OnlineSoftmax.make(scalars.softmax_scale_log2),
        )

    @cute.jit
    def mma(
        self,
        tma: Tma,
        stats: cute.Tensor | None,
        smem: Smem,
        pipes: Pipelines,
        work: Work,
        scalars: Scalars,
    ):
        """One consumer warpgroup: every tile's 64 rows from scores to stored output."""
        c = self._make_consumer(smem, scalars)
        cta = cute.arch.block_idx()[0]
        q_count = Int32(0)
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        c.turns.start()
        for round_idx in cutlass.range(work.schedule.num_rounds, unroll=1):
            tile = work.schedule.tile(cta, round_idx)
            if tile.is_valid:
                band = work.band
                n_first, n_end = band.n_block_range(tile.m_block)
                c.softmax.reset()
                c.acc_O.fill(0.0)
                if n_first < n_end:
                    q = self._q_tile(c, tile.m_block, q_count)
                    q_count += 1
                    self._wait_q(c, smem, pipes, q, scalars.q_sign)
                    self.first_step(c, pipes, kv_state, band, q, n_end - 1)
                    right_end = band.unmasked_end(tile.m_block, n_first, n_end - 1)
                    for i in cutlass.range(n_end - 1 - right_end, unroll=1):
                        n_block = n_end - 2 - i
                        kv_state = self.kv_step(c, pipes, kv_state, band, q, n_block, True)
                    left_end = band.unmasked_first(tile.m_block, n_first, right_end)
                    for i in cutlass.range(right_end - left_end, unroll=1):
                        n_block = right_end - 1 - i
                        kv_state = self.kv_step(c, pipes, kv_state, band, q, n_block, False)
                    if cutlass.const_expr(self.config.left_bound):
                        for i in cutlass.range(left_end - n_first, unroll=1):
                            n_block = left_end - 1 - i
                            kv_state = self.kv_step(c, pipes, kv_state, band, q, n_block, True)
                    pipes.q.consumer_release(self._q_state(q))
                    kv_state = self.last_step(c, pipes, kv_state)
                self.epilogue(c, tma, stats, smem, tile, scalars)
        # shared memory must outlive the last store's reads
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _q_tile(self, c: Consumer, m_block: Int32, count: Int32) -> QTile:
        """count: tiles with keys before this one, which the loading role has loaded too."""
        stages = self.config.num_q_stages
        slab = count % stages * self.num_consumers + c.turns.warpgroup
        return QTile(m_block, slab, count // stages % 2)

    def _q_state(self, q: QTile) -> pipeline.PipelineState:
        return pipeline.PipelineState(self.num_q_slabs, Int32(0), q.slab, q.phase)

    @cute.jit
    def _wait_q(self, c: Consumer, smem: Smem, pipes: Pipelines, q: QTile, q_sign: Float32):
        """Wait for this warpgroup's Q, and give it the sign of attn_scale."""
        pipes.q.consumer_wait(self._q_state(q))
        if q_sign != 1.0:
            size = WARPGROUP_ROWS * self.config.head_dim_qk
            # elementwise, so the swizzle does not matter
            flat = cute.make_tensor(
                cute.recast_ptr(smem.q.iterator, dtype=self.dtype) + q.slab * size,
                cute.make_layout(
                    (VECTOR, WARPGROUP_THREADS, size // (VECTOR * WARPGROUP_THREADS)),
                    stride=(1, VECTOR, VECTOR * WARPGROUP_THREADS),
                ),
            )
            for i in cutlass.range_constexpr(size // (VECTOR * WARPGROUP_THREADS)):
                part = flat[None, c.tidx, i]
                part.store((part.load().to(Float32) * q_sign).to(self.dtype))
            cute.arch.fence_view_async_shared()
            c.turns.sync_warpgroup()

    @cute.jit
    def _issue_qk(self, c: Consumer, q: QTile, stage: Int32) -> cute.Tensor:
        """Start S = Q K(stage)^T."""
        shape = c.mma_qk.partition_shape_C((WARPGROUP_ROWS, self.tile_n))
        acc_S = cute.make_rmem_tensor(shape, Float32)
        tSrQ = c.tSrQ[None, None, None, q.slab]
        _issue(c.mma_qk, acc_S, tSrQ, c.tSrK[None, None, None, stage], False)
        return acc_S

    @cute.jit
    def _issue_pv(self, c: Consumer, stage: Int32) -> None:
        """Start O += P V(stage)."""
        _issue(c.mma_pv, c.acc_O, c.tOrP, c.tOrV[None, None, None, stage], True)

    @cute.jit
    def _mask(self, c: Consumer, acc_S: cute.Tensor, band: Band, m_block: Int32, n_block: Int32):
        wg_rows = m_block * self.config.tile_m + c.turns.warpgroup * WARPGROUP_ROWS
        first_column = n_block * self.tile_n + acc_column_offset(c.tidx)
        band.apply(acc_S, wg_rows + acc_row(c.tidx, 0), first_column)

    @cute.jit
    def first_step(self, c: Consumer, pipes: Pipelines, state, band: Band, q: QTile, n_block):
        """S = Q K^T and P = softmax(S) of a tile's first block; its product with V comes later."""
        pipes.k.consumer_wait(state)
        acc_S = self._issue_qk(c, q, state.index)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(state)
        self._mask(c, acc_S, band, q.m_block, n_block)
        c.softmax.step(acc_S)
        _to_operand(acc_S, c.tOrP)

    @cute.jit
    def kv_step(
        self, c: Consumer, pipes: Pipelines, state, band: Band, q: QTile, n_block, is_masked: bool
    ):
        """S = Q K^T of one block, and meanwhile O += P V of the block before it."""
        v_state = state.clone()
        state.advance()
        pipes.k.consumer_wait(state)
        c.turns.wait()
        acc_S = self._issue_qk(c, q, state.index)
        pipes.v.consumer_wait(v_state)
        self._issue_pv(c, v_state.index)
        c.turns.pass_on()
        warpgroup.wait_group(1)
        pipes.k.consumer_release(state)
        if cutlass.const_expr(is_masked):
            self._mask(c, acc_S, band, q.m_block, n_block)
        row_scale = c.softmax.step(acc_S)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        _to_operand(acc_S, c.tOrP)
        scale_rows(c.acc_O, row_scale)
        return state

    @cute.jit
    def last_step(self, c: Consumer, pipes: Pipelines, state):
        """O += P V of a tile's last block."""
        pipes.v.consumer_wait(state)
        self._issue_pv(c, state.index)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(state)
        state.advance()
        return state

    @cute.jit
    def epilogue(self, c: Consumer, tma: Tma, stats, smem: Smem, tile: Tile, scalars: Scalars):
        """Normalize and store this warpgroup's O rows, and their log-sum-exp."""
        batch = tile.head // scalars.extents.num_heads_q
        head = tile.head % scalars.extents.num_heads_q
        wg = c.turns.warpgroup
        row_scale, lse = c.softmax.finish()
        scale_rows(c.acc_O, row_scale)
        rO = cute.make_rmem_tensor(c.acc_O.layout, self.dtype)
        rO.store(c.acc_O.load().to(self.dtype))
        is_storing_warp = cute.arch.make_warp_uniform(c.tidx // 32) == 0
        # the tile before this one may still be leaving through sO
        if is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        c.turns.sync_warpgroup()
        store_atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        tiled_copy = cute.make_tiled_copy_C(store_atom, c.mma_pv)
        thread_copy = tiled_copy.get_slice(c.tidx)
        cute.copy(
            tiled_copy,
            tiled_copy.retile(rO),
            thread_copy.partition_D(smem.o)[None, None, None, wg],
        )
        cute.arch.fence_view_async_shared()
        c.turns.sync_warpgroup()
        if is_storing_warp:
            sO, gO = self._tma_blocks(
                tma.atom_o, tma.o, head, batch, (WARPGROUP_ROWS, self.config.head_dim_v), smem.o
            )
            block = tile.m_block * self.num_consumers + wg
            cute.copy(tma.atom_o, sO[None, wg], gO[None, block])
            cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(self.config.stats):
            first_row = tile.m_block * self.config.tile_m + wg * WARPGROUP_ROWS
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                row = first_row + acc_row(c.tidx, r)
                # the four threads of a row hold the same value
                if acc_column_offset(c.tidx) == 0 and row < scalars.extents.seqlen_q:
                    stats[row, head, batch] = lse[r]


@cute.jit
def _issue(mma: cute.TiledMma, acc, tA: cute.Tensor, tB: cute.Tensor, accumulate: bool) -> None:
    """Start acc = A B or acc += A B as one group of asynchronous products."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(tA, mode=[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def _to_operand(acc_S: cute.Tensor, tOrP: cute.Tensor) -> None:
    """P = acc_S, rounded to the element type of V."""
    tOrP.store(as_operand_a(acc_S).load().to(tOrP.element_type))


def compile(config: PrefillSm90Config, signature: Signature):
    """The callable of PrefillArgs, for sm_90a; needs neither GPU nor driver.

    ValueError when the configuration is infeasible or the signature is not its own.
    """
    decline = config.infeasible()
    if decline is not None:
        raise ValueError(decline.render())
    if signature != config.signature():
        raise ValueError(f"{config.key()} takes {config.signature().key()}, not {signature.key()}")
    element = _ELEMENT[config.dtype]
    tensors = [nullptr(element, cute.AddressSpace.gmem, assumed_align=16) for _ in range(4)]
    stats = nullptr(Float32, cute.AddressSpace.gmem, assumed_align=4)
    return cute.compile(
        PrefillSm90(config),
        HostPointers(*tensors, stats),
        HostExtents(*(Int32(1) for _ in HostExtents._fields)),
        HostStrides(*(Int64(VECTOR) for _ in HostStrides._fields)),
        HostBand(Int32(0), Int32(0)),
        Float32(1.0),
        Int32(1),
        make_fake_stream(),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )

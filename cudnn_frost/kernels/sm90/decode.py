"""Forward attention for Hopper with few query rows: paged or dense K and V, lengths on the device.

All query rows of a K head's group are packed into one tile (row = query * group + head in group),
so K and V are read once. The blocks of keys of all sequences and heads form one line, which is
cut into `num_chunks` equal parts, one for each group of thread blocks (a thread block for every
`tile_m` packed rows). A sequence that a cut divides leaves partial results, which a second kernel
combines; with `divide` = 0 the cuts move to the next sequence and there is nothing to combine.

Roles. Warpgroup 0 loads: its warp 0 issues every TMA load, `page_box` keys at a time, its other
warps leave. With 8-bit operands warpgroup 1 converts V to 16 bits. Each further warpgroup (1 or 2)
owns 64 packed rows. Registers a thread: the configuration's `registers()`.

Pipelines (full: one arrival and the bytes of the TMA loads; empty: one arrival per warp)
  k       num_stages, released by the consumers when S is complete
  v       num_stages, released by the consumers, or by the converter
  values  8-bit operands only: V in 16 bits, an arrival per thread of converter and consumers
Order of loads, which is the order of use: K(n) K(n+1) V(n) K(n+2) V(n+1) ... V(last).

Shared memory: the mbarriers, then at 1,024-byte boundaries sQ in slabs of 64 rows, sK, sV and, with
8-bit operands, the blocks of V in 16 bits.

Nobody's memory is trusted: a page that no row sees is loaded from beyond the pool, which arrives
as zeros; rows of V that no row sees are zeroed in shared memory; lengths are clamped. Every role
derives its blocks from the same `Sequences`.

Units: extents and offsets in elements; exponents base 2. 8-bit operands: S from 8-bit products;
P = 2^(s - m + 10) and V in half precision, products summed in float.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, Uint32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, nullptr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_frost.kernels.common.layouts import (
    ROWS_PER_THREAD,
    acc_column,
    acc_column_offset,
    acc_row,
    as_rows,
)
from cudnn_frost.kernels.common.partial_softmax import PartialSoftmax
from cudnn_frost.kernels.common.products import issue, to_operand
from cudnn_frost.kernels.common.sequences import Keys, Sequences
from cudnn_frost.kernels.common.softmax import LOG2_E, scale_rows
from cudnn_frost.kernels.common.turns import Turns
from cudnn_frost.kernels.configs.decode_sm90 import (
    SMEM_ALIGNMENT,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    DecodeSm90Config,
)
from cudnn_frost.kernels.configs.signature import Signature
from cudnn_frost.kernels.sm90.combine import (
    ELEMENT,
    Combine,
    HostExtents,
    HostForms,
    HostPointers,
    HostStrides,
    Problem,
    RowWriter,
    load_scalar,
    operand_start,
    peak,
)

WARPS_PER_WARPGROUP = WARPGROUP_THREADS // 32
VECTOR_BYTES = 16
# lanes of the loading warp that hold page indices: the first half K's, the second V's
_SIDE_LANES = 16


@dataclass(frozen=True)
class Tma:
    """Copy atoms of one box, and coordinate tensors (row, column, head, page)."""

    atom_k: cute.CopyAtom
    atom_v: cute.CopyAtom
    k: cute.Tensor
    v: cute.Tensor


class SmemLayouts(NamedTuple):
    """q: (64, d, consumer). k, v: (tile_n, d, stage). values: V in 16 bits, likewise."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    values: cute.ComposedLayout


@dataclass(frozen=True)
class Smem:
    """The tensors of SmemLayouts; `values` is `v` where V arrives in 16 bits."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    values: cute.Tensor


@dataclass(frozen=True)
class Pipelines:
    """`values` is `v` where V arrives in 16 bits."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    values: pipeline.PipelineAsync


class Walk(NamedTuple):
    """A thread block's place among the blocks of keys, and how many are left to it."""

    batch: Int32
    head: Int32
    tile: Int32
    remaining: Int32


class Span(NamedTuple):
    """The part of one sequence that a thread block computes.

    taken: blocks it takes from the line. n_begin, count: those that its rows need.
    is_whole: nobody else computes a part. slot: where a partial result goes.
    """

    keys: Keys
    taken: Int32
    n_begin: Int32
    count: Int32
    is_whole: Boolean
    slot: Int32


@dataclass(frozen=True)
class Work:
    """What every role derives its loop from. group: packed rows of a query."""

    sequences: Sequences
    start: Walk
    m_block: Int32
    group: Int32
    tile_m: cutlass.Constexpr[int]

    @cute.jit
    def span(self, walk: Walk) -> Span:
        tile_n = self.sequences.tile_n
        keys = self.sequences.keys(walk.batch)
        taken = cutlass.min(keys.n_tiles - walk.tile, walk.remaining)
        first_query = self.m_block * self.tile_m // self.group
        last_row = cutlass.min((self.m_block + 1) * self.tile_m, keys.len_q * self.group) - 1
        end = cutlass.min(keys.len_k, last_row // self.group + keys.right + 1)
        first = cutlass.max(first_query + keys.left, 0)
        n_begin = keys.n_first + walk.tile
        n_end = cutlass.min(n_begin + taken, (end + tile_n - 1) // tile_n)
        n_begin = cutlass.max(n_begin, first // tile_n)
        count = cutlass.max(n_end - n_begin, 0)
        # none of these rows exists, or none sees a key
        if first_query >= keys.len_q or end <= first:
            count = Int32(0)
        is_whole = walk.tile == 0 and taken == keys.n_tiles
        slot = Int32(1) if walk.tile == 0 else Int32(0)
        return Span(keys, taken, n_begin, count, is_whole, slot)

    @cute.jit
    def next(self, walk: Walk, taken: Int32) -> Walk:
        head, batch = walk.head + 1, walk.batch
        if head == self.sequences.num_heads:
            head, batch = Int32(0), batch + 1
        return Walk(batch, head, Int32(0), walk.remaining - taken)


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
    softmax: PartialSoftmax


class Limits(NamedTuple):
    """What a thread's two rows see: keys first <= j < end.

    all_first, all_end: what all rows of the warpgroup see. has_rows: the warp holds a live row.
    """

    first_0: Int32
    end_0: Int32
    first_1: Int32
    end_1: Int32
    all_first: Int32
    all_end: Int32
    has_rows: Boolean


class DecodeSm90:
    """The kernels of one configuration."""

    def __init__(self, config: DecodeSm90Config):
        self.config = config
        self.dtype = ELEMENT[config.dtype]
        # P and V in the second product
        self.value_dtype = cutlass.Float16 if config.is_fp8 else self.dtype
        self.num_consumers = config.num_consumers
        self.tile_n = config.tile_n
        self.num_stages = config.num_stages
        self.vector = VECTOR_BYTES // config.dtype.bytes
        self.num_boxes = config.tile_n // config.page_box
        self.combine = Combine(config)

    # host builders

    def _box_columns(self, columns: int) -> int:
        """Columns of one copy: as many as the shared-memory swizzle spans."""
        row_bytes = columns * self.config.dtype.bytes
        span = next(n for n in (128, 64, 32) if row_bytes % n == 0)
        return span // self.config.dtype.bytes

    @staticmethod
    def _smem_layout(dtype, rows: int, columns: int, count: int) -> cute.ComposedLayout:
        """(rows, columns, count), columns contiguous, swizzled for TMA and wgmma."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
        atom = warpgroup.make_smem_layout_atom(kind, dtype)
        return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))

    def _make_layouts(self) -> SmemLayouts:
        """Static, but made anew on each side: host and device do not share values."""
        config = self.config
        d_qk, d_v = config.head_dim_qk, config.head_dim_v
        v = self._smem_layout(self.dtype, self.tile_n, d_v, self.num_stages)
        values = v
        if config.is_fp8:
            stages = config.num_value_stages
            values = self._smem_layout(self.value_dtype, self.tile_n, d_v, stages)
        return SmemLayouts(
            self._smem_layout(self.dtype, WARPGROUP_ROWS, d_qk, self.num_consumers),
            self._smem_layout(self.dtype, self.tile_n, d_qk, self.num_stages),
            v,
            values,
        )

    def _make_storage(self, layouts: SmemLayouts):
        config = self.config

        def tile(dtype, layout, is_present=True):
            count = cute.cosize(layout) if is_present else 0
            return cute.struct.Align[cute.struct.MemRange[dtype, count], SMEM_ALIGNMENT]

        @cute.struct
        class Storage:
            k_barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            value_barriers: cute.struct.MemRange[Int64, 2 * config.num_value_stages]
            q: tile(self.dtype, layouts.q)
            k: tile(self.dtype, layouts.k)
            v: tile(self.dtype, layouts.v)
            values: tile(self.value_dtype, layouts.values, config.is_fp8)

        size, stated = Storage.size_in_bytes(), config.smem_bytes()
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
            self.value_dtype,
            self.value_dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, self.config.head_dim_v),
            hopper.OperandSource.RMEM,
        )
        return mma_qk, mma_pv

    def _make_tma(self, pointers: HostPointers, e: HostExtents, s: HostStrides) -> Tma:
        made = []
        for pointer, rows, columns, pages, strides, flavor in (
            (pointers.k, e.k_rows, e.head_dim_qk, e.k_pages, s[3:6], self.config.head_dim_qk),
            (pointers.v, e.v_rows, e.head_dim_v, e.v_pages, s[6:9], self.config.head_dim_v),
        ):
            d_page, d_head, d_row = [cute.assume(stride, divby=self.vector) for stride in strides]
            layout = cute.make_layout(
                (rows, columns, e.num_heads_k, pages), stride=(d_row, 1, d_head, d_page)
            )
            box = (self.config.page_box, self._box_columns(flavor))
            made.append(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(),
                    cute.make_tensor(pointer, layout),
                    self._smem_layout(self.dtype, *box, 1),
                    box,
                )
            )
        (atom_k, k), (atom_v, v) = [(m[0], m[1]) for m in made]
        return Tma(atom_k, atom_v, k, v)

    @cute.jit
    def __call__(
        self,
        pointers: HostPointers,
        extents: HostExtents,
        strides: HostStrides,
        forms: HostForms,
        softmax_scale: Float32,
        stats_scale: Float32,
        num_chunks: Int32,
        divide: Int32,
        stream,
    ):
        """The host entry; its arguments are DecodeArgs."""
        tma = self._make_tma(pointers, extents, strides)
        num_rows = extents.seqlen_q * (extents.num_heads_q // extents.num_heads_k)
        num_m_blocks = cute.ceil_div(num_rows, self.config.tile_m)
        problem = Problem(pointers, extents, strides, forms, stats_scale, num_chunks, num_m_blocks)
        if cutlass.const_expr(self.config.is_fp8):  # noqa: SIM102
            if pointers.amax_o.toint() != 0 or pointers.amax_s.toint() != 0:
                self.reset(problem).launch(grid=(1, 1, 1), block=[1, 1, 1], stream=stream)
        self.kernel(tma, problem, softmax_scale, divide).launch(
            grid=(num_m_blocks, num_chunks, 1),
            block=[self.config.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        if divide != 0:
            self.combine.launch(problem, stream)

    @cute.kernel
    def reset(self, problem: Problem):
        """The maxima start from 0."""
        for pointer in (problem.pointers.amax_o, problem.pointers.amax_s):
            if pointer.toint() != 0:
                cute.make_tensor(pointer, cute.make_layout(1))[0] = Float32(0.0)

    @cute.kernel
    def kernel(self, tma: Tma, problem: Problem, softmax_scale: Float32, divide: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma.atom_k)
            cpasync.prefetch_descriptor(tma.atom_v)
        layouts = self._make_layouts()
        storage = SmemAllocator().allocate(self._make_storage(layouts))
        pipes = self._make_pipelines(storage)
        smem = self._smem_tensors(storage, layouts)
        work = self._make_work(problem, divide)
        producer_registers, converter_registers, consumer_registers = self.config.registers()
        first_consumer = WARPS_PER_WARPGROUP * (1 + self.config.is_fp8)
        if warp_idx < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_idx == 0:
                self.load(tma, smem, pipes, work, problem)
        elif warp_idx < first_consumer:
            if cutlass.const_expr(self.config.is_fp8):
                cute.arch.setmaxregister_decrease(converter_registers)
                self.convert(smem, pipes, work)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.mma(smem, pipes, work, problem, softmax_scale)

    # shared by the roles

    def _make_pipelines(self, storage) -> Pipelines:
        config = self.config
        num_warps = WARPS_PER_WARPGROUP * self.num_consumers

        def group(size=1):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, size)

        def make(barriers, consumer_warps, columns):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=self.num_stages,
                producer_group=group(),
                consumer_group=group(consumer_warps),
                tx_count=self.tile_n * columns * config.dtype.bytes,
                defer_sync=True,
            )

        k = make(storage.k_barriers, num_warps, config.head_dim_qk)
        v_warps = WARPS_PER_WARPGROUP if config.is_fp8 else num_warps
        v = make(storage.v_barriers, v_warps, config.head_dim_v)
        values = v
        if config.is_fp8:
            values = pipeline.PipelineAsync.create(
                barrier_storage=storage.value_barriers.data_ptr(),
                num_stages=config.num_value_stages,
                producer_group=group(WARPGROUP_THREADS),
                consumer_group=group(WARPGROUP_THREADS * self.num_consumers),
                defer_sync=True,
            )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return Pipelines(k, v, values)

    def _smem_tensors(self, storage, layouts: SmemLayouts) -> Smem:
        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        v = tensor(storage.v, layouts.v)
        values = tensor(storage.values, layouts.values) if self.config.is_fp8 else v
        return Smem(tensor(storage.q, layouts.q), tensor(storage.k, layouts.k), v, values)

    @cute.jit
    def _make_work(self, problem: Problem, divide: Int32) -> Work:
        """This thread block's part of the line of all blocks of keys; by whole warps."""
        m_block, chunk_idx, _ = cute.arch.block_idx()
        sequences = problem.sequences(self.tile_n)
        start, length = sequences.share(chunk_idx, problem.num_chunks, divide)
        walk = Walk(start.batch, start.head, start.tile, length)
        return Work(sequences, walk, m_block, problem.group(), self.config.tile_m)

    # the loading role

    @cute.jit
    def load(self, tma: Tma, smem: Smem, pipes: Pipelines, work: Work, problem: Problem):
        """One warp: the loads of every span, in the order the consumers use them."""
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        walk = work.start
        while walk.remaining > 0:
            span = work.span(walk)
            if span.count > 0:
                head, n = walk.head, span.n_begin
                pages = self._pages(problem, span.keys, walk.batch, n)
                ahead = self._pages(problem, span.keys, walk.batch, n + 1)
                k_state = self._load_k(tma, smem, pipes, problem, k_state, pages, head, n)
                for _ in cutlass.range(span.count - 1, unroll=1):
                    k_state = self._load_k(tma, smem, pipes, problem, k_state, ahead, head, n + 1)
                    later = self._pages(problem, span.keys, walk.batch, n + 2)
                    v_state = self._load_v(tma, smem, pipes, problem, v_state, pages, head, n)
                    pages, ahead, n = ahead, later, n + 1
                v_state = self._load_v(tma, smem, pipes, problem, v_state, pages, head, n)
            walk = work.next(walk, span.taken)
        # every stage free again: no consumer's arrival is left to come when the block ends
        pipes.k.producer_tail(k_state)
        pipes.v.producer_tail(v_state)

    @cute.jit
    def _pages(self, problem: Problem, keys: Keys, batch: Int32, n_block: Int32) -> Int32:
        """Lane l: the page of box l % 16 of a block, K's or V's; beyond the pool if unseen."""
        p, e, s = problem.pointers, problem.extents, problem.strides
        lane = cute.arch.lane_idx()
        box = lane % _SIDE_LANES
        key = n_block * self.tile_n + box * self.config.page_box
        is_k = lane < _SIDE_LANES
        page = e.k_pages if is_k else e.v_pages
        is_seen = key < keys.end and key + self.config.page_box > keys.first
        if box < self.num_boxes and is_seen:
            page = batch
            if is_k:
                if p.k_table.toint() != 0:
                    page = _entry(
                        p.k_table, batch, key // e.k_rows, s.k_table_batch, s.k_table_page
                    )
            else:
                if p.v_table.toint() != 0:
                    page = _entry(
                        p.v_table, batch, key // e.v_rows, s.v_table_batch, s.v_table_page
                    )
        return page

    @cute.jit
    def _load_k(self, tma: Tma, smem: Smem, pipes: Pipelines, problem, state, pages, head, n_block):
        return self._load_block(
            tma.atom_k,
            tma.k,
            smem.k,
            pipes.k,
            state,
            pages,
            Int32(0),
            head,
            n_block,
            problem.extents.k_rows,
        )

    @cute.jit
    def _load_v(self, tma: Tma, smem: Smem, pipes: Pipelines, problem, state, pages, head, n_block):
        return self._load_block(
            tma.atom_v,
            tma.v,
            smem.v,
            pipes.v,
            state,
            pages,
            Int32(_SIDE_LANES),
            head,
            n_block,
            problem.extents.v_rows,
        )

    @cute.jit
    def _load_block(
        self, atom, pool, smem, pipe, state, pages, first_lane, head, n_block, page_rows
    ):
        """One block of keys, box by box."""
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        tile_n, columns = cutlass.const_expr(self.tile_n), cute.size(smem, mode=[1])
        rows, width = self.config.page_box, self._box_columns(columns)
        layout = self._smem_layout(self.dtype, rows, width, 1).outer
        stage = smem.iterator + state.index * (tile_n * columns)
        for box in cutlass.range_constexpr(self.num_boxes):
            page = cute.arch.shuffle_sync(pages, first_lane + box)
            row = (n_block * tile_n + box * rows) % page_rows
            source = pool[None, None, head, page]
            for part in cutlass.range_constexpr(columns // width):
                target = cute.make_tensor(stage + (part * tile_n + box * rows) * width, layout)
                tile = cute.local_tile(source, (rows, width), (row // rows, part))
                to, of = cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(target[None, None, 0], 0, 2),
                    cute.group_modes(tile, 0, 2),
                )
                cute.copy(atom, of, to, tma_bar_ptr=barrier)
        state.advance()
        return state

    # the converting role

    @cute.jit
    def convert(self, smem: Smem, pipes: Pipelines, work: Work):
        """One warpgroup: V from 8 bits to 16, with zeros for keys that no row sees."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        stages = self.config.num_value_stages
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        out_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        walk = work.start
        while walk.remaining > 0:
            span = work.span(walk)
            for i in cutlass.range(span.count, unroll=1):
                first_key = (span.n_begin + i) * self.tile_n
                pipes.v.consumer_wait(v_state)
                pipes.values.producer_acquire(out_state)
                self._convert_block(
                    smem.v[None, None, v_state.index],
                    smem.values[None, None, out_state.index],
                    tidx,
                    span.keys.first - first_key,
                    span.keys.end - first_key,
                )
                cute.arch.fence_view_async_shared()
                # one lane releases for its warp
                cute.arch.sync_warp()
                pipes.v.consumer_release(v_state)
                pipes.values.producer_commit(out_state)
                v_state.advance()
                out_state.advance()
            walk = work.next(walk, span.taken)

    @cute.jit
    def _convert_block(
        self, source: cute.Tensor, target: cute.Tensor, tidx, first: Int32, end: Int32
    ):
        """Rows first <= row < end are kept."""
        chunks = self.config.head_dim_v // self.vector
        rows_at_once = WARPGROUP_THREADS // chunks
        chunk = tidx % chunks
        for i in cutlass.range_constexpr(self.tile_n // rows_at_once):
            row = i * rows_at_once + tidx // chunks
            values = cute.make_rmem_tensor(self.vector, self.value_dtype)
            narrow = cute.local_tile(source, (1, self.vector), (row, chunk))
            values.store(narrow.load().to(self.value_dtype))
            if row < first or row >= end:
                values.fill(0.0)
            for half in cutlass.range_constexpr(2):
                part = cute.local_tile(target, (1, self.vector // 2), (row, 2 * chunk + half))
                half_values = cute.local_tile(values, (self.vector // 2,), (half,))
                part.store(half_values.load())

    # the consuming role

    def _make_consumer(self, smem: Smem, softmax_scale_log2: Float32) -> Consumer:
        config = self.config
        mma_qk, mma_pv = self._make_mma()
        thread = cute.arch.thread_idx()[0]
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS) - 1 - int(config.is_fp8)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        values = smem.values
        v_transposed = cute.make_tensor(values.iterator, cute.select(values.layout, mode=[1, 0, 2]))
        shape_p = pv.partition_shape_A((WARPGROUP_ROWS, self.tile_n))
        shape_o = pv.partition_shape_C((WARPGROUP_ROWS, config.head_dim_v))
        return Consumer(
            thread % WARPGROUP_THREADS,
            Turns(wg, self.num_consumers),
            mma_qk,
            mma_pv,
            qk.make_fragment_A(qk.partition_A(smem.q)),
            qk.make_fragment_B(qk.partition_B(smem.k)),
            cute.make_rmem_tensor(shape_p, self.value_dtype),
            pv.make_fragment_B(pv.partition_B(v_transposed)),
            cute.make_rmem_tensor(shape_o, Float32),
            PartialSoftmax.make(softmax_scale_log2, config.p_shift),
        )

    @cute.jit
    def _scale(self, problem: Problem, softmax_scale: Float32) -> tuple[Float32, Float32]:
        """(positive scale of exponents, sign of the caller's scale: 1, -1 or 0)."""
        if cutlass.const_expr(self.config.is_fp8):
            p = problem.pointers
            softmax_scale = softmax_scale * load_scalar(p.descale_q) * load_scalar(p.descale_k)
        sign, magnitude = Float32(1.0), softmax_scale
        if softmax_scale < 0.0:
            sign, magnitude = Float32(-1.0), -softmax_scale
        if softmax_scale == 0.0:
            sign, magnitude = Float32(0.0), Float32(1.0)
        return magnitude * LOG2_E, sign

    @cute.jit
    def mma(
        self, smem: Smem, pipes: Pipelines, work: Work, problem: Problem, softmax_scale: Float32
    ):
        """One consumer warpgroup: its rows' scores, output and state, span after span."""
        scale_log2, q_sign = self._scale(problem, softmax_scale)
        c = self._make_consumer(smem, scale_log2)
        user = pipeline.PipelineUserType.Consumer
        k_state = pipeline.make_pipeline_state(user, self.num_stages)
        v_state = pipeline.make_pipeline_state(user, self._value_stages())
        walk = work.start
        c.turns.start()
        while walk.remaining > 0:
            span = work.span(walk)
            c.softmax.reset()
            c.acc_O.fill(0.0)
            if span.count > 0:
                self._load_q(c, smem, problem, span.keys, work.m_block, walk, q_sign)
                limits = self._limits(c, work, span.keys)
                n_block = span.n_begin
                k_state = self.first_step(c, pipes, k_state, limits, n_block)
                for _ in cutlass.range(span.count - 1, unroll=1):
                    self._wait_values(c, smem, pipes, v_state, span.keys, n_block)
                    n_block += 1
                    k_state, v_state = self.kv_step(c, pipes, k_state, v_state, limits, n_block)
                self._wait_values(c, smem, pipes, v_state, span.keys, n_block)
                v_state = self.last_step(c, pipes, v_state)
            self.epilogue(c, work, problem, walk, span)
            walk = work.next(walk, span.taken)

    def _value_stages(self) -> int:
        return self.config.num_value_stages if self.config.is_fp8 else self.num_stages

    @cute.jit
    def _load_q(self, c: Consumer, smem: Smem, problem: Problem, keys: Keys, m_block, walk, sign):
        """This warpgroup's rows, packed; rows and columns that do not exist become zeros."""
        p, s, vector = problem.pointers, problem.strides, self.vector
        start = operand_start(
            p.q_offsets, problem.forms.q_offset_words, s.q_multiplier, s.q_batch, walk.batch
        )
        chunks = self.config.head_dim_qk // vector
        count = cute.ceil_div(WARPGROUP_ROWS * chunks, WARPGROUP_THREADS)
        words = cute.make_rmem_tensor((vector * self.config.dtype.bytes // 4, count), Uint32)
        words.fill(0)
        first_row = m_block * self.config.tile_m + c.turns.warpgroup * WARPGROUP_ROWS
        for i in cutlass.range_constexpr(count):
            index = i * WARPGROUP_THREADS + c.tidx
            row = problem.row(first_row + index // chunks, walk.head, keys.len_q)
            column = index % chunks * vector
            if row.is_live and column < problem.extents.head_dim_qk and sign != 0.0:
                offset = start + row.query * s.q_row + row.head * s.q_head + column
                source = cute.make_tensor(
                    cute.recast_ptr(p.q + cute.assume(offset, divby=vector), dtype=Uint32),
                    cute.make_layout(4),
                )
                words[None, i].store(source.load())
        if sign < 0.0:
            flip = Uint32(0x80808080 if self.config.is_fp8 else 0x80008000)
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = words[i] ^ flip
        # the products that read the rows before these are complete in every warp
        c.turns.sync_warpgroup()
        for i in cutlass.range_constexpr(count):
            index = i * WARPGROUP_THREADS + c.tidx
            slab = smem.q[None, None, c.turns.warpgroup]
            target = cute.local_tile(slab, (1, vector), (index // chunks, index % chunks))
            packed = cute.make_tensor(
                cute.recast_ptr(words.iterator, dtype=self.dtype) + i * vector,
                cute.make_layout((1, vector), stride=(vector, 1)),
            )
            target.store(packed.load())
        cute.arch.fence_view_async_shared()
        c.turns.sync_warpgroup()

    @cute.jit
    def _limits(self, c: Consumer, work: Work, keys: Keys) -> Limits:
        first_row = work.m_block * self.config.tile_m + c.turns.warpgroup * WARPGROUP_ROWS
        queries = [(first_row + acc_row(c.tidx, r)) // work.group for r in range(ROWS_PER_THREAD)]
        ends = [cutlass.min(keys.len_k, query + keys.right + 1) for query in queries]
        firsts = [query + keys.left for query in queries]
        last_row = cutlass.min(first_row + WARPGROUP_ROWS, keys.len_q * work.group) - 1
        return Limits(
            firsts[0],
            ends[0],
            firsts[1],
            ends[1],
            last_row // work.group + keys.left,
            cutlass.min(keys.len_k, first_row // work.group + keys.right + 1),
            first_row + c.tidx // 32 * 16 < keys.len_q * work.group,
        )

    @cute.jit
    def _mask(self, c: Consumer, acc_S: cute.Tensor, limits: Limits, n_block: Int32):
        """Scores of keys that a row does not see become -inf."""
        first_key = n_block * self.tile_n
        if first_key < limits.all_first or first_key + self.tile_n > limits.all_end:
            rows = as_rows(acc_S)
            first_column = first_key + acc_column_offset(c.tidx)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                first = (limits.first_0 if r == 0 else limits.first_1) - first_column
                end = (limits.end_0 if r == 0 else limits.end_1) - first_column
                for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                    is_seen = acc_column(j) >= first and acc_column(j) < end
                    rows[r, j] = rows[r, j] if is_seen else -Float32.inf

    @cute.jit
    def _wait_values(self, c: Consumer, smem: Smem, pipes: Pipelines, state, keys: Keys, n_block):
        """Wait for a block of V, and clear the rows of keys that nobody sees."""
        pipes.values.consumer_wait(state)
        if cutlass.const_expr(not self.config.is_fp8):
            first = keys.first - n_block * self.tile_n
            end = keys.end - n_block * self.tile_n
            if first > 0 or end < self.tile_n:
                self._clear_rows(c, smem, state.index, first, end)

    @cute.jit
    def _clear_rows(self, c: Consumer, smem: Smem, stage: Int32, first: Int32, end: Int32):
        """The swizzle moves vectors within a row of a box, so clearing rows need not know it."""
        columns = self.config.head_dim_v
        width = self._box_columns(columns)
        count = self.tile_n * columns // self.vector
        flat = cute.make_tensor(
            cute.recast_ptr(smem.v.iterator, dtype=self.dtype) + stage * (self.tile_n * columns),
            cute.make_layout((self.vector, count)),
        )
        zeros = cute.make_rmem_tensor(self.vector, self.dtype)
        zeros.fill(0.0)
        for i in cutlass.range(c.tidx, count, WARPGROUP_THREADS, unroll=1):
            row = i * self.vector // width % self.tile_n
            if row < first or row >= end:
                flat[None, i].store(zeros.load())
        cute.arch.fence_view_async_shared()
        c.turns.sync_warpgroup()

    @cute.jit
    def _issue_qk(self, c: Consumer, stage: Int32) -> cute.Tensor:
        """Start S = Q K(stage)^T."""
        shape = c.mma_qk.partition_shape_C((WARPGROUP_ROWS, self.tile_n))
        acc_S = cute.make_rmem_tensor(shape, Float32)
        tSrQ = c.tSrQ[None, None, None, c.turns.warpgroup]
        issue(c.mma_qk, acc_S, tSrQ, c.tSrK[None, None, None, stage], False)
        return acc_S

    @cute.jit
    def _issue_pv(self, c: Consumer, stage: Int32) -> None:
        """Start O += P V(stage)."""
        issue(c.mma_pv, c.acc_O, c.tOrP, c.tOrV[None, None, None, stage], True)

    @cute.jit
    def _softmax(self, c: Consumer, acc_S: cute.Tensor, limits: Limits, n_block: Int32):
        """P = softmax(S) so far, in warps that hold rows."""
        if limits.has_rows:
            self._mask(c, acc_S, limits, n_block)
            c.softmax.step(acc_S)

    @cute.jit
    def first_step(self, c: Consumer, pipes: Pipelines, k_state, limits: Limits, n_block: Int32):
        """S = Q K^T and P = softmax(S) of a span's first block; its product with V comes later."""
        pipes.k.consumer_wait(k_state)
        acc_S = self._issue_qk(c, k_state.index)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self._softmax(c, acc_S, limits, n_block)
        to_operand(acc_S, c.tOrP)
        k_state.advance()
        return k_state

    @cute.jit
    def kv_step(self, c: Consumer, pipes: Pipelines, k_state, v_state, limits: Limits, n_block):
        """S = Q K^T of one block, and meanwhile O += P V of the block before it."""
        pipes.k.consumer_wait(k_state)
        c.turns.wait()
        acc_S = self._issue_qk(c, k_state.index)
        self._issue_pv(c, v_state.index)
        c.turns.pass_on()
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self._softmax(c, acc_S, limits, n_block)
        warpgroup.wait_group(0)
        pipes.values.consumer_release(v_state)
        to_operand(acc_S, c.tOrP)
        scale_rows(c.acc_O, c.softmax.row_scale)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def last_step(self, c: Consumer, pipes: Pipelines, v_state):
        """O += P V of a span's last block."""
        self._issue_pv(c, v_state.index)
        warpgroup.wait_group(0)
        pipes.values.consumer_release(v_state)
        v_state.advance()
        return v_state

    @cute.jit
    def epilogue(self, c: Consumer, work: Work, problem: Problem, walk: Walk, span: Span):
        """Store finished rows, or partial ones for the combining kernel."""
        writer = RowWriter.make(problem, walk.batch, self.config)
        first_row = work.m_block * self.config.tile_m + c.turns.warpgroup * WARPGROUP_ROWS
        amax_o, amax_s = Float32(0.0), Float32(0.0)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            packed = first_row + acc_row(c.tidx, r)
            row = problem.row(packed, walk.head, span.keys.len_q)
            reference, row_sum = c.softmax.state(r)
            values = as_rows(c.acc_O)[r, None]
            if span.is_whole:
                if row.query < problem.extents.seqlen_q:
                    row_o, row_s = self._finish_row(c, writer, row, reference, row_sum, values)
                    amax_o = cute.arch.fmax(amax_o, row_o)
                    amax_s = cute.arch.fmax(amax_s, row_s)
            elif row.is_live:
                self._leave_row(c, problem, span.slot, packed, reference, row_sum, values)
        if cutlass.const_expr(self.config.is_fp8):  # noqa: SIM102
            if span.is_whole:
                writer.store_amax(amax_o, amax_s)

    @cute.jit
    def _finish_row(self, c: Consumer, writer: RowWriter, row, reference, row_sum, values):
        """One row of O and Stats; (max|O| of this thread, max P)."""
        if not row.is_live:
            reference, row_sum = -Float32.inf, Float32(0.0)
        multiplier, lse = writer.finish(row, reference, row_sum)
        amax_o = Float32(0.0)
        for j in cutlass.range_constexpr(0, cute.size(values), 2):
            pair = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range_constexpr(2):
                value = values[j + i] * multiplier * writer.descale
                value = value if row.is_live else Float32(0.0)
                amax_o = cute.arch.fmax(amax_o, cute.arch.fmax(value, -value))
                pair[i] = value * writer.scale_o
            writer.store(row, acc_column(j) + acc_column_offset(c.tidx), pair)
        if acc_column_offset(c.tidx) == 0:
            writer.store_stats(row, lse)
        return amax_o, peak(self.config, reference, lse, row_sum)

    @cute.jit
    def _leave_row(self, c: Consumer, problem: Problem, slot, packed, reference, row_sum, values):
        """One row's partial O and state, in the workspace."""
        chunk = cute.arch.block_idx()[1]
        part = self.combine.partial_row(problem, chunk, slot, packed)
        workspace = problem.pointers.workspace
        for j in cutlass.range_constexpr(0, cute.size(values), 2):
            offset = part.o + acc_column(j) + acc_column_offset(c.tidx)
            pair = cute.make_tensor(workspace + cute.assume(offset, divby=2), cute.make_layout(2))
            pair[0], pair[1] = values[j], values[j + 1]
        if acc_column_offset(c.tidx) == 0:
            state = cute.make_tensor(workspace + part.state, cute.make_layout(2))
            state[0], state[1] = reference, row_sum


@cute.jit
def _entry(table: cute.Pointer, batch, page: Int32, d_batch: Int64, d_page: Int64) -> Int32:
    """A page table's entry."""
    return (table + (batch * d_batch + page * d_page)).load()


def compile(config: DecodeSm90Config, signature: Signature):
    """The callable of DecodeArgs, for sm_90a; needs neither GPU nor driver.

    ValueError when the configuration is infeasible or the signature is not its own.
    """
    decline = config.infeasible()
    if decline is not None:
        raise ValueError(decline.render())
    if signature != config.signature():
        raise ValueError(f"{config.key()} takes {config.signature().key()}, not {signature.key()}")

    def pointer(name: str):
        operand = signature.get(name)
        if operand is None:
            return nullptr(Float32, cute.AddressSpace.gmem, assumed_align=16)
        # where O's type is chosen at launch, bytes stand for it
        element = ELEMENT.get(operand.dtype, cutlass.Uint8)
        return nullptr(element, cute.AddressSpace.gmem, assumed_align=operand.alignment)

    return cute.compile(
        DecodeSm90(config),
        HostPointers(*(pointer(name) for name in HostPointers._fields)),
        HostExtents(*(Int32(1) for _ in HostExtents._fields)),
        HostStrides(*(Int64(16) for _ in HostStrides._fields)),
        HostForms(*(Int32(0) for _ in HostForms._fields)),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        Int32(1),
        make_fake_stream(),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )

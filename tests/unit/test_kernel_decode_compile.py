"""The Hopper decode kernel without a GPU: legality, keys, host logic, and its machine code."""

import dataclasses
import functools
import itertools
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from cudnn_frost.kernels.configs.decode_sm90 import (
    PAGE_BOXES,
    SLOTS_PER_CHUNK,
    UNBOUNDED,
    DecodeArgs,
    DecodeExtents,
    DecodeForms,
    DecodePointers,
    DecodeSm90Config,
    DecodeStrides,
    page_box,
    shipped_configs,
)
from cudnn_frost.runtime import artifacts
from cudnn_frost.vocab import KNOWN_TARGETS, DeclineCode, DType

from .machine_code import host_compile, sass_of, spills

BASE = DecodeSm90Config(DType.BFLOAT16, DType.BFLOAT16)
FP8 = DecodeSm90Config(DType.FP8_E4M3, DType.NOT_SET)
SM = KNOWN_TARGETS["sm90"]

# another value of every field
OTHER = {
    "dtype": DType.HALF,
    "o_dtype": DType.HALF,
    "head_dim_qk": 64,
    "head_dim_v": 64,
    "tile_m": 128,
    "tile_n": 64,
    "num_stages": 2,
    "page_box": 8,
}


def changed(base: DecodeSm90Config = BASE, **values: object) -> DecodeSm90Config:
    return dataclasses.replace(base, **values)


# configurations


def test_shipped_configs_are_feasible_and_distinct():
    configs = shipped_configs()
    assert len({config.key() for config in configs}) == len(configs)
    for config in configs:
        assert config.infeasible() is None
        assert config.smem_bytes() <= SM.smem_per_block


def test_every_type_flavor_and_page_is_served():
    flavors = ((64, 64), (128, 128), (192, 128), (256, 256))
    half, fp8 = (DType.HALF, DType.BFLOAT16), (DType.FP8_E4M3, DType.FP8_E5M2)
    wanted = {
        (dtype, flavor, tile_m, box)
        for dtype in (*half, *fp8)
        for flavor in flavors
        for tile_m in (64, 128)
        for box in PAGE_BOXES
        # four warpgroups do not have the registers for so wide an output
        if not (dtype in fp8 and flavor == (256, 256) and tile_m == 128)
    }
    configs = shipped_configs()
    assert wanted == {
        (c.dtype, (c.head_dim_qk, c.head_dim_v), c.tile_m, c.page_box) for c in configs
    }
    assert all(c.o_dtype is (DType.NOT_SET if c.is_fp8 else c.dtype) for c in configs)


@pytest.mark.parametrize(
    ("base", "values", "subject"),
    [
        (BASE, {"dtype": DType.FLOAT}, "dtype"),
        (BASE, {"dtype": DType.INT32}, "dtype"),
        (BASE, {"o_dtype": DType.HALF}, "o_dtype"),
        (BASE, {"o_dtype": DType.NOT_SET}, "o_dtype"),
        (FP8, {"o_dtype": DType.BFLOAT16}, "o_dtype"),
        (FP8, {"o_dtype": DType.FP8_E4M3}, "o_dtype"),
        (BASE, {"head_dim_qk": 48}, "head_dim_qk"),
        (BASE, {"head_dim_qk": 72}, "head_dim_qk"),
        (FP8, {"head_dim_qk": 80}, "head_dim_qk"),
        (BASE, {"head_dim_v": 272}, "head_dim_v"),
        (BASE, {"head_dim_v": 0}, "head_dim_v"),
        (FP8, {"head_dim_v": 112}, "head_dim_v"),
        (BASE, {"tile_m": 32}, "tile_m"),
        (BASE, {"tile_m": 192}, "tile_m"),
        (BASE, {"page_box": 32}, "page_box"),
        (BASE, {"page_box": 1}, "page_box"),
        (BASE, {"tile_n": 96}, "tile_n"),
        (BASE, {"tile_n": 256}, "tile_n"),
        (BASE, {"num_stages": 1}, "num_stages"),
        (BASE, {"num_stages": 4}, "shared_memory"),
        (FP8, {"num_stages": 5}, "shared_memory"),
    ],
)
def test_infeasible_names_the_reason(base, values, subject):
    decline = changed(base, **values).infeasible()
    assert decline is not None
    assert (decline.code, decline.subject) == (DeclineCode.KERNEL_CONFIG, subject)
    assert decline.got in decline.render()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(head_dim_v=256), "for tiles and"),
        (changed(FP8, head_dim_v=256, tile_m=128, tile_n=64), "for tiles and"),
    ],
)
def test_infeasible_names_what_the_registers_lack(config, reason):
    decline = config.infeasible()
    assert decline is not None
    assert decline.subject == "registers"
    assert reason in decline.got


def test_neighbours_of_the_limits_are_feasible():
    for config in (
        BASE,
        FP8,
        changed(head_dim_qk=80),
        changed(head_dim_v=64),
        changed(FP8, head_dim_qk=192, head_dim_v=64),
        changed(head_dim_qk=256, head_dim_v=256, tile_n=64, num_stages=2),
    ):
        assert config.infeasible() is None, config.key()


@pytest.mark.parametrize("base", [BASE, FP8], ids=["half", "fp8"])
@pytest.mark.parametrize("tile_m", [64, 128])
def test_register_budget_of_an_sm_holds(base, tile_m):
    """What roles take after redistribution is at most what the block was given at its launch."""
    config = changed(base, tile_m=tile_m)
    producer, converter, consumer = config.registers()
    assert (converter > 0) == config.is_fp8
    assert all(count % 8 == 0 and count <= 255 for count in (producer, converter, consumer))
    taken = 128 * (producer + converter + config.num_consumers * consumer)
    assert config.num_threads == 128 * (1 + config.is_fp8 + config.num_consumers)
    launched = SM.registers_per_sm // config.num_threads // 8 * 8 * config.num_threads
    assert taken <= launched <= 65536


@pytest.mark.parametrize(
    ("sizes", "box"),
    [
        ((8,), 8),
        ((16,), 16),
        ((32, 32), 16),
        ((128, 16), 16),
        ((64, 8), 8),
        ((64, 256), 64),
        ((), 64),
        ((1,), 8),
    ],
)
def test_page_box_is_the_widest_that_no_page_cuts(sizes, box):
    assert page_box(sizes) == box


# keys


def test_every_field_is_in_the_config_key():
    assert set(OTHER) == {field.name for field in dataclasses.fields(BASE)}
    keys = {changed(**{name: value}).key() for name, value in OTHER.items()}
    assert len(keys | {BASE.key()}) == len(OTHER) + 1
    assert BASE.key() == DecodeSm90Config(DType.BFLOAT16, DType.BFLOAT16).key()


def test_key_text_is_stable():
    assert BASE.key() == (
        "decode_sm90(dtype=BFLOAT16,o_dtype=BFLOAT16,head_dim_qk=128,head_dim_v=128,"
        "tile_m=64,tile_n=128,num_stages=3,page_box=16)"
    )


def test_signature_holds_every_operand_of_the_entry():
    assert BASE.signature().key() == (
        "signature(amax_o:FLOAT@4,amax_s:FLOAT@4,descale_k:FLOAT@4,descale_q:FLOAT@4,"
        "descale_s:FLOAT@4,descale_v:FLOAT@4,k:BFLOAT16@16,k_table:INT32@4,o:BFLOAT16@16,"
        "o_offsets:INT32@4,q:BFLOAT16@16,q_offsets:INT32@4,scale_o:FLOAT@4,scale_s:FLOAT@4,"
        "seqlen_k:INT32@4,seqlen_q:INT32@4,sink:FLOAT@4,stats:FLOAT@4,stats_offsets:INT32@4,"
        "v:BFLOAT16@16,v_table:INT32@4)"
    )
    names = {operand.name for operand in FP8.signature().operands}
    assert names == set(DecodePointers._fields) - {"workspace"}
    for name, dtype in (("q", FP8.dtype), ("k", FP8.dtype), ("v", FP8.dtype), ("o", FP8.o_dtype)):
        operand = FP8.signature().get(name)
        assert (operand.dtype, operand.alignment) == (dtype, 16)


def test_signature_depends_on_the_types_only():
    for name, value in OTHER.items():
        same = changed(**{name: value}).signature() == BASE.signature()
        assert same == (name not in ("dtype", "o_dtype")), name


# host logic, run on this machine's processor


class Band(NamedTuple):
    """Host arguments of a mask: DecodeForms' words."""

    left: int
    right: int
    bottom_right: int


class Sides(NamedTuple):
    """Host arguments: arrays of 32-bit lengths, and what the declaration says at most."""

    q: int
    k: int
    declared_q: int
    declared_k: int


def pointer():
    """An example argument that stands for an array of 32-bit integers."""
    cutlass = pytest.importorskip("cutlass")
    from cutlass.cute.runtime import nullptr

    return nullptr(cutlass.Int32, cutlass.cute.AddressSpace.generic, assumed_align=4)


@functools.cache
def device_type(kind: type) -> type:
    """A tuple of host arguments with device types: arrays for `q` and `k`, else integers."""
    from cutlass import Int32, cute

    types = [(name, cute.Pointer if name in ("q", "k") else Int32) for name in kind._fields]
    return NamedTuple(f"Host{kind.__name__}", types)


def example(kind: type):
    """An example argument that stands for such a tuple."""
    from cutlass import Int32

    made = [pointer() if name in ("q", "k") else Int32(1) for name in kind._fields]
    return device_type(kind)(*made)


def draw_band(rng: random.Random) -> Band:
    """A band that is not empty: no bound, or small ones of either sign."""
    left = rng.choice([-UNBOUNDED, rng.randint(-40, 20)])
    right = rng.choice([UNBOUNDED, rng.randint(max(left, -40), 40)])
    return Band(left, right, rng.randint(0, 1))


def seen_keys(len_q: int, len_k: int, band: Band):
    """(query, key): does the row see it."""
    numpy = pytest.importorskip("numpy")
    i, j = numpy.arange(len_q)[:, None], numpy.arange(len_k)[None, :]
    shift = len_k - len_q if band.bottom_right else 0
    return (i + shift + band.left <= j) & (j <= i + shift + band.right)


def read_lengths():
    """A host function that writes `Lengths.of` for every sequence."""
    import cutlass
    from cutlass import Int32, cute

    from cudnn_frost.kernels.common.sequences import Lengths

    @cute.jit
    def lengths_of(
        out: cute.Pointer,
        words: cute.Pointer,
        form: Int32,
        width: Int32,
        declared: Int32,
        batch: Int32,
    ):
        lengths = Lengths(words, form, width, declared)
        result = cute.make_tensor(out, cute.make_layout(batch))
        for i in cutlass.range(batch):
            result[i] = lengths.of(i)

    return host_compile(lengths_of, pointer(), pointer(), *[Int32(1)] * 4)


def test_lengths_are_read_in_every_form():
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("cutlass")
    lengths_of = read_lengths()
    rng, declared = numpy.random.default_rng(0), 100
    lengths = rng.integers(0, declared + 1, 37)
    sums = numpy.concatenate([[0], numpy.cumsum(lengths)])

    def check(form, stored, step, expected):
        out = numpy.full(len(lengths), -1, numpy.int32)
        lengths_of(out.ctypes.data, stored.ctypes.data, form, step, declared, len(lengths))
        assert (out == expected).all(), (form, stored.dtype, step)

    nothing = numpy.zeros(0, numpy.int32)
    check(0, nothing, 0, declared)
    for dtype, words in ((numpy.int32, 1), (numpy.int64, 2)):
        check(1, lengths.astype(dtype), words, lengths)
        check(2, sums.astype(dtype), words, lengths)
        # every third integer of an array
        apart = numpy.full(3 * len(sums), 77, dtype)
        apart[::3] = sums
        check(2, apart, 3 * words, lengths)
    # sums beyond 32 bits, of which differences need the low word only
    check(2, sums.astype(numpy.int64) + (1 << 32) - declared, 2, lengths)


def test_lengths_are_clamped_to_the_declared():
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("cutlass")
    lengths_of = read_lengths()
    declared, top = 100, 2**31 - 1
    stored = numpy.array([-1, 0, 100, 101, top, -top - 1], numpy.int64)
    for dtype, words in ((numpy.int32, 1), (numpy.int64, 2)):
        values = stored.astype(dtype)
        out = numpy.full(len(stored), -1, numpy.int32)
        lengths_of(out.ctypes.data, values.ctypes.data, 1, words, declared, len(out))
        assert list(out) == [0, 0, 100, 100, 100, 0]
    sums = numpy.array([5, 3, 3, 303, 7], numpy.int32)
    out = numpy.full(4, -1, numpy.int32)
    lengths_of(out.ctypes.data, sums.ctypes.data, 2, 1, declared, 4)
    assert list(out) == [0, 0, 100, 0]
    garbage = numpy.random.default_rng(0).integers(-(2**31), 2**31, 4001).astype(numpy.int32)
    for form in (1, 2):
        out = numpy.full(2000, -1, numpy.int32)
        lengths_of(out.ctypes.data, garbage.ctypes.data, form, 2, declared, len(out))
        assert out.min() == 0
        assert out.max() == declared


def test_offsets_are_read_in_both_widths():
    numpy = pytest.importorskip("numpy")
    cutlass = pytest.importorskip("cutlass")
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import nullptr

    from cudnn_frost.kernels.common.sequences import read_offset

    @cute.jit
    def offsets_of(
        out: cute.Pointer, words: cute.Pointer, width: Int32, batch: Int32, multiplier: Int64
    ):
        result = cute.make_tensor(out, cute.make_layout(batch))
        for i in cutlass.range(batch):
            result[i] = read_offset(words, width, i, multiplier)

    out64 = nullptr(Int64, cute.AddressSpace.generic, assumed_align=8)
    run = host_compile(offsets_of, out64, pointer(), Int32(1), Int32(1), Int64(1))
    low = numpy.array([0, 1, 77, 2**31 - 1, 2**20], numpy.int64)
    high = numpy.array([2**31, 2**32 - 1, 2**32, 2**32 + 5, 3 * 2**33 + 2**31 + 7, 2**40])
    both = numpy.concatenate([low, high])
    for stored, width in ((low.astype(numpy.int32), 1), (both, 2)):
        for multiplier in (1, 128, 96 * 128, 2**20 + 1):
            out = numpy.full(len(stored), -1, numpy.int64)
            run(out.ctypes.data, stored.ctypes.data, width, len(out), multiplier)
            assert (out == stored.astype(numpy.int64) * multiplier).all(), (width, multiplier)


def write_keys(tile_n: int):
    """A host function that writes `Sequences.keys` of every sequence."""
    import cutlass
    from cutlass import Int32, cute

    from cudnn_frost.kernels.common.sequences import Lengths, Sequences

    HostBand, HostSides = device_type(Band), device_type(Sides)

    @cute.jit
    def keys_of(out: cute.Pointer, sides: HostSides, band: HostBand, batch: Int32):
        sequences = Sequences(
            batch,
            Int32(1),
            Lengths(sides.q, Int32(1), Int32(1), sides.declared_q),
            Lengths(sides.k, Int32(1), Int32(1), sides.declared_k),
            band.left,
            band.right,
            band.bottom_right,
            tile_n,
        )
        result = cute.make_tensor(out, cute.make_layout((batch, 8), stride=(8, 1)))
        for i in cutlass.range(batch):
            keys = sequences.keys(i)
            for field in cutlass.range_constexpr(8):
                result[i, field] = keys[field]

    run = host_compile(keys_of, pointer(), example(Sides), example(Band), Int32(1))

    def of(lens_q, lens_k, declared, band):
        """(len_q, len_k, left, right, first, end, n_first, n_tiles) of every sequence."""
        numpy = pytest.importorskip("numpy")
        q, k = numpy.array(lens_q, numpy.int32), numpy.array(lens_k, numpy.int32)
        out = numpy.full((len(q), 8), -1, numpy.int32)
        run(out.ctypes.data, Sides(q.ctypes.data, k.ctypes.data, *declared), band, len(q))
        return [[int(value) for value in row] for row in out]

    return of


@pytest.mark.parametrize("tile_n", [8, 64])
def test_keys_are_those_that_the_rows_see(tile_n):
    pytest.importorskip("cutlass")
    keys_of = write_keys(tile_n)
    rng = random.Random(2)
    for _ in range(150):
        band = draw_band(rng)
        lens_q = [rng.randint(0, 20) for _ in range(12)]
        lens_k = [rng.choice([0, rng.randint(1, 20), rng.randint(1, 200)]) for _ in range(12)]
        found = keys_of(lens_q, lens_k, (20, 200), band)
        for len_q, len_k, keys in zip(lens_q, lens_k, found, strict=True):
            case = (len_q, len_k, band, keys)
            shift = len_k - len_q if band.bottom_right else 0
            assert keys[:4] == [len_q, len_k, band.left + shift, band.right + shift], case
            first, end, n_first, n_tiles = keys[4:]
            columns = seen_keys(len_q, len_k, band).any(axis=0).nonzero()[0]
            if len(columns) == 0:
                assert first == end, case
                assert n_tiles == 1, case
            else:
                assert (first, end) == (columns[0], columns[-1] + 1), case
                assert n_first == first // tile_n, case
                assert n_tiles == -(-end // tile_n) - n_first, case


def test_keys_of_the_longest_sequences_do_not_overflow():
    pytest.importorskip("cutlass")
    keys_of = write_keys(128)
    longest = UNBOUNDED - 1
    lens = [(1, longest), (longest, longest), (longest, 1), (64, longest), (0, longest)]
    for left in (-UNBOUNDED, -5, UNBOUNDED):
        for right in (UNBOUNDED, 0):
            for bottom_right in (0, 1):
                band = Band(left, right, bottom_right)
                found = keys_of(*zip(*lens, strict=True), (longest, longest), band)
                for (len_q, len_k), keys in zip(lens, found, strict=True):
                    shift = (len_k - len_q) * bottom_right
                    end = max(min(len_k, len_q + right + shift), 0) if len_q else 0
                    first = min(max(left + shift, 0), end)
                    tiles = max(-(-end // 128) - first // 128, 1)
                    assert keys[4:] == [first, end, first // 128, tiles], (len_q, len_k, band)


class Chunk(NamedTuple):
    """Host arguments of one thread block: its place among all, and how they share."""

    index: int
    num_chunks: int
    divide: int
    m_block: int


class Part(NamedTuple):
    """What a thread block made of a piece of its share."""

    batch: int
    head: int
    tile: int
    taken: int
    n_begin: int
    count: int
    is_whole: int
    slot: int


MOST_PARTS = 400
TILE_M, TILE_N = 16, 8


class Case(NamedTuple):
    lens_q: list[int]
    lens_k: list[int]
    num_heads: int
    group: int
    band: Band


def serial_sequences():
    """`Sequences` for a host function."""
    import cutlass
    from cutlass import Int32, cute

    from cudnn_frost.kernels.common.sequences import Place, Sequences

    class Serial(Sequences):
        """The two scans that take a whole warp, by one thread."""

        @cute.jit
        def total_tiles(self) -> Int32:
            total = Int32(0)
            for batch in cutlass.range(self.batch):
                total += self._tiles(batch)
            return total

        @cute.jit
        def place(self, start: Int32) -> Place:
            batch, passed = Int32(0), Int32(0)
            while (batch < self.batch) & (passed + self._tiles(batch) <= start):
                passed += self._tiles(batch)
                batch += 1
            head, tile = Int32(0), Int32(0)
            if batch < self.batch:
                n_tiles = self.keys(batch).n_tiles
                head, tile = (start - passed) // n_tiles, (start - passed) % n_tiles
            return Place(start, batch, head, tile)

    return Serial


def walk_spans():
    """A host function that walks a thread block's share and writes every `Span` of it."""
    import cutlass
    from cutlass import Int32, cute

    from cudnn_frost.kernels.common.sequences import Lengths
    from cudnn_frost.kernels.sm90.decode import Walk, Work

    Serial = serial_sequences()
    HostBand, HostSides = device_type(Band), device_type(Sides)
    HostChunk = device_type(Chunk)

    @cute.jit
    def walk_share(
        out: cute.Pointer,
        sides: HostSides,
        band: HostBand,
        chunk: HostChunk,
        batch: Int32,
        num_heads: Int32,
        group: Int32,
    ):
        sequences = Serial(
            batch,
            num_heads,
            Lengths(sides.q, Int32(1), Int32(1), sides.declared_q),
            Lengths(sides.k, Int32(1), Int32(1), sides.declared_k),
            band.left,
            band.right,
            band.bottom_right,
            TILE_N,
        )
        start, length = sequences.share(chunk.index, chunk.num_chunks, chunk.divide)
        walk = Walk(start.batch, start.head, start.tile, length)
        work = Work(sequences, walk, chunk.m_block, group, TILE_M)
        result = cute.make_tensor(out, cute.make_layout((MOST_PARTS, 8), stride=(8, 1)))
        count = Int32(0)
        # a share that never ends must not write beyond the array
        while (walk.remaining > 0) & (count < MOST_PARTS):
            span = work.span(walk)
            place = (walk.batch, walk.head, walk.tile, span.taken, span.n_begin, span.count)
            for field in cutlass.range_constexpr(6):
                result[count, field] = place[field]
            result[count, 6] = Int32(1) if span.is_whole else Int32(0)
            result[count, 7] = span.slot
            count += 1
            walk = work.next(walk, span.taken)

    examples = [example(kind) for kind in (Sides, Band, Chunk)]
    run = host_compile(walk_share, pointer(), *examples, *[Int32(1)] * 3)

    def share(case: Case, chunk: Chunk) -> list[Part]:
        numpy = pytest.importorskip("numpy")
        # lengths past the last sequence are read when a share does not end where it should
        q, k = numpy.zeros((2, MOST_PARTS + 99), numpy.int32)
        q[: len(case.lens_q)], k[: len(case.lens_k)] = case.lens_q, case.lens_k
        out = numpy.full((MOST_PARTS, 8), -1, numpy.int32)
        sides = Sides(q.ctypes.data, k.ctypes.data, 20, 100)
        run(out.ctypes.data, sides, case.band, chunk, len(case.lens_q), case.num_heads, case.group)
        return [Part(*map(int, row)) for row in out if row[0] >= 0]

    return share


def draw_case(rng: random.Random) -> Case:
    batch = rng.randint(1, 5)
    lens_q = [rng.randint(0, 20) for _ in range(batch)]
    lens_k = [rng.choice([0, rng.randint(1, 20), rng.randint(1, 100)]) for _ in range(batch)]
    return Case(lens_q, lens_k, rng.randint(1, 3), rng.randint(1, 5), draw_band(rng))


def blocks(seen) -> range:
    """The blocks of keys from the first to the last that any of these rows sees."""
    columns = seen.any(axis=0).nonzero()[0]
    return range(columns[0] // TILE_N, columns[-1] // TILE_N + 1) if len(columns) else range(0)


def line_of(case: Case) -> list[tuple[int, int, int]]:
    """(batch, head, index among the sequence's blocks) of every block of keys, in order."""
    line = []
    for batch, (len_q, len_k) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
        tiles = max(len(blocks(seen_keys(len_q, len_k, case.band))), 1)
        for head in range(case.num_heads):
            line += [(batch, head, tile) for tile in range(tiles)]
    return line


def chunk_starts(line, num_chunks: int, divide: bool) -> list[int]:
    """Where each chunk begins in the line, and the line's end."""
    chunk = -(-len(line) // num_chunks)
    starts = [min(index * chunk, len(line)) for index in range(num_chunks + 1)]
    if not divide:
        heads = [i for i, (_, _, tile) in enumerate(line) if tile == 0] + [len(line)]
        starts = [next(i for i in heads if i >= start) for start in starts]
    return starts


def check_shares(case: Case, m_block: int, starts: list[int], shares: list[list[Part]]) -> None:
    """One row of thread blocks: their parts are the line, and hold what their rows see."""
    line = line_of(case)
    index_of = {place: index for index, place in enumerate(line)}
    chunk = max(end - start for start, end in itertools.pairwise(starts))
    covered: dict[tuple[int, int], list[int]] = {}
    for chunk_idx, parts in enumerate(shares):
        detail = (case, m_block, chunk_idx, parts)
        walked = [(p.batch, p.head, p.tile + i) for p in parts for i in range(p.taken)]
        assert walked == line[starts[chunk_idx] : starts[chunk_idx + 1]], detail
        slots = [p.slot for p in parts if not p.is_whole]
        assert len(set(slots)) == len(slots), detail
        for p in parts:
            seen = seen_keys(case.lens_q[p.batch], case.lens_k[p.batch], case.band)
            n_first, n_tiles = blocks(seen).start, max(len(blocks(seen)), 1)
            used = list(range(p.n_begin, p.n_begin + p.count))
            share = range(n_first + p.tile, n_first + p.tile + p.taken)
            assert set(used) <= set(share), detail
            covered.setdefault((p.batch, p.head), []).extend(used)
            assert p.is_whole == (p.taken == n_tiles), detail
            # the combining kernel reads slot 1 of the chunk a sequence begins in, 0 of others
            first_chunk = index_of[p.batch, p.head, 0] // chunk
            assert p.is_whole or p.slot == (chunk_idx == first_chunk), detail
    for (batch, head), used in covered.items():
        seen = seen_keys(case.lens_q[batch], case.lens_k[batch], case.band)
        first, end = m_block * TILE_M // case.group, -(-(m_block + 1) * TILE_M // case.group)
        assert used == list(blocks(seen[first:end])), (case, m_block, batch, head)


@pytest.mark.parametrize("divide", [True, False], ids=["divided", "whole"])
def test_spans_cover_what_their_rows_see_and_nothing_else(divide):
    pytest.importorskip("cutlass")
    walk_share = walk_spans()
    rng = random.Random(3)
    divided = 0
    for _ in range(200):
        case, num_chunks = draw_case(rng), rng.randint(1, 12)
        line = line_of(case)
        starts = chunk_starts(line, num_chunks, divide)
        for m_block in range(-(-20 * case.group // TILE_M)):
            shares = []
            for index in range(num_chunks):
                shares.append(walk_share(case, Chunk(index, num_chunks, int(divide), m_block)))
            check_shares(case, m_block, starts, shares)
            divided += sum(not part.is_whole for parts in shares for part in parts)
    assert (divided > 0) == divide


@pytest.mark.parametrize("base", [BASE, FP8], ids=["half", "fp8"])
def test_partial_rows_fill_the_workspace(base):
    """Every slot's rows have places of their own, and together they are `workspace_bytes`."""
    numpy = pytest.importorskip("numpy")
    cutlass = pytest.importorskip("cutlass")
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import nullptr

    from cudnn_frost.kernels.sm90.combine import Combine, Problem

    config = changed(base, head_dim_v=64)

    @cute.jit
    def places(out: cute.Pointer, num_chunks: Int32, num_m_blocks: Int32, slot: Int32, row: Int32):
        problem = Problem(None, None, None, None, None, num_chunks, num_m_blocks)
        result = cute.make_tensor(out, cute.make_layout((num_chunks, 2), stride=(2, 1)))
        for chunk in cutlass.range(num_chunks):
            part = Combine(config).partial_row(problem, chunk, slot, row)
            result[chunk, 0], result[chunk, 1] = part.o, part.state

    out64 = nullptr(Int64, cute.AddressSpace.generic, assumed_align=8)
    run = host_compile(places, out64, *[Int32(1)] * 4)
    num_chunks, num_m_blocks = 5, 2
    uses = numpy.zeros(config.workspace_bytes(num_chunks, num_m_blocks) // 4, numpy.int32)
    for slot in range(SLOTS_PER_CHUNK):
        for row in range(num_m_blocks * config.tile_m):
            out = numpy.full((num_chunks, 2), -1, numpy.int64)
            run(out.ctypes.data, num_chunks, num_m_blocks, slot, row)
            for o, state in out:
                assert o % 4 == 0
                uses[o : o + config.head_dim_v] += 1
                uses[state : state + 2] += 1
    assert (uses == 1).all()
    # a grid of this size needs more than 32 bits
    out = numpy.full((70_000, 2), -1, numpy.int64)
    run(out.ctypes.data, len(out), 1000, 1, 63)
    rows = 1000 * config.tile_m
    indices = (numpy.arange(len(out)) * SLOTS_PER_CHUNK + 1) * rows + 63
    assert (out[:, 0] == indices * config.head_dim_v).all()
    state = len(out) * SLOTS_PER_CHUNK * rows * config.head_dim_v
    assert (out[:, 1] == state + indices * 2).all()


# machine code


def products(config: DecodeSm90Config) -> tuple[tuple[str, int], tuple[str, int]]:
    """(instruction, number for one block of keys) of Q K^T and of P V."""
    qk, depth = {
        DType.HALF: ("HGMMA.64x{}x16.F32", 16),
        DType.BFLOAT16: ("HGMMA.64x{}x16.F32.BF16", 16),
        DType.FP8_E4M3: ("QGMMA.64x{}x32.F32.E4M3.E4M3", 32),
        DType.FP8_E5M2: ("QGMMA.64x{}x32.F32.E5M2.E5M2", 32),
    }[config.dtype]
    pv = "HGMMA.64x{}x16.F32" + (".BF16" if config.dtype is DType.BFLOAT16 else "")
    return (
        (qk.format(config.tile_n), config.head_dim_qk // depth),
        (pv.format(config.head_dim_v), config.tile_n // 16),
    )


def only(functions: dict[str, str], word: str) -> str:
    """The one function whose name holds that word."""
    (text,) = (text for name, text in functions.items() if word in name)
    return text


@pytest.mark.parametrize("config", shipped_configs(), ids=lambda config: config.key())
def test_shipped_config_compiles_for_hopper(config, tmp_path):
    decode = pytest.importorskip("cudnn_frost.kernels.sm90.decode")
    library = tmp_path / "kernel.so"
    artifacts.export(decode.compile(config, config.signature()), library)
    functions = sass_of(library, tmp_path)
    for name, text in functions.items():
        assert spills(text) == [], name
    # the maxima are reset by a kernel of their own
    assert len(functions) == (3 if config.is_fp8 else 2)
    assert "USETMAXREG" not in only(functions, "Combine")
    sass = only(functions, "kernel_cutlass_kernel_cudnn_frostkernelssm90decode")
    (qk, qk_count), (pv, pv_count) = products(config)
    # both operands of the first product are in shared memory, P is in registers
    for pattern, count in (
        (rf"{re.escape(qk)} R\d+, gdesc", qk_count),
        (rf"{re.escape(pv)} R\d+, R\d+, gdesc\[UR\d+\]\.tnspB", pv_count),
    ):
        found = len(re.findall(pattern, sass))
        assert found > 0, pattern
        assert found % count == 0, (pattern, found)
    total = len(re.findall(r"\b[A-Z]GMMA\.", sass))
    assert total == sass.count(f"{qk} ") + (sass.count(f"{pv} ") if pv != qk else 0)
    assert sass.count("UTMALDG.4D") >= 2 * config.tile_n // config.page_box
    for registers in filter(None, config.registers()):
        assert re.search(rf"USETMAXREG\.[^;]*\b{registers:#x} ;", sass), registers
    assert artifacts.load(library) is not None


def test_compile_refuses_what_it_cannot_build():
    decode = pytest.importorskip("cudnn_frost.kernels.sm90.decode")
    with pytest.raises(ValueError, match="tile_n is 96"):
        decode.compile(changed(tile_n=96), BASE.signature())
    with pytest.raises(ValueError, match="shared_memory"):
        decode.compile(changed(num_stages=4), BASE.signature())
    with pytest.raises(ValueError, match="FP8_E4M3"):
        decode.compile(BASE, FP8.signature())


def test_smem_bytes_is_what_the_kernel_allocates(monkeypatch):
    """Every compile asserts it; here the assertion is seen to fire."""
    decode = pytest.importorskip("cudnn_frost.kernels.sm90.decode")
    smem_bytes = DecodeSm90Config.smem_bytes
    monkeypatch.setattr(DecodeSm90Config, "smem_bytes", lambda self: smem_bytes(self) + 1024)
    with pytest.raises(Exception, match="smem_bytes"):
        decode.compile(BASE, BASE.signature())


@pytest.mark.parametrize("config", [BASE, FP8], ids=["half", "fp8"])
def test_call_without_a_driver_raises(config, tmp_path):
    """The exported function takes DecodeArgs as they are, and reports CUDA's error."""
    decode = pytest.importorskip("cudnn_frost.kernels.sm90.decode")
    library = tmp_path / "kernel.so"
    artifacts.export(decode.compile(config, config.signature()), library)
    args = DecodeArgs(
        DecodePointers(*[0] * len(DecodePointers._fields)),
        DecodeExtents(1, 1, 1, 1, 64, 128, 128, 1, 64, 1, 64),
        DecodeStrides(*[128] * len(DecodeStrides._fields)),
        DecodeForms(*[0] * len(DecodeForms._fields)),
        1.0,
        1.0,
        132,
        1,
        0,
    )
    entry = artifacts.load(library)
    with pytest.raises(TypeError):
        entry(*args[:-1])
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(RuntimeError, match="[Cc]uda"):
            entry(*args)

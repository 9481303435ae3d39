"""Per-batch lengths read on the device, and the division of all their keys among thread blocks."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

_WARP = 32


class Keys(NamedTuple):
    """What the rows of one sequence see.

    left, right: row i sees keys i + left <= j <= i + right.
    first, end: keys that any row sees. n_first, n_tiles: the blocks that hold them; a sequence
    without a key has one block all the same, so that its rows are written.
    """

    len_q: Int32
    len_k: Int32
    left: Int32
    right: Int32
    first: Int32
    end: Int32
    n_first: Int32
    n_tiles: Int32


class Place(NamedTuple):
    """A block among those of all sequences; `batch` is their number where there is no such block.

    start: its index there. tile: its index among its sequence's.
    """

    start: Int32
    batch: Int32
    head: Int32
    tile: Int32


class Share(NamedTuple):
    """Consecutive blocks: the first, and how many."""

    start: Place
    length: Int32


@dataclass(frozen=True)
class Lengths:
    """One side's lengths: `words` are 32-bit words, `width` from one integer to the next.

    form: 0 every sequence has the declared length, 1 lengths, 2 their prefix sums.
    """

    words: cute.Pointer
    form: Int32
    width: Int32
    declared: Int32

    @cute.jit
    def of(self, batch: Int32) -> Int32:
        """At most the declared length, whatever was stored; the low word says all of it."""
        length = self.declared
        if self.form != 0:
            words = cute.make_tensor(self.words, cute.make_layout(1 << 30))
            length = words[batch * self.width]
            if self.form == 2:
                length = words[(batch + 1) * self.width] - length
        return cutlass.max(cutlass.min(length, self.declared), 0)


@cute.jit
def read_offset(words: cute.Pointer, width: Int32, batch: Int32, multiplier: Int64) -> Int64:
    """Where a packed sequence starts, in elements."""
    tensor = cute.make_tensor(words, cute.make_layout(1 << 30))
    offset = Int64(tensor[batch * width])
    if width == 2:
        high = Int64(tensor[batch * 2 + 1])
        offset = (high << 32) | (offset & 0xFFFFFFFF)
    return offset * multiplier


@dataclass(frozen=True)
class Sequences:
    """Every sequence's keys, and the blocks of `tile_n` keys they are cut into."""

    batch: Int32
    num_heads: Int32
    lengths_q: Lengths
    lengths_k: Lengths
    left: Int32
    right: Int32
    bottom_right: Int32
    tile_n: Constexpr[int]

    @cute.jit
    def keys(self, batch: Int32) -> Keys:
        len_q, len_k = self.lengths_q.of(batch), self.lengths_k.of(batch)
        shift = self.bottom_right * (len_k - len_q)
        left, right = self.left + shift, self.right + shift
        end = cutlass.max(cutlass.min(len_k, len_q + right), 0)
        end = end if len_q > 0 else Int32(0)
        first = cutlass.min(cutlass.max(left, 0), end)
        n_first = first // self.tile_n
        n_tiles = cutlass.max((end + self.tile_n - 1) // self.tile_n - n_first, 1)
        return Keys(len_q, len_k, left, right, first, end, n_first, n_tiles)

    @cute.jit
    def _tiles(self, batch: Int32) -> Int32:
        """Blocks of all heads of one sequence; 0 past the last one."""
        tiles = Int32(0)
        if batch < self.batch:
            tiles = self.keys(batch).n_tiles * self.num_heads
        return tiles

    @cute.jit
    def total_tiles(self) -> Int32:
        """By a whole warp."""
        lane = cute.arch.lane_idx()
        total = Int32(0)
        for first in cutlass.range(0, self.batch, _WARP, unroll=4):
            total += self._tiles(first + lane)
        return cute.arch.warp_reduction(total, _add)

    @cute.jit
    def tiles_before(self, batch: Int32) -> Int32:
        """Blocks of all sequences before one; by a whole warp."""
        lane = cute.arch.lane_idx()
        total = Int32(0)
        for first in cutlass.range(0, batch, _WARP, unroll=4):
            index = first + lane
            total += self._tiles(index) if index < batch else Int32(0)
        return cute.arch.warp_reduction(total, _add)

    @cute.jit
    def place(self, start: Int32) -> Place:
        """Where the block of that index is; by a whole warp."""
        lane = cute.arch.lane_idx()
        passed, sequences, base = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.batch, _WARP, unroll=4):
            end = self._tiles(first + lane)
            for i in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(end, 1 << i, mask_and_clamp=0)
                end += below if lane >= (1 << i) else Int32(0)
            end += base
            base = cute.arch.shuffle_sync(end, _WARP - 1)
            if end <= start and first + lane < self.batch:
                passed, sequences = end, sequences + 1
        passed = cute.arch.warp_reduction(passed, cutlass.max)
        batch = cute.arch.warp_reduction(sequences, _add)
        head, tile = Int32(0), Int32(0)
        if batch < self.batch:
            n_tiles = self.keys(batch).n_tiles
            head, tile = (start - passed) // n_tiles, (start - passed) % n_tiles
        return Place(start, batch, head, tile)

    @cute.jit
    def sequence_start(self, place: Place) -> Place:
        """The first block from there on with which a sequence's head starts."""
        if place.tile > 0:
            place = self.place(place.start + self.keys(place.batch).n_tiles - place.tile)
        return place

    @cute.jit
    def share(self, index: Int32, num_shares: Int32, divide: Int32) -> Share:
        """An equal part of all blocks; without `divide`, rounded to whole sequences' heads."""
        total = self.total_tiles()
        length = cute.ceil_div(total, num_shares)
        start = self.place(index * length)
        end = cutlass.min((index + 1) * length, total)
        if divide == 0:
            start = self.sequence_start(start)
            end = self.sequence_start(self.place(end)).start
        return Share(start, cutlass.max(end - start.start, 0))


def _add(a: Int32, b: Int32) -> Int32:
    return a + b

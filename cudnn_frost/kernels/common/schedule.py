"""Which query block a persistent thread block computes in which round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64

# keys and values of one section's heads should stay in the second-level cache
_SECTION_BYTES = 32 * 1024 * 1024
# fewer rounds than this leave a section's work uneven over the thread blocks
_SECTION_ROUNDS = 4


class Tile(NamedTuple):
    """head counts over batch and query heads together."""

    m_block: Int32
    head: Int32
    is_valid: Boolean


@dataclass(frozen=True)
class TileSchedule:
    """Rounds of one tile for each thread block.

    In order, a head's query blocks follow each other, so neighbours share keys. Longest first
    (a causal mask makes late query blocks longer), heads are taken in sections: within one, all
    heads' last query blocks come first, and every other round runs over the thread blocks
    backwards, which evens out their work.
    """

    num_ctas: Int32
    num_m_blocks: Int32
    num_heads: Int32
    section_heads: Int32
    section_rounds: Int32
    num_rounds: Int32
    longest_first: Constexpr[bool]

    @classmethod
    def in_order(cls, num_ctas: Int32, num_m_blocks: Int32, num_heads: Int32) -> TileSchedule:
        num_rounds = cute.ceil_div(num_m_blocks * num_heads, num_ctas)
        return cls(num_ctas, num_m_blocks, num_heads, num_heads, num_rounds, num_rounds, False)

    @classmethod
    def longest(
        cls, num_ctas: Int32, num_m_blocks: Int32, num_heads: Int32, head_bytes: Int64
    ) -> TileSchedule:
        """head_bytes: keys and values of one query head, shared ones counted once a group."""
        cached = Int32(cutlass.min(cutlass.max(_SECTION_BYTES // head_bytes, 1), num_heads))
        even = cute.ceil_div(_SECTION_ROUNDS * num_ctas, num_m_blocks)
        num_sections = cutlass.max(num_heads // cutlass.max(cached, even), 1)
        section_heads = cute.ceil_div(num_heads, num_sections)
        section_rounds = cute.ceil_div(section_heads * num_m_blocks, num_ctas)
        num_rounds = cute.ceil_div(num_heads, section_heads) * section_rounds
        return cls(
            num_ctas, num_m_blocks, num_heads, section_heads, section_rounds, num_rounds, True
        )

    @cute.jit
    def tile(self, cta: Int32, round_idx: Int32) -> Tile:
        if cutlass.const_expr(self.longest_first):
            section = round_idx // self.section_rounds
            is_backward = (round_idx + section) % 2
            position = round_idx % self.section_rounds * self.num_ctas
            position += self.num_ctas - 1 - cta if is_backward == 1 else cta
            first_head = section * self.section_heads
            width = cutlass.min(self.section_heads, self.num_heads - first_head)
            m_block = self.num_m_blocks - 1 - position // width
            return Tile(m_block, first_head + position % width, m_block >= 0)
        position = round_idx * self.num_ctas + cta
        head = position // self.num_m_blocks
        return Tile(position % self.num_m_blocks, head, head < self.num_heads)

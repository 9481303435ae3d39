"""Which query block a persistent thread block computes in which round."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

# Few heads at a time keep their keys and values in the second-level cache; with fewer rounds
# the thread blocks' shares of a section's work would not come out even.
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
        cls, num_ctas: Int32, num_m_blocks: Int32, num_heads: Int32, group: Int32
    ) -> TileSchedule:
        """group: neighbouring heads that share keys and values, kept in one section."""
        wanted_heads = cutlass.max(_SECTION_ROUNDS * num_ctas // num_m_blocks, 1)
        num_sections = cute.ceil_div(num_heads, wanted_heads)
        num_groups = cute.ceil_div(cute.ceil_div(num_heads, num_sections), group)
        section_heads = cutlass.min(num_groups * group, num_heads)
        section_rounds = cute.ceil_div(section_heads * num_m_blocks, num_ctas)
        num_rounds = cute.ceil_div(num_heads, section_heads) * section_rounds
        return cls(
            num_ctas, num_m_blocks, num_heads, section_heads, section_rounds, num_rounds, True
        )

    @cute.jit
    def tile(self, cta: Int32, round_idx: Int32) -> Tile:
        if cutlass.const_expr(self.longest_first):
            section = round_idx // self.section_rounds
            section_round = round_idx % self.section_rounds
            is_backward = (section_round + section) % 2 == 1
            position = section_round * self.num_ctas
            position += self.num_ctas - 1 - cta if is_backward else cta
            first_head = section * self.section_heads
            width = cutlass.min(self.section_heads, self.num_heads - first_head)
            m_block = self.num_m_blocks - 1 - position // width
            return Tile(m_block, first_head + position % width, m_block >= 0)
        position = round_idx * self.num_ctas + cta
        head = position // self.num_m_blocks
        return Tile(position % self.num_m_blocks, head, head < self.num_heads)

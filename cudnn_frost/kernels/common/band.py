"""Which keys a query row sees, as block ranges and as a mask: one object, read by every role."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from .layouts import ROWS_PER_THREAD, acc_column, as_rows


@dataclass(frozen=True)
class Band:
    """Row i sees key j when 0 <= j < seqlen_k and i + left < j <= i + right."""

    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32
    right: Int32
    has_left: Constexpr[bool]
    has_right: Constexpr[bool]
    tile_m: Constexpr[int]
    tile_n: Constexpr[int]

    @cute.jit
    def n_block_range(self, m_block: Int32) -> tuple[Int32, Int32]:
        """[first, end) of the key blocks a query block needs; empty when end <= first."""
        first, end = Int32(0), self.seqlen_k
        if cutlass.const_expr(self.has_right):
            last_row = cutlass.min((m_block + 1) * self.tile_m, self.seqlen_q) - 1
            end = cutlass.max(cutlass.min(end, last_row + self.right + 1), 0)
        if cutlass.const_expr(self.has_left):
            first = cutlass.max(m_block * self.tile_m + self.left + 1, 0)
            end = end if first < end else Int32(0)
        return first // self.tile_n, (end + self.tile_n - 1) // self.tile_n

    @cute.jit
    def unmasked_end(self, m_block: Int32, n_first: Int32, n_end: Int32) -> Int32:
        """Blocks from here to n_end cross the right bound; n_end - 1 may cross seqlen_k too."""
        unmasked = n_end
        if cutlass.const_expr(self.has_right):
            visible = m_block * self.tile_m + self.right + 1
            unmasked = cutlass.min(n_end, cutlass.max(visible, 0) // self.tile_n)
        return cutlass.max(unmasked, n_first)

    @cute.jit
    def unmasked_first(self, m_block: Int32, n_first: Int32, n_end: Int32) -> Int32:
        """Blocks from n_first to here cross the left bound."""
        unmasked = n_first
        if cutlass.const_expr(self.has_left):
            hidden = cutlass.max((m_block + 1) * self.tile_m + self.left, 0)
            unmasked = cutlass.max(n_first, (hidden + self.tile_n - 1) // self.tile_n)
        return cutlass.min(unmasked, n_end)

    @cute.jit
    def apply(self, acc_S: cute.Tensor, first_row: Int32, first_column: Int32) -> None:
        """Scores of unseen keys become -inf. Both indices are those of the thread's element 0."""
        rows = as_rows(acc_S)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = first_row + 8 * r
            end = self.seqlen_k
            if cutlass.const_expr(self.has_right):
                end = cutlass.min(end, row + self.right + 1)
            end -= first_column
            first = row + self.left + 1 - first_column
            for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                seen = acc_column(j) < end
                if cutlass.const_expr(self.has_left):
                    seen = seen & (acc_column(j) >= first)
                rows[r, j] = rows[r, j] if seen else -Float32.inf

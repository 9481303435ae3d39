"""Views of Hopper warpgroup accumulators: 64 rows by N columns over 128 threads.

A thread holds rows `acc_row(tidx, 0)` and `acc_row(tidx, 1)`, and of each the columns
`acc_column(j) + acc_column_offset(tidx)` for j = 0, 1, ... Both are fixed by the instruction.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

ROWS_PER_THREAD = 2


def acc_row(tidx: Int32, r: int) -> Int32:
    """Row of a thread's r-th accumulator row, within the warpgroup's 64."""
    return tidx // 32 * 16 + tidx % 32 // 4 + 8 * r


def acc_column_offset(tidx: Int32) -> Int32:
    """The part of a column index that depends on the thread."""
    return tidx % 4 * 2


def acc_column(j: int) -> int:
    """The part of the column index of a row's j-th element that does not."""
    return j // 2 * 8 + j % 2


def as_rows(acc: cute.Tensor) -> cute.Tensor:
    """((2, 2, N/8), M, 1) as (rows, columns) of one thread."""
    ((col, row, rest), rest_m, rest_n) = acc.layout.shape
    ((d_col, d_row, d_rest), d_rest_m, d_rest_n) = acc.layout.stride
    layout = cute.make_layout(
        ((row, rest_m), (col, rest, rest_n)),
        stride=((d_row, d_rest_m), (d_col, d_rest, d_rest_n)),
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """((2, 2, N/8), M, 1) as the 16-bit A operand of the next product: ((2, 2, 2), M, N/16)."""
    ((col, row, rest), rest_m, rest_n) = acc.layout.shape
    ((d_col, d_row, d_rest), d_rest_m, d_rest_n) = acc.layout.stride
    layout = cute.make_layout(
        ((col, row, 2), rest_m, (rest // 2, rest_n)),
        stride=((d_col, d_row, d_rest), d_rest_m, (2 * d_rest, d_rest_n)),
    )
    return cute.make_tensor(acc.iterator, layout)

"""Online softmax over blocks of scores held in warpgroup accumulators."""

# mypy: ignore-errors

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .layouts import ROWS_PER_THREAD, as_rows

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# independent chains of a row reduction, so that its latency is hidden
_CHAINS = 4


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running state of a thread's two rows.

    row_max: largest score so far, before scaling, the same in the four threads of a row.
    row_sum: this thread's share of the sum of exponentials.
    scale_log2: positive; scores times this are exponents of 2.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32

    @classmethod
    def make(cls, scale_log2: Float32) -> OnlineSoftmax:
        return cls(
            cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            scale_log2,
        )

    def reset(self) -> None:
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def step(self, acc_S: cute.Tensor) -> cute.Tensor:
        """Scores become exponentials; returns what each row of acc_O is to be multiplied by."""
        rows = as_rows(acc_S)
        row_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            block_max = _fold(rows[r, None], cute.arch.fmax)
            block_max = cute.arch.warp_reduction_max(block_max, threads_in_group=4)
            new_max = cute.arch.fmax(self.row_max[r], block_max)
            # a row without a key so far: any finite shift gives exp2(-inf) = 0
            shift = 0.0 if new_max == -Float32.inf else new_max
            row_scale[r] = cute.math.exp2((self.row_max[r] - shift) * self.scale_log2, True)
            exponents = rows[r, None].load() * self.scale_log2 - shift * self.scale_log2
            rows[r, None].store(cute.math.exp2(exponents, True))
            block_sum = _fold(rows[r, None], operator.add)
            self.row_sum[r] = self.row_sum[r] * row_scale[r] + block_sum
            self.row_max[r] = new_max
        return row_scale

    @cute.jit
    def finish(self) -> tuple[cute.Tensor, cute.Tensor]:
        """(1 / sum, log-sum-exp) of each row; 0 and -inf of a row without a key."""
        row_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        lse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_sum = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            has_key = row_sum != 0.0
            log2_sum = self.row_max[r] * self.scale_log2 + cute.math.log2(row_sum, True)
            row_scale[r] = cute.arch.rcp_approx(row_sum) if has_key else Float32(0.0)
            lse[r] = log2_sum * LN_2 if has_key else -Float32.inf
        return row_scale, lse


@cute.jit
def scale_rows(acc_O: cute.Tensor, row_scale: cute.Tensor) -> None:
    """acc_O[r, :] *= row_scale[r]"""
    rows = as_rows(acc_O)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        rows[r, None].store(rows[r, None].load() * row_scale[r])


def _fold(row: cute.Tensor, combine) -> Float32:
    partial = [row[j] for j in range(_CHAINS)]
    for j in range(_CHAINS, cute.size(row)):
        partial[j % _CHAINS] = combine(partial[j % _CHAINS], row[j])
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [combine(partial[i], partial[i + half]) for i in range(half)]
    return partial[0]

"""Online softmax whose state outlives the thread block: sums that another kernel joins."""

# mypy: ignore-errors

from __future__ import annotations

import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32

from .layouts import ROWS_PER_THREAD, as_rows
from .softmax import _fold


@dataclass(frozen=True)
class PartialSoftmax:
    """Running state of a thread's two rows.

    row_max: largest score so far, before scaling, the same in the four threads of a row.
    row_sum: this thread's share of the sum of exponentials.
    row_scale: what each row of acc_O is to be multiplied by after the last step.
    scale_log2: positive; scores times this are exponents of 2.
    p_shift: added to every exponent, so sums are 2^p_shift times as large.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    row_scale: cute.Tensor
    scale_log2: Float32
    p_shift: Constexpr[int]

    @classmethod
    def make(cls, scale_log2: Float32, p_shift: int) -> PartialSoftmax:
        rows = [cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(3)]
        return cls(*rows, scale_log2, p_shift)

    def reset(self) -> None:
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def step(self, acc_S: cute.Tensor) -> None:
        """Scores become exponentials."""
        rows = as_rows(acc_S)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            block_max = _fold(rows[r, None], cute.arch.fmax)
            block_max = cute.arch.warp_reduction_max(block_max, threads_in_group=4)
            new_max = cute.arch.fmax(self.row_max[r], block_max)
            # a row without a key so far: any finite shift gives exp2(-inf) = 0
            shift = 0.0 if new_max == -Float32.inf else new_max
            self.row_scale[r] = cute.math.exp2((self.row_max[r] - shift) * self.scale_log2, True)
            exponents = rows[r, None].load() * self.scale_log2 - (
                shift * self.scale_log2 - self.p_shift
            )
            rows[r, None].store(cute.math.exp2(exponents, True))
            block_sum = _fold(rows[r, None], operator.add)
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r] + block_sum
            self.row_max[r] = new_max

    @cute.jit
    def state(self, r: int) -> tuple[Float32, Float32]:
        """(reference exponent, sum of 2^(s - reference)) of a row, the same in its threads."""
        row_sum = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
        return self.row_max[r] * self.scale_log2 - self.p_shift, row_sum

"""Warpgroup matrix products and the operands between them."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from .layouts import as_operand_a


@cute.jit
def issue(mma: cute.TiledMma, acc, tA: cute.Tensor, tB: cute.Tensor, accumulate: bool) -> None:
    """Start acc = A B or acc += A B as one group of asynchronous products."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(tA, mode=[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def to_operand(acc_S: cute.Tensor, tOrP: cute.Tensor) -> None:
    """P = acc_S, rounded to P's 16-bit element type."""
    tOrP.store(as_operand_a(acc_S).load().to(tOrP.element_type))

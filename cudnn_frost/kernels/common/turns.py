"""Named barriers: who waits for whom among the consumer warpgroups."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

_WARPGROUP_THREADS = 128
# barrier 0 is the thread block's own
_FIRST_TURN = 1


@dataclass(frozen=True)
class Turns:
    """Consumer warpgroups issue their products in turn, so one's softmax hides the other's.

    With n warpgroups: barriers 1 to n carry the turns, n + 1 to 2n are each one's own.
    """

    warpgroup: Int32
    count: Constexpr[int]

    @cute.jit
    def start(self) -> None:
        """The first turn is warpgroup 0's."""
        if cutlass.const_expr(self.count == 1):
            return
        if self.warpgroup == 0:
            self._arrive(Int32(0))

    @cute.jit
    def wait(self) -> None:
        if cutlass.const_expr(self.count > 1):
            cute.arch.barrier(
                barrier_id=_FIRST_TURN + self.warpgroup,
                number_of_threads=2 * _WARPGROUP_THREADS,
            )

    @cute.jit
    def pass_on(self) -> None:
        if cutlass.const_expr(self.count > 1):
            self._arrive((self.warpgroup + 1) % self.count)

    def sync_warpgroup(self) -> None:
        """All threads of the calling warpgroup, and no others."""
        cute.arch.barrier(
            barrier_id=_FIRST_TURN + self.count + self.warpgroup,
            number_of_threads=_WARPGROUP_THREADS,
        )

    def _arrive(self, warpgroup: Int32) -> None:
        cute.arch.barrier_arrive(
            barrier_id=_FIRST_TURN + warpgroup, number_of_threads=2 * _WARPGROUP_THREADS
        )

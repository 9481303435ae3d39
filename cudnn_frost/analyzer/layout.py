"""Layout predicates: what strides say, and nothing about who may serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .facts import Operand


def span_elements(dim: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to one past the last; 0 when an extent is 0."""
    if any(extent == 0 for extent in dim):
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(dim, stride, strict=True))


def row_major(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides of a compact tensor, the last axis innermost."""
    strides, step = [], 1
    for extent in reversed(dim):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def unaligned_strides(operand: Operand, align_bytes: int) -> Iterator[tuple[int, int]]:
    """(axis, stride in elements) of each axis but the last whose step in bytes is not aligned.

    An axis of extent 1 is never stepped along, and a packed operand's batch stride means nothing.
    """
    first = 1 if operand.ragged is not None else 0
    for axis in range(first, len(operand.dim) - 1):
        step = operand.stride[axis] * operand.dtype.bytes
        if operand.dim[axis] != 1 and step % align_bytes:
            yield axis, operand.stride[axis]


def broadcast_axes(operand: Operand) -> Iterator[int]:
    """Axes of extent above 1 that are not stepped along (stride 0), a packed batch axis aside."""
    first = 1 if operand.ragged is not None else 0
    for axis, (extent, step) in enumerate(zip(operand.dim, operand.stride, strict=True)):
        if axis >= first and extent > 1 and step == 0:
            yield axis

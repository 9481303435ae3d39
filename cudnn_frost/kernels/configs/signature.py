"""What a compiled kernel depends on besides its configuration: the operands it is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_frost.vocab import DType


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor argument.

    name: the kernel's word for it (`q`, `stats`).
    dtype: its element type.
    alignment: bytes that divide its address and each of its strides other than the unit one.
    """

    name: str
    dtype: DType
    alignment: int

    def key(self) -> str:
        return f"{self.name}:{self.dtype}@{self.alignment}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The operands present, ordered by name. Never an extent, a stride, a total or a pointer."""

    operands: tuple[Operand, ...]

    @classmethod
    def of(cls, operands: Iterable[Operand]) -> Signature:
        """In the one canonical order; ValueError when a name is given twice."""
        ordered = tuple(sorted(operands, key=lambda operand: operand.name))
        names = [operand.name for operand in ordered]
        if len(set(names)) != len(names):
            raise ValueError(f"operand named twice in {', '.join(names)}")
        return cls(ordered)

    def get(self, name: str) -> Operand | None:
        """The operand of that name, None where it is absent."""
        return next((operand for operand in self.operands if operand.name == name), None)

    def key(self) -> str:
        """Stable text; equal exactly when the signatures are."""
        return f"signature({','.join(operand.key() for operand in self.operands)})"

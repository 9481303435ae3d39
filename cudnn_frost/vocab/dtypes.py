"""Data types as the cuDNN frontend names them, with the facts every layer needs about them."""

from __future__ import annotations

from enum import Enum


class DType(str, Enum):
    """A cuDNN data type; the value is its spelling in `cudnn.data_type` and in the dumps."""

    HALF = "HALF"
    BFLOAT16 = "BFLOAT16"
    FLOAT = "FLOAT"
    DOUBLE = "DOUBLE"
    FP8_E4M3 = "FP8_E4M3"
    FP8_E5M2 = "FP8_E5M2"
    FP8_E8M0 = "FP8_E8M0"
    FP4_E2M1 = "FP4_E2M1"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT32 = "INT32"
    INT64 = "INT64"
    BOOLEAN = "BOOLEAN"
    NOT_SET = "NOT_SET"
    OTHER = "OTHER"

    def __str__(self) -> str:
        return self.value

    @property
    def bits(self) -> int:
        """Storage width in bits; 0 where the type carries no storage meaning here."""
        return _BITS[self]

    @property
    def bytes(self) -> int:
        """Storage width in whole bytes (0 for sub-byte and unset types)."""
        return _BITS[self] // 8

    @property
    def is_fp8(self) -> bool:
        return self in (DType.FP8_E4M3, DType.FP8_E5M2)

    @property
    def max_finite(self) -> float:
        """Largest finite value of a floating type; a store with saturation clamps to it."""
        return _MAX_FINITE[self]

    @classmethod
    def parse(cls, name: object) -> DType:
        """From a frontend enum member, its name or a `prefix.NAME` text; OTHER when unknown."""
        if name is None:
            return cls.NOT_SET
        text = getattr(name, "name", None) or str(name)
        return cls.__members__.get(text.rsplit(".", 1)[-1], cls.OTHER)


_BITS = {
    DType.HALF: 16,
    DType.BFLOAT16: 16,
    DType.FLOAT: 32,
    DType.DOUBLE: 64,
    DType.FP8_E4M3: 8,
    DType.FP8_E5M2: 8,
    DType.FP8_E8M0: 8,
    DType.FP4_E2M1: 4,
    DType.INT8: 8,
    DType.UINT8: 8,
    DType.INT32: 32,
    DType.INT64: 64,
    DType.BOOLEAN: 8,
    DType.NOT_SET: 0,
    DType.OTHER: 0,
}

_MAX_FINITE = {
    DType.HALF: 65504.0,
    DType.BFLOAT16: 3.3895313892515355e38,
    DType.FLOAT: 3.4028234663852886e38,
    DType.DOUBLE: 1.7976931348623157e308,
    DType.FP8_E4M3: 448.0,
    DType.FP8_E5M2: 57344.0,
}

"""A declared graph as plain data: what every source (live graph, file, dump) is read into.

Records repeat the declaration word for word and in its own spellings; `extract` turns one into
`SdpaFacts`. The JSON form of `GraphRecord` is the declaration-file format of the command line.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..vocab import DType


class Frozen(BaseModel):
    """Immutable, and unknown fields are errors: a misspelt field must not vanish."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)


class RaggedRecord(Frozen):
    """A tensor's ragged offset: element offset of sequence b = offsets[b] * multiplier.

    stride: of the offsets, in elements; empty = compact.
    """

    uid: int
    name: str = ""
    dtype: DType = DType.INT32
    dim: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    multiplier: int = 1


class TensorRecord(Frozen):
    """One declared tensor. `dim` and `stride` are in elements, in the declared axis order.

    What is not declared is resolved as the frontend does: no stride means compact, no dtype the
    graph's io type, or its intermediate type on a virtual tensor.
    """

    uid: int
    name: str = ""
    dtype: DType = DType.NOT_SET
    dim: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    virtual: bool = False
    pass_by_value: bool = False
    value: float | None = None
    ragged_offset: RaggedRecord | None = None
    reordering: str = "NONE"


class OpaqueValue(Frozen):
    """A captured value that is not plain data: its type's name and its text."""

    type_name: str
    text: str


class NodeRecord(Frozen):
    """One operation: `op` as the builder's name (`sdpa`, `sdpa_fp8`, ...), ports as keyword names.

    `params` holds the values the builder captured. A value that has no JSON form (a callable, a
    numpy scalar) is replaced by an `OpaqueValue`, so that facts can name it without guessing.
    """

    op: str
    name: str = ""
    inputs: dict[str, TensorRecord] = Field(default_factory=dict)
    outputs: dict[str, TensorRecord] = Field(default_factory=dict)
    params: dict[str, Any] = Field(default_factory=dict)
    compute_dtype: DType = DType.NOT_SET

    @field_validator("params", mode="after")
    @classmethod
    def _opaque_again(cls, params: dict[str, Any]) -> dict[str, Any]:
        """Out of JSON an `OpaqueValue` comes back as what it was."""
        fields = set(OpaqueValue.model_fields)
        return {
            name: OpaqueValue(**value)
            if isinstance(value, dict) and set(value) == fields
            else value
            for name, value in params.items()
        }


class GraphRecord(Frozen):
    """A whole declaration.

    origin: where it was read (`graph`, `file`, `dump`), for error messages.
    override_shape_enabled: the graph executes with shape or stride overrides.
    replay_expected: execute is captured into a CUDA graph and replayed.
    """

    name: str = ""
    origin: str = "graph"
    nodes: tuple[NodeRecord, ...] = ()
    io_dtype: DType = DType.NOT_SET
    intermediate_dtype: DType = DType.NOT_SET
    compute_dtype: DType = DType.NOT_SET
    override_shape_enabled: bool = False
    replay_expected: bool = False

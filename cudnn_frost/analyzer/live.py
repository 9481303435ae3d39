"""Reading a live `cudnn.pygraph` into a `GraphRecord`, through its documented attributes only."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from ..vocab import DType
from .record import GraphRecord, NodeRecord, OpaqueValue, RaggedRecord, TensorRecord

# a graph's and a node's types may be the framework's own
_FRAMEWORK_TYPES = {
    "float16": DType.HALF,
    "bfloat16": DType.BFLOAT16,
    "float32": DType.FLOAT,
    "float64": DType.DOUBLE,
    "float8_e4m3fn": DType.FP8_E4M3,
    "float8_e5m2": DType.FP8_E5M2,
    "float8_e8m0fnu": DType.FP8_E8M0,
    "float4_e2m1fn_x2": DType.FP4_E2M1,
    "int8": DType.INT8,
    "uint8": DType.UINT8,
    "int32": DType.INT32,
    "int64": DType.INT64,
    "bool": DType.BOOLEAN,
}


def record_of(
    graph: Any,
    *,
    name: str = "",
    override_shape_enabled: bool = False,
    replay_expected: bool = False,
) -> GraphRecord:
    """The declaration of a live graph. Read it before the backend plans: lowering rewrites strides.

    The keyword arguments are what a graph's constructor was told and has no documented reader for.
    """
    context = graph.context
    return GraphRecord(
        name=name,
        origin="graph",
        nodes=tuple(_node(node) for node in graph.nodes),
        io_dtype=_dtype(context.io_data_type),
        intermediate_dtype=_dtype(context.intermediate_data_type),
        compute_dtype=_dtype(context.compute_data_type),
        override_shape_enabled=override_shape_enabled,
        replay_expected=replay_expected,
    )


def _dtype(value: Any) -> DType:
    """A cuDNN or a framework data type."""
    if value is None or isinstance(getattr(value, "name", None), str):
        return DType.parse(value)
    return _FRAMEWORK_TYPES.get(str(value).rsplit(".", 1)[-1], DType.OTHER)


def _node(node: Any) -> NodeRecord:
    return NodeRecord(
        op=node.node_type.name.lower().replace("_bwd", "_backward"),
        name=node.name,
        inputs=_tensors(node.inputs),
        outputs=_tensors(node.outputs),
        params={key: _value(value) for key, value in node.params.items() if value is not None},
        compute_dtype=_dtype(node.compute_data_type),
    )


def _tensors(ports: Mapping[str, Any]) -> dict[str, TensorRecord]:
    return {port: _tensor(tensor) for port, tensor in ports.items() if tensor is not None}


def _tensor(tensor: Any) -> TensorRecord:
    value = tensor.pass_by_value
    offset = tensor.ragged_offset
    reordering = tensor.get_reordering_type()
    return TensorRecord(
        uid=tensor.uid,
        name=tensor.name or "",
        dtype=_dtype(tensor.data_type),
        dim=tuple(tensor.dim or ()),
        stride=tuple(tensor.stride or ()),
        virtual=bool(tensor.is_virtual),
        pass_by_value=bool(tensor.is_pass_by_value),
        value=float(value) if isinstance(value, numbers.Real) else None,
        ragged_offset=None if offset is None else _ragged(offset, tensor),
        reordering=getattr(reordering, "name", None) or "NONE",
    )


def _ragged(offset: Any, tensor: Any) -> RaggedRecord:
    multiplier = tensor.get_ragged_offset_multiplier()
    return RaggedRecord(
        uid=offset.uid,
        name=offset.name or "",
        dtype=_dtype(offset.data_type),
        dim=tuple(offset.dim or ()),
        stride=tuple(offset.stride or ()),
        multiplier=1 if multiplier is None else multiplier,
    )


def _value(value: Any) -> Any:
    """A bool, an int and a finite float as they are, an enum member by its name, else opaque.

    numpy's float64 is a float to Python and to the frontend, its float32 is neither. Text is
    opaque, for no keyword takes it: an enum's name must not pass for the enum. A number without a
    JSON form is, too.
    """
    if type(value) in (bool, int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    name = getattr(value, "name", None)
    if isinstance(name, str) and not callable(value):
        return name
    text = repr(value) if isinstance(value, str) else str(value)
    return OpaqueValue(type_name=type(value).__name__, text=text)

"""Reading a live `cudnn.pygraph` into a `GraphRecord`, through its documented attributes only."""

from __future__ import annotations

from typing import Any

from ..vocab import DType
from .record import GraphRecord, NodeRecord, OpaqueValue, RaggedRecord, TensorRecord


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
        nodes=tuple(_node(node, context) for node in graph.nodes),
        io_dtype=DType.parse(context.io_data_type),
        intermediate_dtype=DType.parse(context.intermediate_data_type),
        compute_dtype=DType.parse(context.compute_data_type),
        override_shape_enabled=override_shape_enabled,
        replay_expected=replay_expected,
    )


def _node(node: Any, context: Any) -> NodeRecord:
    return NodeRecord(
        op=node.node_type.name.lower().replace("_bwd", "_backward"),
        name=node.name,
        inputs={port: _tensor(t, context) for port, t in node.inputs.items() if t is not None},
        outputs={port: _tensor(t, context) for port, t in node.outputs.items() if t is not None},
        params={key: _value(value) for key, value in node.params.items()},
        compute_dtype=DType.parse(node.compute_data_type),
    )


def _tensor(tensor: Any, context: Any) -> TensorRecord:
    declared = tensor.get_data_type()
    if declared is None:
        virtual = tensor.is_virtual
        declared = context.intermediate_data_type if virtual else context.io_data_type
    value = tensor.pass_by_value
    offset = tensor.ragged_offset
    reordering = tensor.get_reordering_type()
    return TensorRecord(
        uid=tensor.uid,
        name=tensor.name or "",
        dtype=DType.parse(declared),
        dim=tuple(tensor.dim or ()),
        stride=tuple(tensor.stride or ()),
        virtual=bool(tensor.is_virtual),
        pass_by_value=bool(tensor.is_pass_by_value),
        value=float(value) if isinstance(value, (int, float)) else None,
        ragged_offset=None if offset is None else _ragged(offset, tensor),
        reordering=getattr(reordering, "name", None) or "NONE",
    )


def _ragged(offset: Any, tensor: Any) -> RaggedRecord:
    return RaggedRecord(
        uid=offset.uid,
        name=offset.name or "",
        dtype=DType.parse(offset.get_data_type()),
        dim=tuple(offset.dim or ()),
        multiplier=int(tensor.get_ragged_offset_multiplier()),
    )


def _value(value: Any) -> Any:
    """Plain data as it is, an enum member by its name, anything else as an `OpaqueValue`.

    Only exact builtin types are plain: numpy's float64 is a float to Python and to the frontend,
    its float32 is neither.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    name = getattr(value, "name", None)
    if isinstance(name, str) and not callable(value):
        return name
    return OpaqueValue(type_name=type(value).__name__, text=str(value))

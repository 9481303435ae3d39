"""A row's plan as bytes: declaration, engine id and knobs; loading declares and plans it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..analyzer.record import GraphRecord, TensorRecord
from ..engines.row import Row
from ..heuristics.assemble import Knobs, PlanEntry
from ..heuristics.propose import knobs_from_names

MAGIC = b"CUDNN_FROST_PLAN\0"
FORMAT = 1

# constructor arguments that are plain data; handles, caches and device blobs belong to a process
_PLAIN_OPTIONS = (
    "name",
    "sm_count",
    "sm_version",
    "is_dynamic_shape_enabled",
    "is_override_shape_enabled",
    "is_cuda_graph_replay_expected",
)
_DTYPE_OPTIONS = ("io_data_type", "intermediate_data_type", "compute_data_type")
_ENUM_PARAMS = {
    "diagonal_alignment": "diagonal_alignment",
    "implementation": "attention_implementation",
    "softmax_precision": "data_type",
}


def knobs_to_public(knobs: Knobs) -> dict[Any, int]:
    """Internal (name, value) pairs as the frontend's {cudnn.knob_type: int}."""
    import cudnn

    return {getattr(cudnn.knob_type, name): value for name, value in knobs}


def knobs_from_public(row: Row, knobs: Mapping[Any, int] | None) -> Knobs:
    """The inverse; raises ValueError naming a knob that the row does not have or a missing one."""
    named = {getattr(key, "name", str(key)): value for key, value in (knobs or {}).items()}
    return knobs_from_names(row, named)


def is_row_plan(data: Any) -> bool:
    """Whether a blob (bytes or a list of byte values) holds a row's plan."""
    if isinstance(data, (list, tuple)):
        head = data[: len(MAGIC)]
        if not all(isinstance(x, int) and 0 <= x < 256 for x in head):
            return False
        return bytes(head) == MAGIC
    return isinstance(data, (bytes, bytearray, memoryview)) and bytes(data[: len(MAGIC)]) == MAGIC


def dump(record: GraphRecord, options: Mapping[str, Any], entry: PlanEntry) -> bytes:
    """Serialize a plan. Raises ValueError for a declaration that has no data form (a callable)."""
    for node in record.nodes:
        for name, value in node.params.items():
            if not isinstance(value, (bool, int, float, str, type(None))):
                raise ValueError(f"{node.op}: parameter {name} cannot be serialized")
    plain = {k: options[k] for k in _PLAIN_OPTIONS if options.get(k) is not None}
    plain |= {
        k: getattr(options[k], "name", str(options[k]))
        for k in _DTYPE_OPTIONS
        if options.get(k) is not None
    }
    body = {
        "format": FORMAT,
        "engine_id": entry.engine_id,
        "knobs": dict(entry.knobs),
        "options": plain,
        "declaration": record.model_dump(mode="json"),
    }
    return MAGIC + json.dumps(body).encode()


def load(blob: Any) -> tuple[GraphRecord, dict[str, Any], int, dict[Any, int]]:
    """(declaration, constructor options, engine id, public knobs); ValueError if damaged."""
    import cudnn

    try:
        body = json.loads(bytes(blob)[len(MAGIC) :])
        version = body["format"]
        record = GraphRecord.model_validate(body["declaration"])
        options = dict(body["options"])
        engine_id, knobs = body["engine_id"], body["knobs"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a readable cudnn_frost plan: {error}") from error
    if version != FORMAT:
        raise ValueError(f"plan format {version} is not readable here; this reads {FORMAT}")
    for name in _DTYPE_OPTIONS:
        if name in options:
            options[name] = getattr(cudnn.data_type, options[name])
    public = {getattr(cudnn.knob_type, name): value for name, value in knobs.items()}
    return record, options, engine_id, public


def declare(record: GraphRecord, graph: Any) -> None:
    """Build the recorded declaration on an empty `cudnn.pygraph` through its builders."""
    import cudnn

    made: dict[int, Any] = {}

    def dtype(value: Any) -> Any:
        return None if str(value) == "NOT_SET" else getattr(cudnn.data_type, str(value))

    def offset_of(tensor: TensorRecord) -> Any:
        ragged = tensor.ragged_offset
        if ragged is None:
            return None
        if ragged.uid not in made:
            made[ragged.uid] = graph.tensor(
                dim=list(ragged.dim),
                stride=[1] * len(ragged.dim),
                data_type=dtype(ragged.dtype),
                name=ragged.name,
                uid=ragged.uid,
            )
        return made[ragged.uid]

    def tensor_of(tensor: TensorRecord) -> Any:
        if tensor.uid not in made:
            extra = {} if tensor.value is None else {"pass_by_value": tensor.value}
            ragged = tensor.ragged_offset
            made[tensor.uid] = graph.tensor(
                dim=list(tensor.dim),
                stride=list(tensor.stride) or None,
                data_type=dtype(tensor.dtype),
                is_virtual=tensor.virtual,
                is_pass_by_value=tensor.pass_by_value,
                ragged_offset=offset_of(tensor),
                ragged_offset_multiplier=ragged.multiplier if ragged else 1,
                name=tensor.name,
                uid=tensor.uid,
                **extra,
            )
        return made[tensor.uid]

    for node in record.nodes:
        arguments = {port: tensor_of(t) for port, t in node.inputs.items()}
        returned = ("O", "Stats", "Amax_S", "Amax_O")
        passed = {port: t for port, t in node.outputs.items() if port not in returned}
        arguments |= {port: tensor_of(t) for port, t in passed.items()}
        arguments |= _parameters(node.params, arguments)
        builder = getattr(graph, node.op)
        builder(name=node.name, compute_data_type=dtype(node.compute_dtype), **arguments)
        built = graph.nodes[-1]
        for port, tensor in node.outputs.items():
            if port in returned:
                _describe_output(built.outputs[port], tensor, dtype, offset_of)


def _parameters(params: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Captured params as builder keywords: enums by name, the dropout tuple put together again."""
    import cudnn

    plain = {}
    for name, value in params.items():
        if name.startswith(("dropout_", "_dropout_")):
            continue
        enum = _ENUM_PARAMS.get(name)
        is_name = enum is not None and isinstance(value, str)
        plain[name] = getattr(getattr(cudnn, enum), value) if is_name and enum else value
    count = params.get("_dropout_n")
    if count is not None:
        keys = [f"dropout_{i}" for i in range(count)]
        plain["dropout"] = tuple(
            arguments.pop(key) if key in arguments else params[key] for key in keys
        )
    return plain


def _describe_output(built: Any, tensor: TensorRecord, dtype: Any, offset_of: Any) -> None:
    built.set_uid(tensor.uid)
    if tensor.name:
        built.set_name(tensor.name)
    built.set_dim(list(tensor.dim)).set_stride(list(tensor.stride))
    if (data_type := dtype(tensor.dtype)) is not None:
        built.set_data_type(data_type)
    if tensor.ragged_offset is not None:
        built.set_ragged_offset(offset_of(tensor))
        built.set_ragged_offset_multiplier(tensor.ragged_offset.multiplier)
    built.set_output(not tensor.virtual)

"""The frontend's JSON dump of a graph, read back into the builder's words.

The dump is written while lowering: spellings are resolved there already (a causal flag is a right
bound of 0), ports carry C++ names, floats are the hex digits of their IEEE-754 bits. Version 2.0
lists tensors, 1.0 maps them by uid, or by name where no uid was assigned; older frontends wrote
causal flags. A node attribute that is not known here and not null or false is kept as a parameter
of its own name, so that facts name it instead of missing it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from ..vocab import DType
from .band import CAUSAL, CAUSAL_BOTTOM_RIGHT, SPELLINGS
from .ports import DROPOUT_COUNT
from .record import GraphRecord, NodeRecord, OpaqueValue, RaggedRecord, TensorRecord

_OPS = {
    "SDPA": "sdpa",
    "SDPA_FWD": "sdpa",
    "SDPA_FP8_FWD": "sdpa_fp8",
    "SDPA_MXFP8_FWD": "sdpa_mxfp8",
    "SDPA_BWD": "sdpa_backward",
    "SDPA_FP8_BWD": "sdpa_fp8_backward",
    "SDPA_MXFP8_BWD": "sdpa_mxfp8_backward",
}
_INPUTS = {
    "Dropout_mask": "dropout_0",
    "Dropout_scale": "dropout_1",
    "Seed": "dropout_1",
    "Offset": "dropout_2",
    "Page_table_K": "paged_attention_k_table",
    "Page_table_V": "paged_attention_v_table",
}
_OUTPUTS = {
    "O": "O",
    "Stats": "Stats",
    "Amax_S": "Amax_S",
    "Amax_O": "Amax_O",
    "Max": "score_max",
    "Sum_exp": "score_sum_exp",
}
# node field -> builder keyword
_PARAMS = {
    "alibi_mask": "use_alibi_mask",
    "padding_mask": "use_padding_mask",
    "causal_mask": CAUSAL,
    "causal_mask_bottom_right": CAUSAL_BOTTOM_RIGHT,
    "diagonal_alignment": "diagonal_alignment",
    "generate_stats": "generate_stats",
    "is_inference": "is_inference",
    "implementation": "implementation",
    "max_seq_len_kv": "paged_attention_max_seq_len_kv",
    "max_total_seq_len_q": "max_total_seq_len_q",
    "max_total_seq_len_kv": "max_total_seq_len_kv",
    "stats_use_log2": "stats_use_log2",
    "unfuse_fma": "unfuse_fma",
}
# attributes that say nothing about what is computed
_SILENT = ("is_mxfp8", "mma_core_mode", "rescale_threshold")


def _hex_float(value: Any) -> Any:
    """A float written as the eight hex digits of its bits, or as a number."""
    if not isinstance(value, str):
        return value
    try:
        (number,) = struct.unpack(">f", bytes.fromhex(value))
    except (ValueError, struct.error):
        raise ValueError(f"{value!r} is not a float in eight hex digits") from None
    return number


HexFloat = Annotated[float | None, BeforeValidator(_hex_float)]


class _Loose(BaseModel):
    """Part of a dump; what is not read is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Context(_Loose):
    io_data_type: str | None = None
    intermediate_data_type: str | None = None
    compute_data_type: str | None = None
    is_override_shape_enabled: bool = False


class _Tensor(_Loose):
    """key: the name or uid under which version 1.0 maps the tensor."""

    uid: int
    uid_assigned: bool = True
    key: str | None = None
    name: str | None = None
    data_type: str | None = None
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    is_virtual: bool = False
    is_pass_by_value: bool = False
    pass_by_value: Any = None
    reordering_type: str | None = None
    ragged_offset_uid: int | None = None
    ragged_offset_name: str | None = None
    ragged_offset_multiplier: int | None = None


class _Node(_Loose):
    """An operation; its attributes are the extra fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tag: str
    name: str | None = None
    compute_data_type: str | None = None
    inputs: dict[str, int | str | None] | None = None
    outputs: dict[str, int | str | None] | None = None
    attn_scale_value: HexFloat = None
    dropout_probability: HexFloat = None
    left_bound: int | None = None
    right_bound: int | None = None


def _listed(tensors: Any) -> Any:
    """Version 1.0's mapping as a list, each tensor with its key."""
    if not isinstance(tensors, Mapping):
        return tensors
    return [
        {**body, "key": key} if isinstance(body, Mapping) else body for key, body in tensors.items()
    ]


class _Dump(_Loose):
    context: _Context
    nodes: list[_Node] | None
    tensors: Annotated[list[_Tensor] | None, BeforeValidator(_listed)]


def record_of_dump(document: Mapping[str, Any]) -> GraphRecord:
    """The declaration in a dump.

    Raises pydantic's ValidationError for a missing or mistyped field, ValueError for a port that
    names no tensor.
    """
    dump = _Dump.model_validate(document)
    tensors = _tensors(dump.tensors or [])
    context = dump.context
    return GraphRecord(
        origin="dump",
        nodes=tuple(_node(i, node, tensors) for i, node in enumerate(dump.nodes or [])),
        io_dtype=DType.parse(context.io_data_type),
        intermediate_dtype=DType.parse(context.intermediate_data_type),
        compute_dtype=DType.parse(context.compute_data_type),
        override_shape_enabled=context.is_override_shape_enabled,
    )


def _tensors(dumped: list[_Tensor]) -> dict[int | str, TensorRecord]:
    """Tensors by what ports hold: uids or keys. What has no uid yet gets the next free one."""
    by_uid = {body.uid: body for body in dumped if body.uid_assigned}
    offsets = (body.ragged_offset_uid or 0 for body in dumped)
    fresh = itertools.count(max((*by_uid, *offsets), default=0) + 1)
    # version 1.0 does not list offsets; without a uid, a name tells them apart
    offset_uids: dict[str | None, int] = {}
    found: dict[int | str, TensorRecord] = {}
    for body in dumped:
        ragged = None
        if (offset_uid := body.ragged_offset_uid) is not None:
            if offset_uid == 0 and 0 not in by_uid:
                name = body.ragged_offset_name
                offset_uid = offset_uids[name] = offset_uids.get(name) or next(fresh)
            ragged = _ragged(body, offset_uid, by_uid.get(offset_uid))
        uid = body.uid if body.uid_assigned else next(fresh)
        record = _tensor(body, uid, ragged)
        if body.uid_assigned:
            found[uid] = record
        if body.key is not None:
            found[body.key] = record
    return found


def _tensor(body: _Tensor, uid: int, ragged: RaggedRecord | None) -> TensorRecord:
    passed = body.pass_by_value
    held = passed.get("value") if isinstance(passed, Mapping) else passed
    number = _hex_float(held) if isinstance(held, (str, int, float)) else None
    return TensorRecord(
        uid=uid,
        name=body.name or "",
        dtype=DType.parse(body.data_type),
        dim=body.dim,
        stride=body.stride,
        virtual=body.is_virtual,
        pass_by_value=body.is_pass_by_value,
        value=number,
        ragged_offset=ragged,
        reordering=body.reordering_type or "NONE",
    )


def _ragged(body: _Tensor, uid: int, offset: _Tensor | None) -> RaggedRecord:
    """The offsets of a packed tensor; where the dump does not list them, taken as int32."""
    batch = body.dim[0] if body.dim else 0
    described: dict[str, Any] = {"dtype": DType.INT32, "dim": (batch + 1, 1, 1, 1)}
    if offset is not None:
        dtype = DType.parse(offset.data_type)
        described = {"dtype": dtype, "dim": offset.dim, "stride": offset.stride}
    name = body.ragged_offset_name or (offset.name if offset else None)
    multiplier = body.ragged_offset_multiplier
    return RaggedRecord(
        uid=uid, name=name or "", multiplier=1 if multiplier is None else multiplier, **described
    )


def _op(node: _Node) -> str:
    """The builder's name; older frontends tag FP8 nodes as plain ones."""
    op = _OPS.get(node.tag, node.tag.lower())
    attributes = node.model_extra or {}
    if op == "sdpa" and attributes.get("is_mxfp8") is True:
        return "sdpa_mxfp8"
    if op == "sdpa" and str(attributes.get("mma_core_mode")).startswith("FP8"):
        return "sdpa_fp8"
    return op


def _node(index: int, node: _Node, tensors: Mapping[int | str, TensorRecord]) -> NodeRecord:
    op = _op(node)

    def ports(side: str, names: Mapping[str, str]) -> dict[str, TensorRecord]:
        found = {}
        for port, held in (getattr(node, side) or {}).items():
            if held is None:
                continue
            if held not in tensors:
                raise ValueError(f"nodes.{index}.{side}.{port} names no tensor: {held!r}")
            found[names.get(port, port.lower())] = tensors[held]
        return found

    inputs, outputs = ports("inputs", _INPUTS), ports("outputs", _OUTPUTS)
    params: dict[str, Any] = {}
    if op in SPELLINGS:
        params = _params(op, node)
        if node.attn_scale_value is not None:
            # the scale tensor beside it is the lowering's own
            inputs.pop("attn_scale", None)
        _upright(inputs, params)
    return NodeRecord(
        op=op,
        name=node.name or "",
        inputs=inputs,
        outputs=outputs,
        params=params,
        compute_dtype=DType.parse(node.compute_data_type),
    )


def _params(op: str, node: _Node) -> dict[str, Any]:
    names = SPELLINGS[op]
    causal = False
    params: dict[str, Any] = {}
    for name, value in (node.model_extra or {}).items():
        keyword = _PARAMS.get(name)
        if value is None or name in _SILENT or (keyword is None and value is False):
            continue
        causal |= keyword in (CAUSAL, CAUSAL_BOTTOM_RIGHT) and value is True
        is_plain = isinstance(value, (bool, int, float, str))
        opaque = OpaqueValue(type_name=type(value).__name__, text=str(value))
        params[keyword or name] = value if is_plain else opaque
    right = None if causal and node.right_bound == 0 else node.right_bound
    described = (
        (names.left, node.left_bound),
        (names.right, right),
        ("attn_scale", node.attn_scale_value),
    )
    params |= {keyword: value for keyword, value in described if value is not None}
    if "Dropout_mask" in (node.inputs or {}):
        params[DROPOUT_COUNT] = 2
    elif node.dropout_probability is not None:
        params |= {DROPOUT_COUNT: 3, "dropout_0": node.dropout_probability}
    return params


def _upright(inputs: dict[str, TensorRecord], params: Mapping[str, Any]) -> None:
    """Turn K back where the composite lowering left it transposed in the dump.

    K's head dim is the axis of unit stride; no declaration may have it elsewhere than last.
    """
    q, k = inputs.get("q"), inputs.get("k")
    if params.get("implementation") != "COMPOSITE" or q is None or k is None:
        return
    transposed = len(k.dim) == 4 == len(q.dim) and k.dim[2] == q.dim[3]
    if transposed and len(k.stride) == 4 and k.stride[2] == 1 and k.stride[3] != 1:
        turned = {"dim": _turned(k.dim), "stride": _turned(k.stride)}
        inputs["k"] = k.model_copy(update=turned)


def _turned(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:2], values[3], values[2])

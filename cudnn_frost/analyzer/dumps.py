"""The frontend's JSON dump of a graph, read back into the builder's words.

The dump is written while lowering: spellings are resolved there already (a causal flag is a right
bound of 0), ports carry C++ names, floats are the hex digits of their IEEE-754 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ..vocab import DType
from .band import SPELLINGS
from .record import GraphRecord, NodeRecord, RaggedRecord, TensorRecord

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
    "SINK_TOKEN": "sink_token",
    "Page_table_K": "paged_attention_k_table",
    "Page_table_V": "paged_attention_v_table",
    "Dropout_mask": "dropout_0",
    "Dropout_scale": "dropout_1",
    "Seed": "dropout_1",
    "Offset": "dropout_2",
}
_OUTPUTS = {"Max": "score_max", "Sum_exp": "score_sum_exp", "RNG_DUMP": "rng_dump"}
_KEPT_OUTPUTS = ("O", "Stats", "Amax_S", "Amax_O")
# node field -> builder keyword, where only the name differs
_PARAMS = {
    "alibi_mask": "use_alibi_mask",
    "padding_mask": "use_padding_mask",
    "diagonal_alignment": "diagonal_alignment",
    "generate_stats": "generate_stats",
    "implementation": "implementation",
    "max_seq_len_kv": "paged_attention_max_seq_len_kv",
    "max_total_seq_len_q": "max_total_seq_len_q",
    "max_total_seq_len_kv": "max_total_seq_len_kv",
    "stats_use_log2": "stats_use_log2",
    "unfuse_fma": "unfuse_fma",
}


def _float(value: Any) -> float | None:
    """A float written as eight hex digits, or as a number."""
    if value is None:
        return None
    if isinstance(value, str):
        return struct.unpack(">f", bytes.fromhex(value.zfill(8)))[0]
    return float(value)


def record_of_dump(document: Mapping[str, Any]) -> GraphRecord:
    """The declaration in a dump. KeyError names a missing field, ValueError a dangling tensor."""
    context = document["context"]
    tensors = _tensors(document["tensors"])
    return GraphRecord(
        origin="dump",
        nodes=tuple(_node(node, tensors) for node in document["nodes"]),
        io_dtype=DType.parse(context.get("io_data_type")),
        intermediate_dtype=DType.parse(context.get("intermediate_data_type")),
        compute_dtype=DType.parse(context.get("compute_data_type")),
        override_shape_enabled=bool(context.get("is_override_shape_enabled", False)),
    )


def _tensors(dumped: Any) -> dict[Any, TensorRecord]:
    """Tensors by what ports hold: uids, or names in version 1.0 (a mapping by name)."""
    if isinstance(dumped, Mapping):
        described = {name: {"name": name, **body} for name, body in dumped.items()}
    else:
        described = {body["uid"]: body for body in dumped}
    by_uid = {body["uid"]: body for body in described.values()}
    return {key: _tensor(body, by_uid) for key, body in described.items()}


def _tensor(body: Mapping[str, Any], by_uid: Mapping[int, Any]) -> TensorRecord:
    offset_uid = body.get("ragged_offset_uid")
    ragged = None
    if offset_uid is not None:
        offset = by_uid.get(offset_uid, {})
        ragged = RaggedRecord(
            uid=offset_uid,
            name=body.get("ragged_offset_name", offset.get("name", "")) or "",
            dtype=DType.parse(offset.get("data_type")),
            dim=tuple(offset.get("dim", ())),
            multiplier=body.get("ragged_offset_multiplier", 1),
        )
    passed = body.get("pass_by_value")
    held = passed.get("value") if isinstance(passed, Mapping) else passed
    return TensorRecord(
        uid=body["uid"],
        name=body.get("name") or "",
        dtype=DType.parse(body.get("data_type")),
        dim=tuple(body["dim"]),
        stride=tuple(body["stride"]),
        virtual=bool(body.get("is_virtual", False)),
        pass_by_value=bool(body.get("is_pass_by_value", False)),
        value=_float(held),
        ragged_offset=ragged,
        reordering=body.get("reordering_type") or "NONE",
    )


def _node(node: Mapping[str, Any], tensors: Mapping[Any, TensorRecord]) -> NodeRecord:
    op = _OPS.get(node["tag"], str(node["tag"]).lower())

    def ports(side: str, names: Mapping[str, str]) -> dict[str, TensorRecord]:
        found = {}
        for port, held in node.get(side, {}).items():
            if held not in tensors:
                raise ValueError(
                    f"node {node.get('name')!r}: {side}.{port} names no tensor: {held}"
                )
            kept = port if side == "outputs" and port in _KEPT_OUTPUTS else port.lower()
            found[names.get(port, kept)] = tensors[held]
        return found

    inputs, outputs = ports("inputs", _INPUTS), ports("outputs", _OUTPUTS)
    params = {
        keyword: node[field] for field, keyword in _PARAMS.items() if node.get(field) is not None
    }
    if op in SPELLINGS:
        names = SPELLINGS[op]
        bounds = {names.left: node.get("left_bound"), names.right: node.get("right_bound")}
        params |= {keyword: bound for keyword, bound in bounds.items() if bound is not None}
    scale = _float(node.get("attn_scale_value"))
    if scale is not None:
        # the scale tensor beside it is the lowering's own
        inputs.pop("attn_scale", None)
        params["attn_scale"] = scale
    params |= _dropout(_float(node.get("dropout_probability")), node.get("inputs", {}))
    return NodeRecord(
        op=op,
        name=node.get("name", ""),
        inputs=inputs,
        outputs=outputs,
        params=params,
        compute_dtype=DType.parse(node.get("compute_data_type")),
    )


def _dropout(probability: float | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
    if "Dropout_mask" in inputs:
        return {"_dropout_n": 2}
    if probability is None or "Seed" not in inputs:
        return {}
    return {"_dropout_n": 3, "dropout_0": probability}

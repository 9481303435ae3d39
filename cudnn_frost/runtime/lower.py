"""The one translation of cuDNN's words into a kernel's: facts to configuration and arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..analyzer.facts import Lengths, Operand, Ragged, SdpaFacts
from ..engines.row import Row
from ..heuristics.assemble import Knobs
from ..heuristics.propose import config_of
from ..kernels.configs.decode_sm90 import (
    LENGTH_FORMS,
    O_TYPES,
    UNBOUNDED,
    DecodeExtents,
    DecodeForms,
    DecodePointers,
    DecodeStrides,
)
from ..kernels.configs.prefill_sm90 import (
    PrefillBand,
    PrefillExtents,
    PrefillPointers,
    PrefillStrides,
)
from ..kernels.configs.signature import Signature
from ..vocab import DType, Target

LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel call as the declaration fixes it: `entry(pointers, *constants, stream)`.

    config, signature: the compile key's two halves.
    pointers: the kernel's operands in the entry's order -> the facts' paths of the tensors behind
        the addresses, empty for an absent one and for the workspace.
    constants: extents, strides and scalars in the entry's order.
    """

    config: Any
    signature: Signature
    pointers: dict[str, str]
    constants: tuple[Any, ...]
    workspace_bytes: int = 0


def _strides(operand: Operand | None) -> tuple[int, int, int]:
    """(batch, head, row) strides in elements.

    An axis of extent 1 is never stepped along, so its declared stride is free, but a copy
    descriptor still wants one that is aligned: the row's own length is.
    """
    if operand is None:
        return 0, 0, 0
    width = operand.dim[3]
    batch, head, row = (
        width if extent == 1 else stride
        for extent, stride in zip(operand.dim[:3], operand.stride[:3], strict=True)
    )
    return batch, head, row


def _prefill(row: Row, facts: SdpaFacts, knobs: Knobs, target: Target) -> Launch:
    config = config_of(row, facts, knobs)
    bottom_right = facts.band.alignment == "BOTTOM_RIGHT"
    offset = facts.s_kv - facts.s_q if bottom_right else 0
    present = {"q", "k", "v", "o"} | ({"stats"} if facts.stats else set())
    pointers = {name: name if name in present else "" for name in PrefillPointers._fields}
    extents = PrefillExtents(
        batch=facts.b,
        num_heads_q=facts.h_q,
        num_heads_k=facts.h_k,
        num_heads_v=facts.h_v,
        seqlen_q=facts.s_q,
        seqlen_k=facts.s_kv,
        head_dim_qk=facts.d_qk,
        head_dim_v=facts.d_v,
    )
    operands = (facts.q, facts.k, facts.v, facts.o, facts.stats)
    strides = PrefillStrides(*(s for operand in operands for s in _strides(operand)))
    # a bound beyond every row and key says no more, and callers write the largest integer for none
    reach = facts.s_q + facts.s_kv
    left, right = offset - (facts.band.left or 0), offset + (facts.band.right or 0)
    band = PrefillBand(*(min(max(bound, -reach), reach) for bound in (left, right)))
    constants = (extents, strides, band, _scale(facts), target.sm_count)
    return Launch(config, config.signature(), pointers, constants)


# the decode kernel's operands that the facts keep under another path
_DECODE_PATHS = {
    "k_table": "paging.k_table",
    "v_table": "paging.v_table",
    "seqlen_q": "seq_len_q",
    "seqlen_k": "seq_len_kv",
    "q_offsets": "q.ragged_offset",
    "o_offsets": "o.ragged_offset",
    "stats_offsets": "stats.ragged_offset",
}


def _decode(row: Row, facts: SdpaFacts, knobs: Knobs, target: Target) -> Launch:
    config = config_of(row, facts, knobs)
    operands = facts.operands()
    paths = {name: _DECODE_PATHS.get(name, name) for name in DecodePointers._fields}
    pointers = {name: path if path in operands else "" for name, path in paths.items()}
    divide = dict(knobs)["STREAM_K"]
    num_m_blocks = -(-facts.s_q * facts.group // config.tile_m)
    num_chunks = max(1, target.sm_count // num_m_blocks)
    stats_scale = 1.0 if facts.stats_use_log2 else LN_2
    extents, strides, forms = _decode_extents(facts), _decode_strides(facts), _decode_forms(facts)
    return Launch(
        config,
        config.signature(),
        pointers,
        (extents, strides, forms, _scale(facts), stats_scale, num_chunks, divide),
        config.workspace_bytes(num_chunks, num_m_blocks) if divide else 0,
    )


def _decode_extents(facts: SdpaFacts) -> DecodeExtents:
    return DecodeExtents(
        batch=facts.b,
        num_heads_q=facts.h_q,
        num_heads_k=facts.h_k,
        seqlen_q=facts.s_q,
        seqlen_k=facts.kv_capacity,
        head_dim_qk=facts.d_qk,
        head_dim_v=facts.d_v,
        k_pages=facts.k.dim[0],
        k_rows=facts.k.dim[2],
        v_pages=facts.v.dim[0],
        v_rows=facts.v.dim[2],
    )


def _decode_strides(facts: SdpaFacts) -> DecodeStrides:
    paging = facts.paging
    tables = (paging.k_table, paging.v_table) if paging else (None, None)
    of_tables = [n for t in tables for n in ((t.stride[0], t.stride[2]) if t else (0, 0))]
    of_operands = (facts.q, facts.k, facts.v, facts.o, facts.stats)
    return DecodeStrides._make(
        [
            *(n for operand in of_operands for n in _strides(operand)),
            *of_tables,
            *(r.multiplier if r else 0 for r in _packings(facts)),
            facts.sink.stride[1] if facts.sink else 0,
        ]
    )


def _decode_forms(facts: SdpaFacts) -> DecodeForms:
    def step(lengths: Lengths) -> int:
        operand = lengths.operand
        return _words(operand.dtype) * operand.stride[0] if operand else 0

    band = facts.band
    left = -UNBOUNDED if band.left is None else 1 - band.left
    right = UNBOUNDED if band.right is None else band.right
    words = [_words(r.dtype) if r else 0 for r in _packings(facts)]
    return DecodeForms(
        seqlen_q=LENGTH_FORMS[facts.seq_len_q.form],
        seqlen_q_words=step(facts.seq_len_q),
        seqlen_k=LENGTH_FORMS[facts.seq_len_kv.form],
        seqlen_k_words=step(facts.seq_len_kv),
        q_offset_words=words[0],
        o_offset_words=words[1],
        stats_offset_words=words[2],
        left=min(max(left, -UNBOUNDED), UNBOUNDED),
        right=min(right, UNBOUNDED),
        bottom_right=int(band.alignment == "BOTTOM_RIGHT"),
        o_type=O_TYPES.index(facts.output_dtype),
    )


def _packings(facts: SdpaFacts) -> list[Ragged | None]:
    """Of Q, O and Stats, in the order of the decode kernel's arguments."""
    return [x.ragged if x is not None else None for x in (facts.q, facts.o, facts.stats)]


def _words(dtype: DType) -> int:
    """32-bit words of an integer."""
    return dtype.bytes // 4


def _scale(facts: SdpaFacts) -> float:
    return 1.0 if facts.attn_scale.value is None else facts.attn_scale.value


_LOWERINGS = {"prefill_sm90": _prefill, "decode_sm90": _decode}


def lower(row: Row, facts: SdpaFacts, knobs: Knobs, target: Target) -> Launch:
    """The launch of a row's plan on a target; facts are ones the row accepted."""
    return _LOWERINGS[row.kernel](row, facts, knobs, target)

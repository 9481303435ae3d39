"""The one translation of cuDNN's words into a kernel's: facts to configuration and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..analyzer.facts import Operand, SdpaFacts
from ..engines.row import Row
from ..heuristics.assemble import Knobs
from ..heuristics.propose import config_of
from ..kernels.configs.prefill_sm90 import (
    PrefillBand,
    PrefillExtents,
    PrefillPointers,
    PrefillStrides,
)
from ..kernels.configs.signature import Signature
from ..vocab import Target


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel call as the declaration fixes it: `entry(pointers, *constants, stream)`.

    config, signature: the compile key's two halves.
    pointers: the facts' paths of the operands behind the addresses, empty for an absent one.
    constants: extents, strides and scalars in the entry's order.
    """

    config: Any
    signature: Signature
    pointers: tuple[str, ...]
    constants: tuple[Any, ...]


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
    pointers = tuple(name if name in present else "" for name in PrefillPointers._fields)
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
    scale = 1.0 if facts.attn_scale.value is None else facts.attn_scale.value
    constants = (extents, strides, band, scale, target.sm_count)
    return Launch(config, config.signature(), pointers, constants)


_LOWERINGS = {"prefill_sm90": _prefill}


def lower(row: Row, facts: SdpaFacts, knobs: Knobs, target: Target) -> Launch:
    """The launch of a row's plan on a target; facts are ones the row accepted."""
    return _LOWERINGS[row.kernel](row, facts, knobs, target)

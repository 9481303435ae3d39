"""Rows that run on any machine."""

from __future__ import annotations

from ..vocab import DType
from .capabilities import ALL_MASKS, Capabilities
from .row import Row

_HALF = {DType.HALF, DType.BFLOAT16}
_FP8 = {DType.FP8_E4M3, DType.FP8_E5M2}

REFERENCE = Row(
    name="frost_sdpa_fwd_reference",
    engine_id=910_000,
    kernel="reference",
    qualified=True,
    summary="plain torch, any device; the whole contract, slowly; reads lengths on the host",
    capabilities=Capabilities(
        op=frozenset({"sdpa", "sdpa_fp8"}),
        cc=None,
        packages=(("torch", "2.4"),),
        input_dtype=frozenset(_HALF | _FP8 | {DType.FLOAT}),
        output_dtype=frozenset(_HALF | _FP8 | {DType.FLOAT}),
        mixed_output=True,
        d_shapes=None,
        paged_d_shapes=None,
        page_sizes=None,
        mask=ALL_MASKS,
        padding=True,
        length_forms=frozenset({"none", "seq_len", "cu_seq_len"}),
        ragged=frozenset({"q", "k", "v", "o", "stats", "score_max", "score_sum_exp"}),
        paged_kv=True,
        split_kv_heads=True,
        attn_scale=frozenset({"absent", "host", "pass_by_value", "device"}),
        attn_scale_prefolded=True,
        sink=True,
        bias=True,
        alibi=True,
        block_mask=True,
        kv_mask=True,
        dropout=frozenset({"mask"}),
        stats=True,
        stats_use_log2=True,
        score_max=True,
        score_sum_exp=True,
        amax_s=True,
        amax_o=True,
        override_shape_enabled=True,
    ),
)

ROWS: tuple[Row, ...] = (REFERENCE,)

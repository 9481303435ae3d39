"""Rows of Hopper (compute capability 9.0). A row without a kernel states nothing it cannot do."""

from __future__ import annotations

from ..vocab import DType
from .capabilities import ALL_MASKS, Capabilities
from .row import Row

_CC = frozenset({(9, 0)})
_PACKAGES = (("nvidia-cutlass-dsl", "4.8"), ("apache-tvm-ffi", "0.1.15"))
# a tensor copy descriptor holds strides of 40 bits
_COPY_STRIDE_LIMIT = 1 << 40
# a sum of three extents fits a signed 32-bit integer
_EXTENT_LIMIT = 1 << 29
_HALF = frozenset({DType.HALF, DType.BFLOAT16})
_FP8 = frozenset({DType.FP8_E4M3, DType.FP8_E5M2})
_DECODE_FLAVORS = ((64, 64), (128, 128), (192, 128), (256, 256))
# what a copy of eight keys divides
_PAGE_SIZES = frozenset(8 << n for n in range(8))


def _planned(op: str, input_dtype: frozenset[DType]) -> Capabilities:
    """Capabilities of a row whose kernel is not in this version: the identity, and no shape."""
    return Capabilities(
        op=frozenset({op}),
        cc=_CC,
        packages=_PACKAGES,
        input_dtype=input_dtype,
        output_dtype=frozenset(),
        d_shapes=(),
        mask=frozenset(),
    )


PREFILL = Row(
    name="frost_sdpa_fwd_prefill_sm90",
    engine_id=910_001,
    kernel="prefill_sm90",
    qualified=True,
    behavior_notes=("RUNTIME_COMPILATION",),
    numerical_notes=("TENSOR_CORE",),
    summary="dense f16/bf16 forward: TMA, wgmma, warp-specialized",
    capabilities=Capabilities(
        op=frozenset({"sdpa"}),
        cc=_CC,
        packages=_PACKAGES,
        input_dtype=_HALF,
        output_dtype=_HALF,
        d_shapes=((128, 128),),
        d_multiple=8,
        d_floor=64,
        stride_alignment=16,
        stride_limit=_COPY_STRIDE_LIMIT,
        extent_limit=_EXTENT_LIMIT,
        mask=ALL_MASKS,
        split_kv_heads=True,
    ),
)

PREFILL_FP8 = Row(
    name="frost_sdpa_fwd_prefill_sm90_fp8",
    engine_id=910_002,
    summary="per-tensor FP8 forward",
    capabilities=_planned("sdpa_fp8", _FP8),
)


def _decode(op: str, input_dtype: frozenset[DType], output_dtype: frozenset[DType]) -> Capabilities:
    fp8 = input_dtype == _FP8
    return Capabilities(
        op=frozenset({op}),
        cc=_CC,
        packages=_PACKAGES,
        input_dtype=input_dtype,
        output_dtype=output_dtype,
        mixed_output=fp8,
        d_shapes=_DECODE_FLAVORS,
        paged_d_shapes=_DECODE_FLAVORS,
        d_multiple=16 if fp8 else 8,
        stride_alignment=16,
        stride_limit=_COPY_STRIDE_LIMIT,
        extent_limit=_EXTENT_LIMIT,
        mask=ALL_MASKS,
        padding=True,
        length_forms=frozenset({"none", "seq_len", "cu_seq_len"}),
        ragged=frozenset({"q", "o", "stats"}),
        paged_kv=True,
        page_sizes=_PAGE_SIZES,
        sink=True,
        stats_use_log2=True,
        amax_s=fp8,
        amax_o=fp8,
    )


DECODE = Row(
    name="frost_sdpa_fwd_decode_sm90",
    engine_id=910_003,
    kernel="decode_sm90",
    behavior_notes=("RUNTIME_COMPILATION",),
    numerical_notes=("TENSOR_CORE",),
    summary="paged and dense f16/bf16 decode and short queries",
    capabilities=_decode("sdpa", _HALF, _HALF),
)

DECODE_FP8 = Row(
    name="frost_sdpa_fwd_decode_sm90_fp8",
    engine_id=910_004,
    kernel="decode_sm90",
    behavior_notes=("RUNTIME_COMPILATION",),
    numerical_notes=("TENSOR_CORE",),
    summary="paged and dense FP8 decode and short queries: QK^T in FP8, PV in f16",
    capabilities=_decode("sdpa_fp8", _FP8, _FP8 | _HALF),
)

ROWS: tuple[Row, ...] = (DECODE, DECODE_FP8, PREFILL, PREFILL_FP8)

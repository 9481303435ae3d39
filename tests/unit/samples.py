"""Facts to judge: one plain dense graph, its variations by keyword, and a strategy over all."""

from __future__ import annotations

import math
import zlib
from typing import Any

from hypothesis import strategies as st

from cudnn_frost.analyzer.facts import (
    Band,
    Dropout,
    Lengths,
    Malformation,
    Operand,
    Paging,
    Ragged,
    Scale,
    SdpaFacts,
    UnknownArgument,
)
from cudnn_frost.engines import Capabilities
from cudnn_frost.engines.capabilities import ALL_MASKS
from cudnn_frost.vocab import DType, Target

FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
VERSIONS = {"torch": "2.4", "nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"}
HOPPER = Target("H200", (9, 0), sm_count=132, smem_per_block=232448, versions=VERSIONS)
BLACKWELL = Target("B200", (10, 0), sm_count=148, smem_per_block=232448, versions=VERSIONS)
CPU = Target("cpu", (0, 0), sm_count=0, smem_per_block=0, versions=VERSIONS)
TARGETS = (HOPPER, BLACKWELL, CPU)


def uid(name: str) -> int:
    """The same id for the same name, in every process."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def compact(dim: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    return tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))


def bshd(dim: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides of a (B, H, S, D) operand that lies in memory as (B, S, H, D)."""
    _, heads, rows, width = dim
    return rows * heads * width, width, heads * width, 1


def operand(
    name: str,
    dim: tuple[int, ...] = (1, 1, 1, 1),
    dtype: DType = DType.FLOAT,
    stride: tuple[int, ...] | None = None,
    ragged: Ragged | None = None,
) -> Operand:
    """A tensor; compact unless strides are given, a float scalar unless a shape is."""
    steps = compact(dim) if stride is None else stride
    return Operand(uid=uid(name), name=name, dtype=dtype, dim=dim, stride=steps, ragged=ragged)


def offsets(name: str, batch: int = 2) -> Ragged:
    """A packed operand's offsets."""
    return Ragged(uid=uid(f"{name} offsets"), dtype=DType.INT32, dim=(batch + 1, 1, 1, 1))


def lengths(side: str, form: str = "seq_len", batch: int = 2) -> Lengths:
    """Per-batch lengths of `q` or `kv`."""
    extent = batch + 1 if form == "cu_seq_len" else batch
    name = f"{form}_{side}"
    return Lengths(form=form, operand=operand(name, (extent, 1, 1, 1), DType.INT32))


def paging(size: int = 16, batch: int = 2, pages: int = 16, **changes: Any) -> Paging:
    """Both sides paged, tables dense."""
    tables = {
        f"{side}_table": operand(f"{side}_table", (batch, 1, pages, 1), DType.INT32)
        for side in "kv"
    }
    fields = {"page_size_k": size, "page_size_v": size, "pages_per_seq": pages, **tables}
    return Paging(**{**fields, **changes})


def facts(
    *,
    b: int = 2,
    h: tuple[int, int, int] = (8, 2, 2),
    s: tuple[int, int] = (256, 512),
    d: tuple[int, int] = (128, 128),
    dtype: DType = DType.BFLOAT16,
    o_dtype: DType | None = None,
    packed: tuple[str, ...] = (),
    **changes: Any,
) -> SdpaFacts:
    """A dense BSHD bf16 `sdpa` without mask; what is named differs.

    h: heads of Q, K, V. s: rows of Q and of K and V. d: (d_qk, d_v). packed: the names among
    q, k, v, o that carry ragged offsets. changes: any field of `SdpaFacts`.
    """
    dims = {
        "q": (b, h[0], s[0], d[0]),
        "k": (b, h[1], s[1], d[0]),
        "v": (b, h[2], s[1], d[1]),
        "o": (b, h[0], s[0], d[1]),
    }
    tensors = {
        name: operand(
            name,
            dim,
            (o_dtype or dtype) if name == "o" else dtype,
            bshd(dim),
            offsets(name, b) if name in packed else None,
        )
        for name, dim in dims.items()
    }
    extents = {"b": b, "h_q": h[0], "h_k": h[1], "h_v": h[2], "s_q": s[0], "s_kv": s[1]}
    fields = {"op": "sdpa", **extents, "d_qk": d[0], "d_v": d[1], **tensors}
    return SdpaFacts(**{**fields, **changes})


def fp8_facts(**changes: Any) -> SdpaFacts:
    """A dense E4M3 `sdpa_fp8` with its six scales; arguments as `facts`."""
    scales = {name: operand(name) for name in FP8_SCALES}
    return facts(**{"op": "sdpa_fp8", "dtype": DType.FP8_E4M3, **scales, **changes})


def with_stride(base: SdpaFacts, name: str, stride: tuple[int, ...]) -> SdpaFacts:
    """The same graph, one operand laid out otherwise."""
    moved = getattr(base, name).model_copy(update={"stride": stride})
    return base.model_copy(update={name: moved})


def stats(b: int = 2, h_q: int = 8, s_q: int = 256, name: str = "stats") -> Operand:
    """A row statistic of `facts()`."""
    return operand(name, (b, h_q, s_q, 1))


def _generous() -> dict[str, Any]:
    floats = frozenset({DType.HALF, DType.BFLOAT16, DType.FP8_E4M3, DType.FP8_E5M2})
    features = (
        "mixed_output padding paged_kv split_kv_heads attn_scale_prefolded sink bias alibi "
        "block_mask kv_mask score_mod stats stats_use_log2 score_max score_sum_exp rng_dump "
        "sf_o amax_s amax_o override_shape_enabled"
    )
    rows = frozenset({"q", "k", "v", "o", "stats", "score_max", "score_sum_exp"})
    return {
        "op": frozenset({"sdpa", "sdpa_fp8"}),
        "cc": frozenset({(9, 0)}),
        "packages": (("torch", "2.4"),),
        "input_dtype": floats,
        "output_dtype": floats,
        "d_shapes": ((64, 64), (128, 128)),
        "d_multiple": 8,
        "stride_alignment": 16,
        "stride_limit": 1 << 40,
        "extent_limit": 1 << 31,
        "mask": ALL_MASKS,
        "length_forms": frozenset({"none", "seq_len", "cu_seq_len"}),
        "ragged": rows,
        "paged_d_shapes": ((64, 64), (128, 128)),
        "page_sizes": frozenset({16, 64}),
        "attn_scale": frozenset({"absent", "host", "pass_by_value", "device"}),
        "dropout": frozenset({"philox", "mask"}),
        "softmax_precision": frozenset({DType.FLOAT, DType.HALF}),
        **dict.fromkeys(features.split(), True),
    }


GENEROUS = Capabilities(**_generous())
"""Takes everything that `facts()` and its variations declare, on a Hopper machine."""


# ---- strategies

_SCALARS = st.builds(operand, st.sampled_from(("t", "u")))
_FLOATS = st.sampled_from((DType.HALF, DType.BFLOAT16, DType.FLOAT, DType.FP8_E4M3, DType.NOT_SET))
_BOUND = st.none() | st.integers(-3, 1 << 20)
_TEXT = st.text(max_size=8)

bands = st.builds(
    Band, alignment=st.sampled_from(("TOP_LEFT", "BOTTOM_RIGHT")), left=_BOUND, right=_BOUND
)
scales = st.builds(
    Scale,
    form=st.sampled_from(("absent", "host", "pass_by_value", "device")),
    value=st.none() | st.floats(),
)
dropouts = st.builds(Dropout, form=st.sampled_from(("philox", "mask")))
pagings = st.builds(
    Paging,
    k_table=st.none() | _SCALARS,
    v_table=st.none() | st.just(operand("t", (2, 1, 9, 1), DType.INT32, ragged=offsets("t"))),
    page_size_k=st.none() | st.integers(0, 256),
    page_size_v=st.none() | st.integers(0, 256),
    pages_per_seq=st.integers(0, 1 << 20),
)
malformations = st.builds(Malformation, subject=_TEXT, got=_TEXT, want=_TEXT)
unknown_arguments = st.builds(
    UnknownArgument,
    kind=st.sampled_from(("input", "output", "param")),
    name=_TEXT,
    nearest=st.sampled_from(("", "use_causal_mask")),
)


@st.composite
def tensors(draw: st.DrawFn, name: str, dim: tuple[int, ...]) -> Operand:
    """An operand of these extents with any strides, of any type, packed or not."""
    free = st.tuples(*[st.integers(-64, 1 << 40)] * len(dim))
    stride = draw(st.sampled_from((compact(dim), bshd(dim))) | free)  # type: ignore[arg-type]
    packed = offsets(name) if draw(st.booleans()) else None
    return operand(name, dim, draw(_FLOATS), stride, packed)


@st.composite
def any_facts(draw: st.DrawFn) -> SdpaFacts:
    """Facts that the analyzer could have made: Q, K, V and O of rank 4, anything beside them."""
    extent = st.sampled_from((0, 1, 2, 7, 64, 72, 128, 257, 1 << 31))
    b, h_q, h_k, h_v, s_q, s_kv, d_qk, d_v = (draw(extent) for _ in range(8))
    extents = {"b": b, "h_q": h_q, "h_k": h_k, "h_v": h_v, "s_q": s_q, "s_kv": s_kv}
    dims = {
        "q": (b, h_q, s_q, d_qk),
        "k": (b, h_k, s_kv, d_qk),
        "v": (b, h_v, s_kv, d_v),
        "o": (b, h_q, s_q, d_v),
    }
    optional = {
        **dict.fromkeys(("sink", "bias", "block_mask", "kv_mask", *FP8_SCALES), _SCALARS),
        **dict.fromkeys(("stats", "score_max", "score_sum_exp"), tensors("row", (b, h_q, s_q, 1))),
        **dict.fromkeys(("rng_dump", "sf_o", "amax_s", "amax_o"), _SCALARS),
        "paging": pagings,
        "dropout": dropouts,
    }
    flags = (
        "o_virtual padding attn_scale_prefolded alibi score_mod generate_stats stats_use_log2 "
        "unfuse_fma override_shape_enabled replay_expected"
    )
    # most graphs use few features: the absent half keeps accepted graphs in reach
    sparse = {name: draw(st.none() | some) for name, some in optional.items()}
    form = st.sampled_from(("none", "seq_len", "cu_seq_len"))
    return SdpaFacts(
        op=draw(st.sampled_from(("sdpa", "sdpa_fp8"))),
        name=draw(_TEXT),
        d_qk=d_qk,
        d_v=d_v,
        **extents,
        **{name: draw(tensors(name, dim)) for name, dim in dims.items()},
        **sparse,
        **{flag: draw(st.booleans()) for flag in flags.split()},
        band=draw(bands),
        seq_len_q=Lengths(form=draw(form)),
        seq_len_kv=Lengths(form=draw(form)),
        attn_scale=draw(scales),
        compute_dtype=draw(_FLOATS),
        softmax_precision=draw(st.none() | _FLOATS),
        malformations=tuple(draw(st.lists(malformations, max_size=2))),
        unknown_arguments=tuple(draw(st.lists(unknown_arguments, max_size=2))),
    )


_BANDS = (
    Band(),
    Band(right=0),
    Band(right=0, alignment="BOTTOM_RIGHT"),
    Band(right=3, alignment="BOTTOM_RIGHT"),
    Band(left=129, right=0),
)
_SCALE = st.builds(Scale, form=st.just("host"), value=st.floats(allow_nan=False))


@st.composite
def plain_facts(draw: st.DrawFn) -> SdpaFacts:
    """Dense graphs that rows tend to accept: extents, heads, types, masks and scales vary."""
    group, h_kv = draw(st.sampled_from((1, 2, 3, 5, 8, 16))), draw(st.integers(1, 4))
    b, s_q, s_kv = (draw(st.integers(1, 1 << 17)) for _ in range(3))
    dtype = draw(st.sampled_from((DType.HALF, DType.BFLOAT16)))
    with_stats = draw(st.booleans())
    width = st.sampled_from((72, 104, 120, 128, 128, 128, 64, 136))
    return facts(
        b=b,
        h=(group * h_kv, h_kv, h_kv),
        s=(s_q, s_kv),
        d=(draw(width), draw(width)),
        dtype=dtype,
        o_dtype=draw(st.sampled_from((dtype, dtype, DType.HALF, DType.BFLOAT16))),
        band=draw(st.sampled_from(_BANDS)),
        attn_scale=draw(st.just(Scale()) | _SCALE),
        generate_stats=with_stats,
        stats=stats(b, group * h_kv, s_q) if with_stats else None,
    )

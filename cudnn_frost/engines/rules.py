"""The rules: facts against capabilities, every reason at once.

A rule reads facts, capabilities and target and yields declines. It knows no row and no
architecture; what differs between rows is in their `Capabilities`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from ..analyzer.facts import Analysis, Operand, SdpaFacts
from ..analyzer.layout import unaligned_strides
from ..vocab import Decline, DeclineCode, DType, Target
from .capabilities import Capabilities

Rule = Callable[[SdpaFacts, Capabilities, Target], Iterator[Decline]]


def _listing(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(v) for v in values)) or "nothing"


def _flavors(flavors: Iterable[tuple[int, int]] | None) -> str:
    if flavors is None:
        return "any"
    shown = ", ".join(f"({a}, {b})" for a, b in sorted(flavors))
    return f"up to one of {shown}" if shown else "nothing"


def _describe(operand: Operand) -> str:
    return f"{operand.dtype} {list(operand.dim)}"


def _at_least(found: str, minimum: str) -> bool:
    """Whether a version is a minimum or newer, by its numbers; missing ones count as 0."""
    have, need = ([int(x) for x in re.findall(r"\d+", text)[:4]] for text in (found, minimum))
    width = max(len(have), len(need))
    return have + [0] * (width - len(have)) >= need + [0] * (width - len(need))


def target_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if caps.cc is not None and target.cc not in caps.cc:
        wanted = _listing(f"sm{a}{b}" for a, b in caps.cc)
        yield Decline(DeclineCode.TARGET, "target", f"{target.arch} ({target.name})", wanted)


def packages_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if not target.versions:
        return
    for package, minimum in caps.packages:
        found = target.versions.get(package)
        if found is None or not _at_least(found, minimum):
            got = "not installed" if found is None else f"version {found}"
            remedy = f"Install {package} {minimum} or newer"
            yield Decline(DeclineCode.DEPENDENCY, package, got, f"{minimum} or newer", remedy)


def op_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if facts.op not in caps.op:
        yield Decline(DeclineCode.OP, "op", facts.op, _listing(caps.op))


def malformation_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    for bad in facts.malformations:
        yield Decline(DeclineCode.MALFORMED, bad.subject, bad.got, bad.want)
    for unknown in facts.unknown_arguments:
        remedy = f"Did you mean {unknown.nearest!r}?" if unknown.nearest else ""
        yield Decline(
            DeclineCode.UNKNOWN_ARGUMENT,
            unknown.name,
            f"an {unknown.kind} that {facts.op} does not define"
            if unknown.kind != "param"
            else f"a parameter that {facts.op} does not define",
            "documented arguments only",
            remedy,
        )


def dtype_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    taken = _listing(caps.input_dtype)
    for name, operand in (("q", facts.q), ("k", facts.k), ("v", facts.v)):
        if operand.dtype not in caps.input_dtype:
            yield Decline(DeclineCode.INPUT_DTYPE, f"{name}.data_type", str(operand.dtype), taken)
    if facts.o_virtual:
        remedy = "Call set_output(True) on O"
        yield Decline(DeclineCode.OUTPUT_DTYPE, "o", "virtual", "a real output", remedy)
    elif facts.output_dtype not in caps.output_dtype:
        taken = _listing(caps.output_dtype)
        yield Decline(DeclineCode.OUTPUT_DTYPE, "o.data_type", str(facts.output_dtype), taken)
    elif facts.mixed_output and not caps.mixed_output:
        want = f"q's type, {facts.q.dtype}"
        yield Decline(DeclineCode.OUTPUT_DTYPE, "o.data_type", str(facts.output_dtype), want)
    if facts.compute_dtype not in (DType.FLOAT, DType.NOT_SET):
        remedy = "Set compute_data_type to FLOAT"
        got = str(facts.compute_dtype)
        yield Decline(DeclineCode.COMPUTE_DTYPE, "compute_data_type", got, "FLOAT", remedy)
    asked = facts.softmax_precision
    if asked is not None and asked not in caps.softmax_precision:
        taken = _listing(caps.softmax_precision)
        yield Decline(DeclineCode.PRECISION, "softmax_precision", str(asked), taken)


def head_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if caps.flavor(facts.d_shape) is None or min(facts.d_shape) <= caps.d_floor:
        taken = _flavors(caps.d_shapes)
        taken += f", each above {caps.d_floor}" if caps.d_floor else ""
        yield Decline(DeclineCode.HEAD_DIM, "(d_qk, d_v)", str(facts.d_shape), taken)
    elif any(d % caps.d_multiple for d in facts.d_shape):
        want = f"multiples of {caps.d_multiple}"
        yield Decline(DeclineCode.HEAD_DIM, "(d_qk, d_v)", str(facts.d_shape), want)
    if facts.h_k != facts.h_v and not caps.split_kv_heads:
        got = f"{facts.h_k} and {facts.h_v}"
        yield Decline(DeclineCode.HEAD_COUNT, "heads of k and v", got, "equal counts")


def stride_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if caps.stride_alignment <= 1:
        return
    for name, operand in (("q", facts.q), ("k", facts.k), ("v", facts.v), ("o", facts.o)):
        if operand.stride and operand.stride[-1] != 1:
            got = str(operand.stride[-1])
            yield Decline(DeclineCode.STRIDE, f"{name}.stride[{len(operand.stride) - 1}]", got, "1")
            continue
        for axis, stride in unaligned_strides(operand, caps.stride_alignment):
            yield Decline(
                DeclineCode.STRIDE,
                f"{name}.stride[{axis}]",
                f"{stride} elements of {operand.dtype}",
                f"multiples of {caps.stride_alignment} bytes",
                f"Pad {name} so that the stride is a multiple of "
                f"{caps.stride_alignment // max(operand.dtype.bytes, 1)} elements",
            )


def limit_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    for name, operand in (("q", facts.q), ("k", facts.k), ("v", facts.v), ("o", facts.o)):
        for axis, (extent, stride) in enumerate(zip(operand.dim, operand.stride, strict=True)):
            if caps.extent_limit and not 0 < extent < caps.extent_limit:
                want = f"from 1 to below {caps.extent_limit}"
                yield Decline(DeclineCode.EXTENT, f"{name}.dim[{axis}]", str(extent), want)
            # a packed operand's batch stride means nothing
            stepped = extent != 1 and not (axis == 0 and operand.ragged is not None)
            step = stride * operand.dtype.bytes
            if caps.stride_limit and stepped and not 0 <= step < caps.stride_limit:
                want = f"from 0 to below {caps.stride_limit} bytes"
                got = f"{stride} elements of {operand.dtype}"
                yield Decline(DeclineCode.STRIDE, f"{name}.stride[{axis}]", got, want)


def mask_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if facts.mask not in caps.mask:
        spelt = f" ({', '.join(facts.band.spelling)})" if facts.band.spelling else ""
        yield Decline(DeclineCode.MASK, "mask", f"{facts.mask}{spelt}", _listing(caps.mask))


def length_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if facts.padding and not caps.padding:
        want = "graphs without per-batch lengths"
        yield Decline(DeclineCode.LENGTHS, "use_padding_mask", "True", want)
        return
    for side, form in zip(("q", "kv"), facts.length_forms, strict=True):
        if form not in caps.length_forms:
            taken = _listing(caps.length_forms)
            yield Decline(DeclineCode.LENGTHS, f"length form of {side}", form, taken)


def ragged_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    for name in facts.ragged:
        if name not in caps.ragged:
            want = f"ragged {_listing(caps.ragged)}" if caps.ragged else "no ragged operand"
            yield Decline(DeclineCode.RAGGED, f"{name}.ragged_offset", "set", want)


def paging_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if facts.paging is None:
        return
    if not caps.paged_kv:
        yield Decline(DeclineCode.PAGED_KV, "paged K/V", "declared", "dense K and V")
        return
    if caps.flavor(facts.d_shape, paged=True) is None:
        taken = _flavors(caps.paged_d_shapes)
        subject = "(d_qk, d_v) of paged K/V"
        yield Decline(DeclineCode.PAGED_D_SHAPE, subject, str(facts.d_shape), taken)
    for size in dict.fromkeys(facts.page_sizes):
        if caps.page_sizes is not None and size not in caps.page_sizes:
            taken = _listing(caps.page_sizes)
            yield Decline(DeclineCode.PAGE_SIZE, "page size", str(size), taken)
    for name in ("k_table", "v_table"):
        table = getattr(facts.paging, name)
        if table is not None and table.ragged is not None:
            yield Decline(DeclineCode.PAGE_TABLE, name, "packed (ragged)", "a dense table")


# feature fact -> (code, what to do about it)
_FEATURES: dict[str, tuple[DeclineCode, str]] = {
    "attn_scale_prefolded": (DeclineCode.SCALE, "Pass attn_scale and an unscaled Q"),
    "sink": (DeclineCode.SINK, ""),
    "bias": (DeclineCode.BIAS, ""),
    "alibi": (DeclineCode.ALIBI, ""),
    "block_mask": (DeclineCode.BLOCK_MASK, ""),
    "kv_mask": (DeclineCode.KV_MASK, "Express trailing masked keys with seq_len_kv"),
    "score_mod": (DeclineCode.SCORE_MOD, ""),
    "stats": (DeclineCode.STATS, "Leave Stats virtual"),
    "stats_use_log2": (DeclineCode.STATS, "Multiply natural-log Stats by log2(e) afterwards"),
    "score_max": (DeclineCode.EXTRA_OUTPUT, "Use Stats instead"),
    "score_sum_exp": (DeclineCode.EXTRA_OUTPUT, "Use Stats instead"),
    "rng_dump": (DeclineCode.EXTRA_OUTPUT, "Do not request rng_dump"),
    "sf_o": (DeclineCode.EXTRA_OUTPUT, "Declare O without block scale factors"),
    "amax_s": (DeclineCode.AMAX, "Leave Amax_S virtual and set scale_s to 448 for E4M3"),
    "amax_o": (DeclineCode.AMAX, "Leave Amax_O virtual"),
    "override_shape_enabled": (DeclineCode.OVERRIDE_SHAPE, "Declare the extents that execute"),
}


def feature_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    for name, (code, remedy) in _FEATURES.items():
        value = getattr(facts, name)
        if value and not getattr(caps, name):
            got = _describe(value) if isinstance(value, Operand) else str(value)
            yield Decline(code, name, got, f"graphs without {name}", remedy)


def scale_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    scale = facts.attn_scale
    # a value bound at execute is one that only a reader of device scales can pick up
    unknown = scale.form == "pass_by_value" and scale.value is None
    if scale.form not in caps.attn_scale:
        taken = _listing(caps.attn_scale)
        yield Decline(DeclineCode.SCALE, "attn_scale", f"a {scale.form} scale", taken)
    elif unknown and "device" not in caps.attn_scale:
        remedy = "Declare the value with the tensor, or pass a number"
        got = "a pass-by-value tensor without a value"
        yield Decline(DeclineCode.SCALE, "attn_scale", got, "a known number", remedy)


def dropout_rule(facts: SdpaFacts, caps: Capabilities, target: Target) -> Iterator[Decline]:
    if facts.dropout is not None and facts.dropout.form not in caps.dropout:
        taken = f"dropout by {_listing(caps.dropout)}" if caps.dropout else "no dropout"
        yield Decline(DeclineCode.DROPOUT, "dropout", facts.dropout.form, taken)


RULES: tuple[Rule, ...] = (
    target_rule,
    packages_rule,
    malformation_rule,
    op_rule,
    dtype_rule,
    head_rule,
    stride_rule,
    limit_rule,
    mask_rule,
    length_rule,
    ragged_rule,
    paging_rule,
    scale_rule,
    feature_rule,
    dropout_rule,
)


def graph_declines(analysis: Analysis) -> tuple[Decline, ...]:
    """Declines of a graph that gave no facts: they hold for every row."""
    if analysis.malformations:
        return tuple(
            Decline(DeclineCode.MALFORMED, bad.subject, bad.got, bad.want)
            for bad in analysis.malformations
        )
    if len(analysis.ops) == 1:
        want = "sdpa or sdpa_fp8"
        return (Decline(DeclineCode.OP, "op", f"{analysis.ops[0]}: no row serves this op", want),)
    got = f"{len(analysis.ops)} nodes ({', '.join(analysis.ops[:6])})"
    return (Decline(DeclineCode.GRAPH_SHAPE, "graph", got, "exactly one sdpa or sdpa_fp8 node"),)


def judge(facts: SdpaFacts, caps: Capabilities, target: Target) -> tuple[Decline, ...]:
    """Every decline of `facts` under `caps` on `target`, in rule order."""
    return tuple(decline for rule in RULES for decline in rule(facts, caps, target))

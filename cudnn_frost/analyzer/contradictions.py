"""Where the tensors and keywords of a declaration contradict one another.

Every check is a function of the facts alone and yields each contradiction it finds, by operand.
What an engine can do is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..vocab import DType
from .facts import Malformation, Operand, SdpaFacts
from .layout import broadcast_axes
from .ports import FP8_SCALES

Found = Iterator[Malformation]

INDEX_TYPES = (DType.INT32, DType.INT64)
_FLOATING = (DType.HALF, DType.BFLOAT16, DType.FLOAT, DType.DOUBLE)
_ROW_STATISTICS = ("stats", "score_max", "score_sum_exp")
_PACKABLE = ("q", "k", "v", "o", *_ROW_STATISTICS, "paging.k_table", "paging.v_table")
# the type of the block scale factors, by the type of O
_SF_O_TYPE = {DType.FP4_E2M1: DType.FP8_E4M3, DType.FP8_E4M3: DType.FP8_E8M0}
_BLOCK_MASK_TILE = 128


def contradictions(facts: SdpaFacts) -> Found:
    """Every contradiction of the declaration behind these facts, in the order of the checks."""
    operands = facts.operands()
    yield from _geometry(facts, operands)
    yield from _packed(facts, operands)
    for check in CHECKS:
        yield from check(facts)


def label(facts: SdpaFacts, path: str) -> str:
    """What the caller wrote for the operand at a path of the facts."""
    if path in ("seq_len_q", "seq_len_kv"):
        form = getattr(facts, path).form
        return path if form == "none" else path.replace("seq_len", form)
    names = {
        "sink": "sink_token",
        "paging.k_table": "paged_attention_k_table",
        "paging.v_table": "paged_attention_v_table",
    }
    return names.get(path, path)


# ---- one operand


def _bad(subject: str, got: object, want: str) -> Malformation:
    return Malformation(subject=subject, got=str(got), want=want)


def _typed(name: str, operand: Operand, *types: DType) -> Found:
    if operand.dtype not in types:
        yield _bad(f"{name}.data_type", operand.dtype, " or ".join(map(str, types)))


def _shaped(name: str, operand: Operand, *shapes: tuple[int, ...]) -> Found:
    if operand.dim not in shapes:
        yield _bad(f"{name}.dim", list(operand.dim), " or ".join(str(list(s)) for s in shapes))


def _vector(name: str, dim: tuple[int, ...], extent: int) -> Found:
    """Along the first axis, of rank 1 or 4."""
    if dim not in ((extent,), (extent, 1, 1, 1)):
        yield _bad(f"{name}.dim", list(dim), f"[{extent}] or [{extent}, 1, 1, 1]")


def _scalar(name: str, operand: Operand, *types: DType) -> Found:
    yield from _typed(name, operand, *types)
    if any(extent != 1 for extent in operand.dim):
        yield _bad(f"{name}.dim", list(operand.dim), "one element")


def _broadcast(name: str, operand: Operand, full: tuple[int, ...]) -> Found:
    fits = len(operand.dim) == len(full) and all(
        have in (1, want) for have, want in zip(operand.dim, full, strict=True)
    )
    if not fits:
        yield _bad(f"{name}.dim", list(operand.dim), f"broadcastable to {list(full)}")


# ---- every operand


def _geometry(facts: SdpaFacts, operands: dict[str, Operand]) -> Found:
    """Extents and strides that describe no memory."""
    for path, operand in operands.items():
        name = label(facts, path)
        if len(operand.stride) != len(operand.dim):
            got, want = list(operand.stride), f"{len(operand.dim)} entries, as dim"
            yield _bad(f"{name}.stride", got, want)
        if min((*operand.dim, *operand.stride), default=0) >= 0:
            continue
        for field in ("dim", "stride"):
            for axis, value in enumerate(getattr(operand, field)):
                if value < 0:
                    yield _bad(f"{name}.{field}[{axis}]", value, "0 or more")


def _packed(facts: SdpaFacts, operands: dict[str, Operand]) -> Found:
    """Ragged offsets: on what may carry them, one for each sequence and the end."""
    for path, operand in operands.items():
        ragged, name = operand.ragged, label(facts, path)
        if ragged is None:
            continue
        if path not in _PACKABLE:
            yield _bad(f"{name}.ragged_offset", "set", "a dense tensor")
            continue
        if ragged.dtype not in INDEX_TYPES:
            yield _bad(f"{name}.ragged_offset.data_type", ragged.dtype, "INT32 or INT64")
        yield from _vector(f"{name}.ragged_offset", ragged.dim, facts.b + 1)
        if ragged.multiplier < 1:
            yield _bad(f"{name}.ragged_offset_multiplier", ragged.multiplier, "1 or more")


def _overlap(facts: SdpaFacts) -> Found:
    """An output whose elements share an address has no value."""
    for name in ("o", *_ROW_STATISTICS, "rng_dump"):
        operand = getattr(facts, name)
        if operand is None or (name == "o" and facts.o_virtual):
            continue
        if len(operand.stride) == len(operand.dim):
            for axis in broadcast_axes(operand):
                want = f"1 or more for an output's extent of {operand.dim[axis]}"
                yield _bad(f"{name}.stride[{axis}]", 0, want)


# ---- q, k, v


def _extents(facts: SdpaFacts) -> Found:
    for name, heads in (("k", facts.h_k), ("v", facts.h_v)):
        if heads == 0 or facts.h_q % heads:
            yield _bad(f"{name}.dim[1]", heads, f"a divisor of q's {facts.h_q} heads")
    if facts.k.dim[3] != facts.d_qk:
        yield _bad("k.dim[3]", facts.k.dim[3], f"q's head dim, {facts.d_qk}")
    dense = [name for name in ("k", "v") if not _is_pool(facts, name)]
    for name in dense:
        batch = getattr(facts, name).dim[0]
        if batch != facts.b:
            yield _bad(f"{name}.dim[0]", batch, f"q's batch, {facts.b}")
    for name in dense:
        # K's extent is the keys' number, unless a page table beside it says otherwise
        rows = getattr(facts, name).dim[2]
        if rows != facts.s_kv:
            source = f"k's sequence extent, {facts.s_kv}"
            if facts.paging is not None:
                source = f"the paged side's sequence extent, {facts.s_kv}"
            yield _bad(f"{name}.dim[2]", rows, source)


def _is_pool(facts: SdpaFacts, name: str) -> bool:
    return facts.paging is not None and getattr(facts.paging, f"{name}_table") is not None


def _types(facts: SdpaFacts) -> Found:
    for name in ("k", "v"):
        dtype = getattr(facts, name).dtype
        if dtype is not facts.q.dtype:
            yield _bad(f"{name}.data_type", dtype, f"q's, {facts.q.dtype}")


# ---- packed operands and lengths


def _packing(facts: SdpaFacts) -> Found:
    for name in ("k", "v"):
        if _is_pool(facts, name) and getattr(facts, name).ragged is not None:
            yield _bad(f"{name}.ragged_offset", "set on a page pool", "no ragged offset")
    if facts.is_ragged and not facts.padding and not facts.score_mod:
        yield _bad("ragged_offset", "set", "use_padding_mask=True beside it")
    for side in ("q", "kv"):
        name = f"max_total_seq_len_{side}"
        total = getattr(facts, name)
        if total is not None and not facts.is_ragged:
            yield _bad(
                name, f"{total}, without a packed operand", "a ragged offset on Q, K, V or O"
            )
        elif total is not None and total < 1:
            yield _bad(name, total, "1 or more")


def _lengths(facts: SdpaFacts) -> Found:
    for path in ("seq_len_q", "seq_len_kv"):
        side, name = getattr(facts, path), label(facts, path)
        if side.operand is None:
            continue
        yield from _typed(name, side.operand, *INDEX_TYPES)
        extent = facts.b + 1 if side.form == "cu_seq_len" else facts.b
        yield from _vector(name, side.operand.dim, extent)
        if not facts.padding and not facts.score_mod:
            yield _bad(name, "set", "use_padding_mask=True beside it")


def _tables(facts: SdpaFacts) -> Found:
    paging = facts.paging
    if paging is None:
        return
    extents = {}
    for side in ("k", "v"):
        table, name = getattr(paging, f"{side}_table"), f"paged_attention_{side}_table"
        if table is None:
            continue
        yield from _typed(name, table, DType.INT32)
        if len(table.dim) != 4 or table.dim[1] != 1 or table.dim[3] != 1:
            yield _bad(f"{name}.dim", list(table.dim), f"[{facts.b}, 1, pages, 1]")
            continue
        if table.dim[0] != facts.b:
            yield _bad(f"{name}.dim[0]", table.dim[0], f"the batch, {facts.b}")
        extents[side] = table.dim[2]
    # pages of another size cover the same keys in another number
    if len(set(extents.values())) > 1 and paging.page_size_k == paging.page_size_v:
        got = f"{extents['v']} pages, {extents['k']} in the K table"
        yield _bad("paged_attention_v_table.dim[2]", got, "equal extents of both tables")
    if paging.max_seq_len_kv is not None and paging.max_seq_len_kv < 1:
        yield _bad("paged_attention_max_seq_len_kv", paging.max_seq_len_kv, "1 or more")


# ---- scales


def _scales(facts: SdpaFacts) -> Found:
    scale = facts.attn_scale
    if scale.form == "device" and scale.operand is not None:
        yield from _scalar("attn_scale", scale.operand, DType.FLOAT)
    elif scale.form == "pass_by_value" and scale.value is None and scale.operand is not None:
        yield from _scalar("attn_scale", scale.operand, *_FLOATING)
    if facts.attn_scale_prefolded and scale.form != "absent":
        want = "no attn_scale beside it: Q carries the scale"
        yield _bad("attn_scale_prefolded", "True", want)
    for name in FP8_SCALES:
        operand = getattr(facts, name)
        if operand is not None:
            yield from _scalar(name, operand, DType.FLOAT)


# ---- outputs


def _outputs(facts: SdpaFacts) -> Found:
    rows = (facts.b, facts.h_q, facts.s_q)
    yield from _shaped("o", facts.o, (*rows, facts.d_v))
    for name in _ROW_STATISTICS:
        operand = getattr(facts, name)
        if operand is not None:
            yield from _typed(name, operand, DType.FLOAT)
            yield from _shaped(name, operand, (*rows, 1))
    if facts.stats is not None and not facts.generate_stats:
        yield _bad("stats", "an output", "generate_stats=True beside it")
    if facts.rng_dump is not None:
        yield from _typed("rng_dump", facts.rng_dump, DType.FLOAT)
        yield from _shaped("rng_dump", facts.rng_dump, (*rows, facts.s_kv))
    for name in ("amax_s", "amax_o"):
        operand = getattr(facts, name)
        if operand is not None:
            yield from _scalar(name, operand, DType.FLOAT)
    yield from _block_scaled(facts)


def _block_scaled(facts: SdpaFacts) -> Found:
    """FP4 O has scale factors, FP8 O may have, no other O can."""
    o, factors = facts.o.dtype, facts.sf_o
    if o is DType.FP4_E2M1 and factors is None:
        yield _bad("sf_o", "missing", "scale factors of an FP4_E2M1 O")
    elif factors is not None and o not in _SF_O_TYPE:
        yield _bad("sf_o", f"set beside an O of {o}", "an O of FP4_E2M1 or FP8_E4M3")
    elif factors is not None:
        yield from _typed("sf_o", factors, _SF_O_TYPE[o])


# ---- what is added to the scores


def _sink(facts: SdpaFacts) -> Found:
    if facts.sink is not None:
        yield from _typed("sink_token", facts.sink, DType.FLOAT)
        yield from _shaped("sink_token", facts.sink, (1, facts.h_q, 1, 1))


def _biases(facts: SdpaFacts) -> Found:
    if facts.bias is not None:
        full = (facts.b, facts.h_q, facts.s_q, facts.s_kv)
        yield from _broadcast("bias", facts.bias, full)
        if facts.bias.dtype is DType.BOOLEAN:
            yield _bad("bias.data_type", facts.bias.dtype, "a floating type")
    if facts.kv_mask is not None:
        yield from _broadcast("kv_mask", facts.kv_mask, (facts.b, 1, 1, facts.s_kv))
        if facts.kv_mask.dtype not in (DType.BOOLEAN, DType.FLOAT, facts.q.dtype):
            want = f"BOOLEAN, FLOAT or q's, {facts.q.dtype}"
            yield _bad("kv_mask.data_type", facts.kv_mask.dtype, want)
    if facts.block_mask is not None:
        tiles_q, tiles_kv = (-(-s // _BLOCK_MASK_TILE) for s in (facts.s_q, facts.s_kv))
        yield from _typed("block_mask", facts.block_mask, DType.UINT8)
        shape = (facts.b, facts.h_q, tiles_q, -(-tiles_kv // 8))
        yield from _shaped("block_mask", facts.block_mask, shape)


def _dropout(facts: SdpaFacts) -> Found:
    dropout = facts.dropout
    if dropout is None:
        return
    for name in ("seed", "offset"):
        operand = getattr(dropout, name)
        if operand is not None:
            yield from _scalar(f"dropout.{name}", operand, *INDEX_TYPES)
    if dropout.mask is not None:
        full = (facts.b, facts.h_q, facts.s_q, facts.s_kv)
        yield from _broadcast("dropout.mask", dropout.mask, full)
    if dropout.scale is not None:
        yield from _scalar("dropout.scale", dropout.scale, *_FLOATING)


def _keywords(facts: SdpaFacts) -> Found:
    """Keywords that exclude or need one another."""
    if facts.alibi and facts.band.right != 0:
        yield _bad("use_alibi_mask", "True", "a right bound of 0 beside it")
    if facts.score_mod:
        beside = {
            "use_padding_mask": facts.padding,
            "use_alibi_mask": facts.alibi,
            "a bound": facts.band.kind != "none",
        }
        for name in (name for name, is_set in beside.items() if is_set):
            keyword = "score_mod" if facts.op == "sdpa" else "fn"
            yield _bad(keyword, f"set beside {name}", "one or the other")


CHECKS: tuple[Callable[[SdpaFacts], Found], ...] = (
    _extents,
    _types,
    _packing,
    _lengths,
    _tables,
    _scales,
    _outputs,
    _overlap,
    _sink,
    _biases,
    _dropout,
    _keywords,
)

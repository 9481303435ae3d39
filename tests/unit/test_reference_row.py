"""The reference row's computation, case by case: empty work, dead memory, pages, layouts, calls."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from cudnn_frost.analyzer.facts import Band, Dropout, Lengths, Operand, Paging, Ragged, Scale
from cudnn_frost.analyzer.layout import span_elements
from cudnn_frost.engines import reference
from cudnn_frost.engines.reference import NOT_SERVED
from cudnn_frost.engines.rows_any import REFERENCE
from cudnn_frost.vocab import DType

from .test_reference_support import (
    CANARY,
    CAUSAL,
    CAUSAL_BR,
    INF,
    NAN,
    Memory,
    Run,
    by_hand,
    check_by_hand,
    dense,
    draw,
    lengths,
    one_row,
    prepare,
    qkv,
    token_major,
)

# ---- against torch, and plain numbers


@pytest.mark.parametrize("causal", [False, True])
def test_fp64_agrees_with_torch(causal: bool) -> None:
    tensors = qkv(s_q=9, s_kv=9, d=16, d_v=8)
    run = dense(Memory(), tensors, band=CAUSAL if causal else Band()).go()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in tensors), is_causal=causal, scale=1.0
    )
    torch.testing.assert_close(run.o, expected, rtol=1e-6, atol=1e-6)


def test_fp64_is_more_exact_than_fp32() -> None:
    # 1e8 + 1 is not an fp32 number, so its scores tie there
    for precision, expected in (("fp32", 0.5), ("fp64", 1 / (1 + math.e))):
        memory = Memory()
        q = torch.tensor([1e4, 1.0]).reshape(1, 1, 1, 2)
        k = torch.tensor([[1e4, 0.0], [1e4, 1.0]]).reshape(1, 1, 2, 2)
        run = dense(memory, (q, k, torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1))).go(precision)
        assert run.o.item() == pytest.approx(expected)


def test_softmax_statistics_of_one_row() -> None:
    run = one_row([0.0, math.log(3.0)], [1.0, 5.0]).go()
    assert run.o.item() == pytest.approx(4.0)
    assert run.stats.item() == pytest.approx(math.log(4.0))
    assert run.score_max.item() == pytest.approx(math.log(3.0))
    assert run.score_sum_exp.item() == pytest.approx(4 / 3)


def test_log2_changes_stats_alone() -> None:
    run = one_row([0.0, math.log(3.0)], [1.0, 5.0], stats_use_log2=True).go()
    assert run.stats.item() == pytest.approx(2.0)
    assert run.score_max.item() == pytest.approx(math.log(3.0))
    assert run.score_sum_exp.item() == pytest.approx(4 / 3)


def test_sink_takes_part_in_every_statistic() -> None:
    memory = Memory()
    q, k = torch.ones(1, 2, 1, 1), torch.zeros(1, 1, 1, 1)
    sink = memory.add("sink", torch.tensor([0.0, math.log(4.0)]).reshape(1, 2, 1, 1))
    want = ("stats", "score_max", "score_sum_exp")
    run = dense(memory, (q, k, torch.ones(1, 1, 1, 1)), sink=sink, want=want).go()
    assert run.o.flatten().tolist() == pytest.approx([1 / 2, 1 / 5])
    assert run.stats.flatten().tolist() == pytest.approx([math.log(2.0), math.log(5.0)])
    assert run.score_max.flatten().tolist() == pytest.approx([0.0, math.log(4.0)])
    assert run.score_sum_exp.flatten().tolist() == pytest.approx([2.0, 5 / 4])


# ---- 1 to 8: empty work


@pytest.mark.parametrize("sink", [None, -1000.0, -5.0, 0.0, 3.0, 100.0])
def test_batches_without_keys_or_queries(sink: float | None) -> None:
    tensors = qkv(b=4, s_q=3, s_kv=4)
    memory = Memory()
    len_q, len_kv = [3, 0, 2, 0], [0, 4, 3, 0]
    fields: dict[str, Any] = lengths(memory, len_q, len_kv)
    if sink is not None:
        fields["sink"] = memory.add("sink", torch.full((1, 2, 1, 1), sink))
    run = dense(memory, tensors, **fields, want=("stats", "score_max", "score_sum_exp")).go()
    for b in range(4):
        for i in range(3):
            if i < len_q[b] and len_kv[b]:
                assert run.stats[b, 0, i].item() > -INF
                continue
            # a live row without keys has the sink, a dead row has nothing
            lse = sink if sink is not None and i < len_q[b] else -INF
            assert not run.o[b, :, i].any()
            assert (run.stats[b, :, i] == lse).all()
            assert (run.score_max[b, :, i] == lse).all()
            assert (run.score_sum_exp[b, :, i] == (0.0 if lse == -INF else 1.0)).all()
    heads = (x[2, 0, :n] for x, n in zip(tensors, (2, 3, 3), strict=True))
    expected, stats = by_hand(*heads, lambda i, j: True, sink=sink)
    torch.testing.assert_close(run.o[2, 0, :2], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run.stats[2, 0, :2, 0], stats, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("log2", [False, True])
def test_every_batch_without_keys(log2: bool) -> None:
    memory = Memory()
    fields = lengths(memory, [5, 5], [0, 0])
    run = dense(memory, qkv(), **fields, stats_use_log2=log2).go()
    assert not run.o.any() and (run.stats == -INF).all()


def test_whole_tile_of_rows_without_a_key() -> None:
    # left window 4 over 3 keys, top left: rows from 6 on see nothing
    memory = Memory()
    tensors = qkv(b=1, s_q=300, s_kv=8)
    fields = lengths(memory, [300], [3])
    run = dense(memory, tensors, **fields, band=Band(left=4)).go()
    assert (run.stats[0, :, 6:] == -INF).all() and not run.o[0, :, 6:].any()
    assert (run.stats[0, :, :6] > -INF).all()
    check_by_hand(run, tensors, lambda b, i, j: j < 3 and j > i - 4)


def test_bottom_right_with_more_queries_than_keys() -> None:
    memory = Memory()
    tensors = qkv(b=2, s_q=5, s_kv=7)
    len_q, len_kv = [5, 4], [3, 6]
    run = dense(memory, tensors, **lengths(memory, len_q, len_kv), band=CAUSAL_BR).go()
    assert (run.stats[0, :, :2] == -INF).all() and (run.stats[0, :, 2:] > -INF).all()
    check_by_hand(
        run,
        tensors,
        lambda b, i, j: i < len_q[b] and j < len_kv[b] and j <= i + len_kv[b] - len_q[b],
    )


def test_top_left_causal_with_more_queries_than_keys_has_no_keyless_row() -> None:
    tensors = qkv(s_q=6, s_kv=3)
    run = dense(Memory(), tensors, band=CAUSAL).go()
    assert (run.stats > -INF).all()
    check_by_hand(run, tensors, lambda b, i, j: j <= i)


@pytest.mark.parametrize("s_q", [2, 3, 8])
def test_speculative_decode_rows(s_q: int) -> None:
    memory = Memory()
    tensors = qkv(b=3, s_q=s_q, s_kv=12)
    len_kv = [12, 1, s_q]
    run = dense(memory, tensors, **lengths(memory, [s_q] * 3, len_kv), band=CAUSAL_BR).go()
    visible = [[max(0, min(n, n - s_q + i + 1)) for i in range(s_q)] for n in len_kv]
    assert visible[1][0] == 0 and visible[2][0] == 1
    check_by_hand(run, tensors, lambda b, i, j: j < visible[b][i])


def test_dead_rows_of_a_dense_graph() -> None:
    tensors = qkv(s_q=5, s_kv=4)
    memory = Memory()
    q = memory.add("Q", tensors[0], dead_rows=[2, 4])
    k, v = memory.add("K", tensors[1]), memory.add("V", tensors[2])
    fields = lengths(memory, [2, 4], [4, 4])
    run = prepare(memory, q, k, v, **fields, want=("stats", "amax_o", "amax_s")).go()
    for b, length in enumerate((2, 4)):
        assert not run.o[b, :, length:].any()
        assert (run.stats[b, :, length:] == -INF).all()
    assert run.amax_o.item() == pytest.approx(run.o.abs().max().item())
    assert 0 < run.amax_s.item() <= 1


def test_padding_rows_of_a_captured_decode_batch() -> None:
    tensors = qkv(b=3, s_q=1, s_kv=4)
    memory = Memory()
    q = memory.add("Q", tensors[0])
    lens = [0, 3, 0]
    table = [[-1, -1], [0, 1], [-1, -1]]
    k, k_table = memory.paged("K", tensors[1], lens, table, 2, pages=3)
    v, v_table = memory.paged("V", tensors[2], lens, table, 2, pages=3)
    paging = Paging(k_table=k_table, v_table=v_table, page_size_k=2, page_size_v=2, pages_per_seq=2)
    fields = lengths(memory, [0, 1, 1], lens)
    run = prepare(memory, q, k, v, s_kv=4, paging=paging, **fields).go()
    assert not run.o[[0, 2]].any() and (run.stats[[0, 2]] == -INF).all()
    check_by_hand(run, tensors, lambda b, i, j: b == 1 and j < 3)


# ---- 9: memory nobody may trust


def poisoned(dead: float, dtype: torch.dtype, layout: str) -> Run:
    """Lengths 3 and 0 of 5 queries, 4 and 6 of 8 keys, with `dead` wherever nothing lives."""
    tensors = qkv(b=2, h_q=4, h_k=2, s_q=5, s_kv=8, d=16, dtype=dtype)
    memory = Memory(dead=dead)
    len_q, len_kv = [3, 2], [4, 7]
    fields: dict[str, Any] = lengths(memory, len_q, len_kv)
    q = memory.add("Q", tensors[0], dead_rows=len_q)
    if layout == "dense":
        k, v = (
            memory.add(n, x, token_major(x.shape), dead_rows=len_kv)
            for n, x in zip("KV", tensors[1:], strict=True)
        )
    elif layout == "ragged":
        k = memory.packed("K", tensors[1], len_kv, [1, 6], room=20)
        v = memory.packed("V", tensors[2], len_kv, [9, 0], room=20)
    else:
        table = [[3, 99999], [5, 0]]
        k, k_table = memory.paged("K", tensors[1], len_kv, table, 4, pages=6)
        v, v_table = memory.paged("V", tensors[2], len_kv, table, 4, pages=6, nhd=True)
        fields["paging"] = Paging(
            k_table=k_table, v_table=v_table, page_size_k=4, page_size_v=4, pages_per_seq=2
        )
        fields["s_kv"] = 8
    want = ("stats", "score_max", "score_sum_exp", "amax_o", "amax_s")
    return prepare(memory, q, k, v, o_dtype=torch.bfloat16, want=want, **fields).go("fp32")


@pytest.mark.parametrize("layout", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dead_memory_leaves_every_bit_as_it_was(layout: str, dtype: torch.dtype) -> None:
    clean = poisoned(0.0, dtype, layout)
    assert clean.o.any() and torch.isfinite(clean.o).all()
    for dead in (NAN, INF, -INF):
        dirty = poisoned(dead, dtype, layout)
        for name in ("o", "stats", "score_max", "score_sum_exp", "amax_o", "amax_s"):
            assert torch.equal(getattr(clean, name), getattr(dirty, name)), (name, dead)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_row_is_free_of_keys_it_does_not_see(value: float) -> None:
    q, k, v = qkv(b=1, s_q=4, s_kv=4)
    clean = dense(Memory(), (q, k, v), band=CAUSAL).go()
    k, v = k.clone(), v.clone()
    k[:, :, 2:], v[:, :, 2] = NAN, value
    dirty = dense(Memory(), (q, k, v), band=CAUSAL).go()
    assert torch.equal(clean.o[:, :, :2], dirty.o[:, :, :2])
    assert torch.isnan(dirty.o[:, :, 2:]).all()


def test_a_live_value_that_is_not_finite_stays_visible() -> None:
    values = [[INF, 1.0], [-INF, 1.0], [NAN, 1.0], [INF, -INF]]
    found = [one_row([0.0, 0.0], pair).go().o.item() for pair in values]
    assert found[:2] == [INF, -INF] and math.isnan(found[2]) and math.isnan(found[3])


def test_live_nan_reaches_amax() -> None:
    run = one_row([0.0, 0.0], [NAN, 1.0], want=("stats", "amax_o")).go()
    assert math.isnan(run.amax_o.item())


@pytest.mark.parametrize("form", ["boolean", "additive", "bias", "dropout"])
def test_masked_key_may_hold_nan(form: str) -> None:
    memory = Memory()
    q, k, v = qkv(b=1, h_q=1, s_q=3, s_kv=4)
    k, v = k.clone(), v.clone()
    v[:, :, 1] = NAN
    fields: dict[str, Any] = {}
    if form == "boolean":
        k[:, :, 1] = NAN
        mask = torch.tensor([True, False, True, True]).reshape(1, 1, 1, 4)
        fields["kv_mask"] = memory.add("mask", mask)
    elif form == "additive":
        fields["kv_mask"] = memory.add("mask", torch.tensor([0, -INF, 0, 0]).reshape(1, 1, 1, 4))
    elif form == "bias":
        fields["bias"] = memory.add("bias", torch.tensor([0, -INF, 0, 0]).expand(1, 1, 3, 4))
    else:
        kept = memory.add("mask", torch.tensor([1.0, 0, 1, 1]).expand(1, 1, 3, 4))
        scale = memory.add("scale", torch.ones(1, 1, 1, 1))
        fields["dropout"] = Dropout(form="mask", mask=kept, scale=scale)
    run = dense(memory, (q, k, v), **fields).go()
    assert torch.isfinite(run.o).all()
    if form != "dropout":
        check_by_hand(run, (q, k.nan_to_num(), v.nan_to_num()), lambda b, i, j: j != 1)


# ---- 10 to 13: pages


def paged_run(tables, len_kv, *, sizes=(2, 2), s_kv=8, pages=12, strides=(None, None), **fields):
    """Queries of length 2 over keys that `tables` (K's, V's) scatter; extents 8."""
    tensors = qkv(b=len(len_kv), s_q=2, s_kv=8)
    memory = Memory()
    q = memory.add("Q", tensors[0])
    sides = []
    for name, x, table, size, stride in zip("KV", tensors[1:], tables, sizes, strides, strict=True):
        if table is None:
            sides.append((memory.add(name, x), None))
            continue
        sides.append(memory.paged(name, x, len_kv, table, size, pages=pages, table_stride=stride))
    (k, k_table), (v, v_table) = sides
    table = tables[0] or tables[1]
    paging = Paging(
        k_table=k_table,
        v_table=v_table,
        page_size_k=sizes[0] if k_table else None,
        page_size_v=sizes[1] if v_table else None,
        pages_per_seq=len(table[0]),
        max_seq_len_kv=fields.pop("max_seq_len_kv", None),
    )
    q_lens = lengths(memory, [2] * len(len_kv), len_kv)
    return prepare(memory, q, k, v, s_kv=s_kv, paging=paging, **q_lens, **fields), tensors


@pytest.mark.parametrize("garbage", [-1, 0, 12, 2**31 - 1, -(2**31)])
def test_table_entries_past_the_length_are_not_looked_up(garbage: int) -> None:
    table = [[4, garbage, garbage, garbage], [7, 2, 9, garbage]]
    run, tensors = paged_run((table, table), [1, 5])
    check_by_hand(run.go(), tensors, lambda b, i, j: j < [1, 5][b])


@pytest.mark.parametrize("left", [3, 4])
def test_pages_in_front_of_a_window_are_not_looked_up(left: int) -> None:
    # bottom right, two rows over 8 keys: keys before 7 - left are seen by nobody
    band = Band(left=left, right=0, alignment="BOTTOM_RIGHT")
    table = [[0, 1, 3, 6]]
    run, tensors = paged_run((table, table), [8], band=band)
    dead = (7 - left) // 2
    for name in ("k_table", "v_table"):
        operand = getattr(run.facts.paging, name)
        entries = run.memory.view(operand, operand.dim, operand.stride)[0, 0, :dead, 0]
        entries.copy_(torch.tensor([-1, 99999])[:dead])
    for pool in (run.facts.k, run.facts.v):
        run.memory.view(pool, pool.dim, pool.stride)[:dead] = NAN
    check_by_hand(run.go(), tensors, lambda b, i, j: i + 6 - left < j <= i + 6)


def test_sequence_without_queries_looks_up_no_page() -> None:
    table = [[-1, 99999, 3, 6], [0, 1, 2, 4]]
    run, tensors = paged_run((table[1:] * 2, table[1:] * 2), [8, 8])
    for operand in (run.facts.paging.k_table, run.facts.paging.v_table):
        run.memory.view(operand, operand.dim, operand.stride)[0, 0, :, 0] = torch.tensor(table[0])
    queries = run.facts.seq_len_q.operand
    run.memory.view(queries, queries.dim, queries.stride)[0] = 0
    check_by_hand(run.go(), tensors, lambda b, i, j: b == 1)


@pytest.mark.parametrize("length", [4, 5, 8, 1000])
def test_walk_is_held_to_what_the_table_can_hold(length: int) -> None:
    table = [[5, 1]]
    run, tensors = paged_run((table, table), [length], band=CAUSAL_BR)
    check_by_hand(run.go(), tensors, lambda b, i, j: j < 4 and j <= i + 2)


@pytest.mark.parametrize("length", [3, 8, 1000])
def test_walk_is_held_to_the_declared_maximum(length: int) -> None:
    table = [[5, 1, 3, 4]]
    run, tensors = paged_run((table, table), [length], s_kv=3, max_seq_len_kv=3)
    check_by_hand(run.go(), tensors, lambda b, i, j: j < 3)


def test_length_beyond_a_dense_extent_is_held_to_it() -> None:
    memory = Memory()
    tensors = qkv(b=1)
    run = dense(memory, tensors, **lengths(memory, [50], [70])).go()
    check_by_hand(run, tensors, lambda b, i, j: True)


def test_negative_lengths_count_as_empty() -> None:
    memory = Memory()
    tensors = qkv(b=3)
    run = dense(memory, tensors, **lengths(memory, [5, -1, 5], [7, 7, -3])).go()
    check_by_hand(run, tensors, lambda b, i, j: b == 0)


def test_lengths_have_a_declared_stride() -> None:
    memory = Memory()
    tensors = qkv()
    spaced = memory.add("lengths", torch.tensor([4, 2]).reshape(2, 1, 1, 1), (3, 1, 1, 1))
    sides = dict.fromkeys(("seq_len_q", "seq_len_kv"), Lengths(form="seq_len", operand=spaced))
    run = dense(memory, tensors, **sides).go()
    check_by_hand(run, tensors, lambda b, i, j: i < [4, 2][b] and j < [4, 2][b])


def test_dense_side_of_a_paged_graph_bounds_the_walk() -> None:
    q, k, v = qkv(b=1, s_q=2, s_kv=8)
    memory = Memory()
    table = [[3, 0, 2, 1]]
    pool, k_table = memory.paged("K", k, [8], table, 2, pages=4)
    paging = Paging(k_table=k_table, page_size_k=2, pages_per_seq=4)
    operands = memory.add("Q", q), pool, memory.add("V", v[:, :, :5])
    run = prepare(memory, *operands, s_kv=8, paging=paging, **lengths(memory, [2], [8])).go()
    check_by_hand(run, (q, k, v), lambda b, i, j: j < 5)


@pytest.mark.parametrize(
    "tables, sizes",
    [
        (([[8, 3, 5, 0]], [[1, 0, 2, 4]]), (2, 2)),
        (([[8, 3, 5, 0]], [[1, 0]]), (2, 4)),
        (([[1, 0]], [[8, 3, 5, 0]]), (4, 2)),
        (([[8, 3, 5, 0]], None), (2, 2)),
        ((None, [[8, 3, 5, 0]]), (2, 2)),
        (([[8, 3, 5, 0, -1, -1, -1]], [[1, 0, 2, 4]]), (2, 2)),
    ],
    ids=["own ids", "larger V pages", "larger K pages", "K alone", "V alone", "wide K table"],
)
def test_each_side_has_its_own_pages(tables, sizes) -> None:
    run, tensors = paged_run(tables, [7], sizes=sizes)
    check_by_hand(run.go(), tensors, lambda b, i, j: j < 7)


def test_table_strides_are_as_declared() -> None:
    tables = ([[8, 3, 5, 0], [1, 2, 4, 6]], [[0, 1, 2, 3], [4, 5, 6, 7]])
    strides = ((1, 1, 2, 1), (11, 1, 2, 1))
    run, tensors = paged_run(tables, [7, 8], strides=strides)
    check_by_hand(run.go(), tensors, lambda b, i, j: j < [7, 8][b])


def test_one_table_for_both_sides() -> None:
    table = [[8, 3, 5, 0]]
    run, tensors = paged_run((table, table), [7])
    paging = run.facts.paging.model_copy(update={"v_table": run.facts.paging.k_table})
    shared = Run(run.memory, run.facts.model_copy(update={"paging": paging})).go()
    check_by_hand(shared, tensors, lambda b, i, j: j < 7)


@pytest.mark.parametrize("page", [-1, 12])
def test_live_page_outside_the_pool_is_named(page: int) -> None:
    table = [[0, 1, 2, 3], [4, 5, 6, 7]]
    band = Band(left=3, right=0, alignment="BOTTOM_RIGHT")
    run, _ = paged_run((table, table), [8, 8], band=band)
    operand = run.facts.paging.v_table
    run.memory.view(operand, operand.dim, operand.stride)[1, 0, 2, 0] = page
    with pytest.raises(ValueError, match=rf"V\.table.*page 2 of batch 1 is {page}.*12 pages"):
        run.go()


def test_page_beyond_two_to_the_31_elements() -> None:
    # memory that is never touched is never there
    memory = Memory()
    q = memory.add("Q", torch.ones(1, 1, 1, 16).to(torch.float8_e4m3fn))
    stride = (1 << 20, 16 * 2, 16, 1)
    pool = torch.empty(2050 << 20, dtype=torch.uint8).view(torch.float8_e4m3fn)
    memory.flat[90] = pool
    at = 2049 << 20
    pool[at : at + 32] = torch.tensor([0.0] * 16 + [0.25] * 16).to(torch.float8_e4m3fn)
    k = Operand(uid=90, name="K", dtype=DType.FP8_E4M3, dim=(2050, 1, 2, 16), stride=stride)
    table = memory.ints("table", [2049], dim=(1, 1, 1, 1))
    paging = Paging(k_table=table, v_table=table, page_size_k=2, page_size_v=2, pages_per_seq=1)
    run = prepare(memory, q, k, k, s_kv=2, paging=paging).go()
    expected = 0.25 / (1 + math.exp(-4.0))
    assert run.o.flatten().tolist() == pytest.approx([expected] * 16)


def test_batch_beyond_two_to_the_31_elements() -> None:
    memory = Memory()
    q = memory.add("Q", torch.zeros(2, 1, 1, 16).to(torch.float8_e4m3fn))
    far = (1 << 31) + 32
    flat = memory.flat[90] = torch.empty(far + 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    flat[:16], flat[far:] = 1.0, 3.0
    stride = (far, 16, 16, 1)
    k = Operand(uid=90, name="K", dtype=DType.FP8_E4M3, dim=(2, 1, 1, 16), stride=stride)
    run = prepare(memory, q, k, k).go()
    assert (run.o[0] == 1).all() and (run.o[1] == 3).all()


# ---- 14 to 19: layouts


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv(b=1, s_q=23, s_kv=9)
    memory = Memory()
    bias = memory.add("bias", draw(1, 2, 23, 9, seed=5))
    run = dense(memory, tensors, band=CAUSAL, bias=bias, alibi=True).go()
    expected, stats = run.o.clone(), run.stats.clone()
    sizes = []
    scores = reference._Attention._scores

    def watched(self, sequence, rows, k):
        sizes.append(rows.stop - rows.start)
        return scores(self, sequence, rows, k)

    monkeypatch.setattr(reference._Attention, "_scores", watched)
    monkeypatch.setattr(reference, "_SCORE_BYTES", 5 * 2 * 9 * 8)
    run.go()
    assert sizes == [5, 5, 5, 5, 3]
    torch.testing.assert_close(run.o, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(run.stats, stats, rtol=1e-7, atol=1e-7)


def test_row_whose_scores_exceed_the_budget_is_still_done(monkeypatch) -> None:
    tensors = qkv(b=1)
    monkeypatch.setattr(reference, "_SCORE_BYTES", 1)
    check_by_hand(dense(Memory(), tensors).go(), tensors, lambda b, i, j: True)


STRIDES = {
    "BSHD": lambda b, h, s, d: (s * h * d, d, h * d, 1),
    "SBHD": lambda b, h, s, d: (h * d, d, b * h * d, 1),
    "interleaved": lambda b, h, s, d: (s * 3 * h * d, d, 3 * h * d, 1),
    "padded rows": lambda b, h, s, d: (h * s * (d + 3), s * (d + 3), d + 3, 1),
    "strided d": lambda b, h, s, d: (h * s * d * 2, s * d * 2, d * 2, 2),
    "HSBD": lambda b, h, s, d: (d, s * b * d, b * d, 1),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_strides_are_as_declared(layout: str) -> None:
    tensors = qkv(h_q=4, h_k=2)
    expected = dense(Memory(), tensors).go()
    memory = Memory()
    operands = [
        memory.add(n, x, STRIDES[layout](*x.shape)) for n, x in zip("QKV", tensors, strict=True)
    ]
    dim = (2, 4, 5, 4)
    o = memory.out("O", dim, torch.float32, STRIDES[layout](*dim))
    stats = memory.out("Stats", (*dim[:3], 1), torch.float32, (20, 1, 4, 1))
    run = prepare(memory, *operands, o=o, stats=stats).go()
    assert torch.equal(run.o, expected.o) and torch.equal(run.stats, expected.stats)
    # nothing between the rows of O was written
    written = span_elements(dim, o.stride) - int((memory.flat[o.uid] == CANARY).sum())
    assert written == math.prod(dim)


def test_broadcast_strides() -> None:
    q, k, v = qkv()
    shared_k = k[:1, :1].expand_as(k)
    shared_v = v[:, :1].expand_as(v)
    expected = dense(Memory(), (q, shared_k, shared_v)).go()
    memory = Memory()
    small_k = memory.add("K", k[:1, :1])
    small_v = memory.add("V", v[:, :1])
    s, d = k.shape[2:]
    run = prepare(
        memory,
        memory.add("Q", q),
        small_k.model_copy(update={"dim": tuple(k.shape), "stride": (0, 0, d, 1)}),
        small_v.model_copy(update={"dim": tuple(v.shape), "stride": (s * d, 0, d, 1)}),
    ).go()
    assert torch.equal(run.o, expected.o)


@pytest.mark.parametrize("unit", ["elements", "tokens"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_operands_with_offsets_of_their_own(unit: str, dtype: torch.dtype) -> None:
    tensors = qkv(b=3, h_q=4, h_k=2, s_q=5, s_kv=7, d_v=8)
    len_q, len_kv = [4, 0, 5], [7, 3, 2]
    memory = Memory()

    def packed(name, x, lens, origins):
        step = x.shape[1] * x.shape[3] if unit == "tokens" else 1
        return memory.packed(name, x, lens, origins, unit=step, dtype=dtype, room=30)

    q = packed("Q", tensors[0], len_q, [1, 5, 9])
    # not monotone, with gaps
    k = packed("K", tensors[1], len_kv, [10, 0, 20])
    v = packed("V", tensors[2], len_kv, [0, 18, 9])
    outputs = {}
    for name, width, origins in (
        ("o", 8, [20, 0, 2]),
        ("stats", 1, [0, 4, 6]),
        ("score_max", 1, [6, 5, 0]),
        ("score_sum_exp", 1, [3, 0, 11]),
    ):
        outputs[name] = packed(name, torch.zeros(3, 4, 5, width), [0, 0, 0], origins)
        memory.flat[outputs[name].uid].fill_(CANARY)
    prepare(memory, q, k, v, **outputs, **lengths(memory, len_q, len_kv), want=()).go()
    padded = Memory()
    expected = dense(
        padded,
        tensors,
        **lengths(padded, len_q, len_kv),
        want=("stats", "score_max", "score_sum_exp"),
    ).go()
    for name, operand in outputs.items():
        h, width = operand.dim[1], operand.dim[3]
        left = memory.flat[operand.uid].clone()
        offsets = memory.flat[operand.ragged.uid].long() * operand.ragged.multiplier
        for b, length in enumerate(len_q):
            start, stop = offsets[b], offsets[b] + length * h * width
            rows = left[start:stop].reshape(length, h, width).transpose(0, 1).double()
            assert torch.equal(rows, getattr(expected, name)[b, :, :length])
            left[start:stop] = CANARY
        assert (left == CANARY).all(), "a row past the sequence was written"


def test_packed_queries_with_padded_outputs() -> None:
    tensors = qkv(b=2)
    memory = Memory()
    len_q, len_kv = [2, 4], [7, 5]
    q = memory.packed("Q", tensors[0], len_q, [0, 2])
    k, v = memory.add("K", tensors[1]), memory.add("V", tensors[2])
    run = prepare(memory, q, k, v, **lengths(memory, len_q, len_kv)).go()
    check_by_hand(run, tensors, lambda b, i, j: i < len_q[b] and j < len_kv[b])


def test_keys_past_the_end_are_minus_infinity_not_zero() -> None:
    run = one_row([-100.0, -101.0, -99.0], [1.0, 2.0, 3.0]).go("fp32")
    assert run.stats.item() == pytest.approx(-99 + math.log(1 + math.exp(-1) + math.exp(-2)))


# ---- 20, 21: extents


@pytest.mark.parametrize("d, d_v", [(1, 1), (7, 3), (80, 80), (192, 128), (40, 96)])
def test_any_head_dims(d: int, d_v: int) -> None:
    tensors = qkv(b=1, d=d, d_v=d_v)
    run = dense(Memory(), tensors, attn_scale=Scale(form="host", value=d**-0.5)).go()
    check_by_hand(run, tensors, lambda b, i, j: True, scale=d**-0.5)


@pytest.mark.parametrize(
    "h_q, h_k, h_v", [(1, 1, 1), (6, 3, 3), (6, 2, 2), (5, 1, 1), (14, 2, 2), (12, 4, 3), (6, 1, 6)]
)
def test_head_groups(h_q: int, h_k: int, h_v: int) -> None:
    tensors = qkv(h_q=h_q, h_k=h_k, h_v=h_v)
    run = dense(Memory(), tensors, band=CAUSAL).go()
    check_by_hand(run, tensors, lambda b, i, j: j <= i)


def test_graph_without_queries_or_batches() -> None:
    for tensors in (qkv(s_q=0), qkv(b=0), qkv(s_kv=0)):
        run = dense(Memory(), tensors, want=("stats", "amax_o", "amax_s")).go()
        assert not run.o.any() and (run.stats == -INF).all()
        assert run.amax_o.item() == 0 and run.amax_s.item() == 0


# ---- the calling process


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    memory = Memory()
    extra = memory.out("extra", (1, 1, 1, 1), torch.float32)
    table = memory.ints("table", [0], dim=(1, 1, 1, 1))
    ragged = Ragged(uid=extra.uid, dtype=DType.INT32, dim=(2, 1, 1, 1))
    asked = {
        "score_mod": True,
        "dropout": Dropout(form="philox", probability=0.1),
        "rng_dump": extra,
        "sf_o": extra,
        "softmax_precision": DType.HALF,
        "paging": Paging(k_table=table.model_copy(update={"ragged": ragged})),
    }
    run = dense(memory, qkv(), **{name: asked[name]})
    with pytest.raises(ValueError, match=f"does not serve this {name}"):
        run.go()
    assert (run.o == CANARY).all()


def test_row_claims_nothing_that_is_not_served() -> None:
    claims = REFERENCE.capabilities
    assert not (claims.score_mod or claims.rng_dump or claims.sf_o)
    assert "philox" not in claims.dropout and DType.HALF not in claims.softmax_precision


def test_precision_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="'fp16'; takes 'fp32' or 'fp64'"):
        dense(Memory(), qkv()).go("fp16")


def test_numerics_hints_change_nothing() -> None:
    tensors = qkv()
    plain = dense(Memory(), tensors).go()
    run = dense(Memory(), tensors, unfuse_fma=True, implementation="UNIFIED").go()
    assert torch.equal(run.o, plain.o)


def test_repeats_give_the_same_bits() -> None:
    tensors = qkv(s_q=64, s_kv=96, d=32, dtype=torch.bfloat16)
    tensors[1].mul_(torch.arange(96).view(-1, 1) / 24)
    run = dense(Memory(), tensors, band=CAUSAL).go("fp32")
    first = run.o.clone()
    assert all(torch.equal(run.go("fp32").o, first) for _ in range(5))


def test_inputs_are_left_alone() -> None:
    memory = Memory()
    run = dense(memory, qkv(), band=CAUSAL, bias=memory.add("bias", draw(1, 1, 5, 7)))
    outputs = {run.facts.o.uid, run.facts.stats.uid}
    before = {uid: flat.clone() for uid, flat in memory.flat.items() if uid not in outputs}
    run.go("fp64")
    run.go("fp32")
    for uid, flat in before.items():
        assert torch.equal(memory.flat[uid].nan_to_num(9.0), flat.nan_to_num(9.0))


def test_autograd_and_autocast_around_the_call() -> None:
    tensors = qkv(d=64)
    expected = dense(Memory(), tensors).go("fp32")
    run = dense(Memory(), tensors)
    for operand in (run.facts.q, run.facts.k, run.facts.v):
        run.memory.flat[operand.uid].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.go("fp32")
    assert torch.equal(run.o, expected.o)
    assert not run.memory.flat[run.facts.o.uid].requires_grad


def test_reduced_matmul_settings_do_not_reach_the_products() -> None:
    assert reference._matmul_dtype(torch.float32) is torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("high", "medium"):
            torch.set_float32_matmul_precision(setting)
            assert reference._matmul_dtype(torch.float32) is torch.float64
            tensors = qkv(d=16)
            run = dense(Memory(), tensors).go("fp32")
            check_by_hand(run, tensors, lambda b, i, j: True)
    finally:
        torch.set_float32_matmul_precision(before)


def test_matmul_settings_that_cannot_be_read_count_as_reduced(monkeypatch) -> None:
    def refuses() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    assert reference._matmul_dtype(torch.float32) is torch.float64


def test_importing_the_module_loads_no_torch() -> None:
    code = "import sys, cudnn_frost.engines.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

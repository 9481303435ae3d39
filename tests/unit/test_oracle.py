"""The oracle against closed forms, hand-made cases and torch; the generator's draws are legal."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import cudnn
import pytest
import torch
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.reference import compare as judge
from tests.reference.declaration import Band, alibi_slopes, resolve_band
from tests.reference.draws import (
    DEFAULT_FEATURES,
    FEATURES,
    LAYOUTS,
    MASKS,
    RAGGED_LAYOUTS,
    Scope,
    cases,
    draw_case,
)
from tests.reference.hand import Attention
from tests.reference.oracle import Output, baseline, oracle, quantize, tensor_core_product

BR = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT}
INF = math.inf
OLD_LEFT, OLD_LEFT_8 = "sliding_window_length", "sliding_window"
LEFT, RIGHT = "diagonal_band_left_bound", "diagonal_band_right_bound"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Thousands of tiny products: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(*dim, dtype=torch.bfloat16, seed=0) -> torch.Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values, rank=4) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).reshape(-1, *(1,) * (rank - 1))


def qkv(b=1, hq=1, hk=1, hv=1, sq=4, skv=4, d=8, dv=8, dtype=torch.bfloat16):
    return (
        draw(b, hq, sq, d, dtype=dtype, seed=1),
        draw(b, hk, skv, d, dtype=dtype, seed=2),
        draw(b, hv, skv, dv, dtype=dtype, seed=3),
    )


def probabilities(sq: int, skv: int, b=1, **words) -> torch.Tensor:
    """P of a problem whose scores are all 0: (B,Sq,Skv), read off V = identity."""
    size = max(8, -(-skv // 8) * 8)
    eye = torch.eye(size, dtype=torch.bfloat16)[:skv].expand(b, 1, skv, size)
    q, k, _ = qkv(b=b, sq=sq, skv=skv)
    return Attention(q, k, eye, attn_scale=0.0, **words)()[:, 0, :, :skv]


def seen(*args, **words) -> list[list[list[int]]]:
    """Keys that each row of each batch sees."""
    return [[r.nonzero().flatten().tolist() for r in p] for p in probabilities(*args, **words)]


# -- against torch --------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1, 1), (6, 3, 3), (6, 2, 3), (6, 6, 1), (7, 1, 7)])
@pytest.mark.parametrize("scale", [None, 0.25, -0.5, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_is_torchs(heads, scale, causal):
    hq, hk, hv = heads
    q, k, v = qkv(2, hq, hk, hv, sq=9, skv=11, d=16, dv=24)
    wide = [x.double() for x in (q, k, v)]
    wide[1] = wide[1].repeat_interleave(hq // hk, 1)
    wide[2] = wide[2].repeat_interleave(hq // hv, 1)
    got = Attention(q, k, v, attn_scale=scale, use_causal_mask=causal)
    want = torch.nn.functional.scaled_dot_product_attention(
        *wide, is_causal=causal, scale=1.0 if scale is None else scale
    )
    assert torch.allclose(got(), want, rtol=1e-12, atol=1e-13)
    scores = wide[0] @ wide[1].mT * (1.0 if scale is None else scale)
    if causal:
        scores.masked_fill_(torch.ones(9, 11).triu(1).bool(), -INF)
    assert torch.allclose(got("Stats"), scores.logsumexp(-1, keepdim=True), rtol=1e-12)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_is_added_after_the_scale(batches, heads, dtype):
    q, k, v = qkv(2, 6, 2, 2, sq=5, skv=7)
    bias = draw(batches, heads, 5, 7, dtype=dtype, seed=9)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(),
        *(x.double().repeat_interleave(3, 1) for x in (k, v)),
        attn_mask=bias.double().expand(2, 6, 5, 7),
        scale=0.5,
    )
    assert torch.allclose(Attention(q, k, v, attn_scale=0.5, bias=bias)(), want, rtol=1e-12)


def test_strides_are_the_declarations_whatever_is_bound():
    q, k, v = qkv(2, 3, 3, 3, sq=5, skv=5)
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)  # [B,S,3,H,D]
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    apart, joint = Attention(q, k, v), Attention(*views)
    assert torch.equal(apart(), joint())
    # only the data pointer counts: other shapes and dtypes of the same memory
    joint.buffers = {u: x.as_strided((8,), (1,)) for u, x in joint.buffers.items()}
    assert torch.equal(apart(), joint())
    apart.buffers = {u: x.flatten().view(torch.uint8) for u, x in apart.buffers.items()}
    assert torch.equal(apart(), joint())


def test_a_buffer_that_is_too_small_is_refused():
    case = Attention(*qkv())
    uid = case.graph.nodes[0].inputs["k"].uid
    case.buffers[uid] = case.buffers[uid].flatten()[:-1].clone()
    with pytest.raises(IndexError):
        case()


def test_broadcast_strides():
    q, k, v = qkv(3, 4, 4, 4)
    k, v = k[:1, :1].expand(3, 4, -1, -1), v[:1].expand(3, -1, -1, -1)
    assert torch.equal(Attention(q, k, v)(), Attention(q, k.contiguous(), v.contiguous())())


# -- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, rows",
    [
        ({}, [[0, 1, 2, 3, 4]] * 3),
        ({"use_causal_mask": True}, [[0], [0, 1], [0, 1, 2]]),
        ({"diagonal_band_right_bound": 0}, [[0], [0, 1], [0, 1, 2]]),
        ({"diagonal_band_right_bound": 1}, [[0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ({"use_causal_mask_bottom_right": True}, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ({"diagonal_band_right_bound": 1, **BR}, [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        ({"use_causal_mask": True, "sliding_window_length": 1}, [[0], [1], [2]]),
        ({"use_causal_mask": True, "diagonal_band_left_bound": 2}, [[0], [0, 1], [1, 2]]),
        ({"use_causal_mask_bottom_right": True, OLD_LEFT: 2}, [[1, 2], [2, 3], [3, 4]]),
        ({"diagonal_band_left_bound": 1}, [[0, 1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4]]),
        ({"diagonal_band_left_bound": 1, **BR}, [[2, 3, 4], [3, 4], [4]]),
        ({LEFT: 2, RIGHT: 1}, [[0, 1], [0, 1, 2], [1, 2, 3]]),
        ({"use_causal_mask": True, "diagonal_band_left_bound": 0}, [[], [], []]),
        ({"use_causal_mask": True, "diagonal_band_left_bound": 99}, [[0], [0, 1], [0, 1, 2]]),
    ],
)  # fmt: skip
def test_the_keys_a_row_sees(words, rows):
    assert seen(3, 5, **words) == [rows]


def test_bottom_right_uses_each_batchs_lengths_and_leaves_rows_without_keys():
    words = {"use_padding_mask": True, "use_causal_mask_bottom_right": True}
    words |= {"seq_len_q": ints(3, 4, 2, 0), "seq_len_kv": ints(5, 2, 0, 3)}
    assert seen(4, 6, b=4, **words) == [
        [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], []],
        [[], [], [0], [0, 1]],
        [[], [], [], []],
        [[], [], [], []],
    ]


def test_a_row_without_keys_is_zero_and_minus_infinity():
    words = {"use_padding_mask": True, "seq_len_q": ints(2, 3), "seq_len_kv": ints(0, 1)}
    case = Attention(*qkv(b=2), use_causal_mask_bottom_right=True, **words)
    got = oracle(case.graph, case.buffers)
    live = [(1, 0, 2)]  # row 2 of batch 1 sees key 0
    for b in range(2):
        for i in range(4):
            keyed = (b, 0, i) in live
            assert bool(got["O"].exact[b, 0, i].all()) is not keyed
            assert bool((got["O"].values[b, 0, i] == 0).all()) is not keyed
            assert bool(got["Stats"].values[b, 0, i] == -INF) is not keyed
            assert bool(got["score_max"].values[b, 0, i] == -INF) is not keyed
            assert float(got["score_sum_exp"].values[b, 0, i]) == float(keyed)
    assert all(bool(x.defined.all()) for x in got.values())


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("cu_q", [False, True])
@pytest.mark.parametrize("cu_kv", [False, True])
def test_lengths_in_either_form(rank, cu_q, cu_kv):
    words = {
        "cu_seq_len_q" if cu_q else "seq_len_q": ints(*((0, 2, 3) if cu_q else (2, 1)), rank=rank),
        "cu_seq_len_kv" if cu_kv else "seq_len_kv": ints(
            *((0, 1, 4) if cu_kv else (1, 3)), rank=rank
        ),
    }
    rows = seen(2, 4, b=2, use_padding_mask=True, **words)
    assert rows == [[[0], [0]], [[0, 1, 2], []]]


def test_lengths_past_the_extent_are_clamped():
    words = {"use_padding_mask": True, "seq_len_q": ints(2), "seq_len_kv": ints(99)}
    assert seen(2, 4, **words) == [[[0, 1, 2, 3]] * 2]
    words = {"use_padding_mask": True, "seq_len_q": ints(99), "seq_len_kv": ints(1)}
    assert seen(2, 4, **words) == [[[0]] * 2]


@pytest.mark.parametrize(
    "op, words, band",
    [
        ("sdpa", {}, Band(False, None, None)),
        ("sdpa", BR, Band(True, None, None)),
        ("sdpa", {"use_causal_mask": True, **BR}, Band(False, None, 0)),
        ("sdpa", {"use_causal_mask": False, LEFT: 3}, Band(False, 3, None)),
        ("sdpa", {OLD_LEFT: 3, RIGHT: 2, **BR}, Band(True, 3, 2)),
        ("sdpa", {"use_causal_mask_bottom_right": True, OLD_LEFT: 3}, Band(True, 3, 0)),
        ("sdpa_fp8", {"left_bound": 2, "right_bound": 1}, Band(False, 2, 1)),
        ("sdpa_fp8", {OLD_LEFT_8: 2, "use_causal_mask": True}, Band(False, 2, 0)),
    ],
)
def test_one_meaning_per_spelling(op, words, band):
    assert resolve_band(op, words) == band


@pytest.mark.parametrize(
    "words",
    [
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
        {"use_causal_mask": True, RIGHT: 0},
        {LEFT: 1, OLD_LEFT: 1},
        {RIGHT: -1},
        {"use_causal_mask": 1},
        {LEFT: 1.0},
    ],
)
def test_contradictory_mask_words(words):
    with pytest.raises((ValueError, TypeError)):
        resolve_band("sdpa", words)


# -- softmax --------------------------------------------------------------------------------------


def test_alibi_slopes():
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(8) == [2.0**-e for e in range(1, 9)]
    assert alibi_slopes(12) == [2.0**-e for e in range(1, 9)] + [
        2.0**-e for e in (0.5, 1.5, 2.5, 3.5)
    ]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]


def test_alibi_adds_slope_times_distance():
    eye = torch.eye(8, dtype=torch.bfloat16).expand(1, 1, 8, 8)
    q, k, _ = qkv(hq=2, sq=3, skv=8)
    got = Attention(q, k, eye, attn_scale=0.0, use_alibi_mask=True, use_causal_mask=True)()
    for h, slope in enumerate((2.0**-4, 2.0**-8)):
        want = torch.tensor([-2 * slope, -slope, 0.0], dtype=torch.float64).softmax(0)
        assert torch.allclose(got[0, h, 2, :3], want, rtol=1e-14)


def test_the_sink_is_a_logit_without_a_value():
    q = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16)
    k = torch.full((1, 1, 1, 8), 0.25, dtype=torch.bfloat16)  # q.k = 2, scaled 1
    v = torch.full((1, 1, 1, 8), 3.0, dtype=torch.bfloat16)
    sink = torch.tensor([[[[0.5]], [[4.0]]]])
    case = Attention(q, k, v, attn_scale=0.5, sink_token=sink)
    for h, s in enumerate((0.5, 4.0)):
        total = math.exp(1.0) + math.exp(s)
        assert math.isclose(float(case()[0, h, 0, 0]), 3 * math.exp(1.0) / total, rel_tol=1e-14)
        assert math.isclose(float(case("Stats")[0, h]), math.log(total), rel_tol=1e-14)
        assert float(case("score_max")[0, h]) == max(1.0, s)
        want = total / math.exp(max(1.0, s))
        assert math.isclose(float(case("score_sum_exp")[0, h]), want, rel_tol=1e-14)


@pytest.mark.parametrize("sink", [-1000.0, 0.0, 100.0])
def test_a_row_without_keys_has_the_sinks_stats(sink):
    words = {"use_padding_mask": True, "seq_len_q": ints(2), "seq_len_kv": ints(0)}
    case = Attention(*qkv(), sink_token=torch.full((1, 1, 1, 1), sink), **words)
    assert case("Stats")[0, 0, :, 0].tolist() == [sink, sink, -INF, -INF]
    assert not case().any()


def test_log2_stats_and_natural_maximum():
    words = {"use_padding_mask": True, "seq_len_q": ints(3), "seq_len_kv": ints(4)}
    plain, log2 = (Attention(*qkv(), stats_use_log2=x, **words) for x in (False, True))
    assert torch.allclose(log2("Stats"), plain("Stats") / math.log(2), rtol=1e-14)
    assert log2("Stats")[0, 0, 3] == -INF
    assert torch.equal(log2("score_max"), plain("score_max"))
    parts = plain("score_max") + plain("score_sum_exp").log()
    assert torch.allclose(parts, plain("Stats"), rtol=1e-14)


def test_the_forms_of_attn_scale():
    q, k, v = qkv()
    want = Attention(q, k, v, attn_scale=0.25)()
    device = Attention(q, k, v, attn_scale=torch.full((1, 1, 1, 1), 0.25))
    assert torch.equal(device(), want)
    embedded = Attention(q, k, v)
    scalar = embedded.graph.tensor_scalar(0.25, cudnn.scalar_type.COMPILE_TIME_CONST)
    embedded.graph.nodes[0].inputs["attn_scale"] = scalar
    assert torch.equal(embedded(), want)
    assert torch.equal(Attention(q, k, v)(), Attention(q, k, v, attn_scale=1)())
    scaled = (q.double() * 0.25 * math.log2(math.e)).to(torch.float64)
    prefolded = Attention(q, k, v, attn_scale_prefolded=True)
    node = prefolded.graph.nodes[0]
    node.inputs["q"].set_data_type(cudnn.data_type.DOUBLE)
    prefolded.buffers[node.inputs["q"].uid] = scaled
    assert torch.allclose(prefolded(), want, rtol=1e-14)
    assert torch.allclose(prefolded("Stats"), Attention(q, k, v, attn_scale=0.25)("Stats"))


def test_kv_mask():
    words = {"use_causal_mask": True}
    keep = torch.tensor([True, False, True, True])[None, None, None]
    assert seen(4, 4, kv_mask=keep, **words) == [[[0], [0], [0, 2], [0, 2, 3]]]
    keep = torch.tensor([[False] * 4, [True] * 4])[:, None, None]
    assert seen(2, 4, b=2, kv_mask=keep) == [[[], []], [[0, 1, 2, 3]] * 2]
    added = torch.tensor([0.0, math.log(3.0), -1e9, 0.0])[None, None, None]
    got = probabilities(1, 4, kv_mask=added)[0, 0]
    assert torch.allclose(got, torch.tensor([0.2, 0.6, 0.0, 0.2], dtype=torch.float64), atol=1e-7)


def test_dropout_by_mask_follows_the_softmax():
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.bfloat16).reshape(1, 1, 1, 4)
    got = probabilities(1, 4, dropout=(mask, torch.full((1, 1, 1, 1), 2.0)))[0, 0]
    assert got.tolist() == [0.5, 0.0, 0.5, 0.0]
    off = Attention(*qkv(), dropout=(0.0, ints(1), ints(2)))
    assert torch.equal(off(), Attention(*qkv())())
    with pytest.raises(NotImplementedError):
        Attention(*qkv(), dropout=(0.5, ints(1), ints(2)))()


# -- pages and packed tensors ---------------------------------------------------------------------


def paged_pair(len_kv, page_k=4, page_v=4, columns=3, **words):
    """The same keys dense and in shuffled pages among NaN; table entries past the live ones are
    garbage."""
    b, h, skv, d = len(len_kv), 2, columns * page_k, 8
    q, k, v = qkv(b, 4, h, h, sq=3, skv=skv, d=d)
    lengths = {"use_padding_mask": True, "seq_len_q": ints(*[3] * b), "seq_len_kv": ints(*len_kv)}
    dense = Attention(q, k, v, **lengths, **words)
    pools, tables = [], []
    for x, size in ((k, page_k), (v, page_v)):
        per_batch = skv // size
        pool = torch.full((b * per_batch + 2, h, size, d), math.nan, dtype=x.dtype)
        table = torch.tensor([-1, 2**31 - 1, -7])[torch.arange(b * per_batch) % 3]
        table = table.to(torch.int32).reshape(b, 1, per_batch, 1)
        ids = torch.randperm(b * per_batch + 2).tolist()
        for i, n in enumerate(min(n, skv) for n in len_kv):
            for c in range(-(-n // size)):
                page, live = ids.pop(), min(size, n - c * size)
                table[i, 0, c, 0] = page
                pool[page, :, :live] = x[i, :, c * size : c * size + live]
        pools.append(pool)
        tables.append(table)
    return dense, q, pools, tables, lengths


@pytest.mark.parametrize("pages", [(4, 4), (4, 2), (4, 12)])
@pytest.mark.parametrize("nhd", [False, True])
def test_pages_in_any_order_read_as_dense_keys(pages, nhd):
    words = {"use_causal_mask_bottom_right": True}
    dense, q, pools, tables, lengths = paged_pair((12, 5, 0, 99), *pages, **words)
    if nhd:
        pools = [p.transpose(1, 2).contiguous().transpose(1, 2) for p in pools]
    named = {"paged_attention_k_table": tables[0], "paged_attention_v_table": tables[1]}
    paged = Attention(q, *pools, **named, **lengths, **words)
    assert torch.equal(paged(), dense())
    assert torch.equal(paged("Stats"), dense("Stats"))
    maximum = Attention(q, *pools, **named, **lengths, **words, paged_attention_max_seq_len_kv=7)
    assert seen_lengths(maximum) == [7, 5, 0, 7]


def seen_lengths(case: Attention) -> list[int]:
    from tests.reference.problem import read_problem

    return list(read_problem(case.graph, case.buffers).len_kv)


@pytest.mark.parametrize("side", ["k", "v"])
def test_one_side_in_pages(side):
    dense, q, pools, tables, lengths = paged_pair((12, 7))
    k, v = (dense.buffers[dense.graph.nodes[0].inputs[p].uid] for p in "kv")
    kv = (pools[0], v) if side == "k" else (k, pools[1])
    table = {f"paged_attention_{side}_table": tables[0 if side == "k" else 1]}
    assert torch.equal(Attention(q, *kv, **table, **lengths)(), dense())


def test_a_live_page_outside_the_pool_is_an_error():
    _, q, pools, tables, lengths = paged_pair((12,))
    tables[0][0, 0, 1, 0] = 1000
    named = {"paged_attention_k_table": tables[0], "paged_attention_v_table": tables[1]}
    with pytest.raises(IndexError):
        Attention(q, *pools, **named, **lengths)()


def test_packed_page_tables():
    _, q, pools, tables, lengths = paged_pair((12, 5))
    named = {"paged_attention_k_table": tables[0], "paged_attention_v_table": tables[1]}
    want = Attention(q, *pools, **named, **lengths)()
    ids = [torch.cat([t[1, 0, :2, 0], t[0, 0, :3, 0]]) for t in tables]
    case = Attention(q, *pools, **named, **lengths)
    for port, packed in zip(named, ids, strict=True):
        table = case.graph.nodes[0].inputs[port]
        table.set_ragged_offset(case.tensor(ints(2, 0, 5), ""))
        case.buffers[table.uid] = packed
    assert torch.equal(case(), want)


@pytest.mark.parametrize("in_tokens", [False, True])
def test_packed_tensors_with_gaps_out_of_order(in_tokens):
    b, h, s, d = 3, 2, 5, 8
    len_q, len_kv = (3, 5, 0), (4, 1, 5)
    q, k, v = qkv(b, h, h, h, s, s, d, d)
    words = {"seq_len_q": ints(*len_q), "seq_len_kv": ints(*len_kv), "use_padding_mask": True}
    words["use_causal_mask"] = True
    origins = {"q": (9, 2, 0), "k": (1, 9, 12), "v": (0, 4, 5), "O": (1, 8, 20), "Stats": (0, 3, 9)}
    ragged, packed = {}, {}
    for port, x in (("q", q), ("k", k), ("v", v), ("O", None), ("Stats", None)):
        width = 1 if port == "Stats" else d
        token = h * width + (8 if port == "v" else 0)
        offsets = ints(*(o * (1 if in_tokens else token) for o in (*origins[port], 24)))
        stride = (token, width, token, 1)
        ragged[port] = (offsets, token if in_tokens else 1, (b, h, s, width), stride)
        if x is not None:
            flat = torch.full((24, token), math.nan, dtype=x.dtype)
            for i, n in enumerate(len_q if port == "q" else len_kv):
                rows = x[i, :, :n].transpose(0, 1).reshape(n, h * d)
                flat[origins[port][i] : origins[port][i] + n, : h * d] = rows
            packed[port] = flat
    case = Attention(packed["q"], packed["k"], packed["v"], ragged=ragged, **words)
    dense = Attention(q, k, v, **words)
    got = oracle(case.graph, case.buffers)
    for port in ("O", "Stats"):
        assert torch.equal(got[port].values, dense(port))
        for i, n in enumerate(len_q):
            assert got[port].defined[i, :, :n].all() and not got[port].defined[i, :, n:].any()


def test_dense_stats_of_a_packed_query_cover_every_row():
    q, k, v = qkv(sq=3, skv=3)
    ragged = {"q": (ints(0, 16), 1, (1, 1, 3, 8), (8, 8, 8, 1))}
    ragged["O"] = ragged["q"]
    words = {"seq_len_q": ints(2), "seq_len_kv": ints(3), "use_padding_mask": True}
    case = Attention(q[0, 0, :2].clone(), k, v, ragged=ragged, **words)
    got = oracle(case.graph, case.buffers)
    assert got["O"].defined[0, 0, :, 0].tolist() == [True, True, False]
    assert got["Stats"].defined.all() and got["Stats"].values[0, 0, 2] == -INF


# -- FP8 ------------------------------------------------------------------------------------------


def fp8_scales(**values) -> dict[str, torch.Tensor]:
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    return {n: torch.full((1, 1, 1, 1), float(values.get(n, 1.0))) for n in names}


def low_tail(dtype=torch.float8_e4m3fn, **options) -> Attention:
    """One key at score 0 with V = 0 and 4095 keys at score -7 with V = 1."""
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1
    k = torch.zeros(1, 1, 4096, 16)
    k[..., 1:, 0] = -7
    v = torch.ones(1, 1, 4096, 16)
    v[..., 0, :] = 0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    options = {"o_dtype": torch.bfloat16, **fp8_scales(), **options}
    return Attention(q, k, v, op="sdpa_fp8", **options)


def test_probabilities_far_below_the_maximum_count():
    case = low_tail()
    want = 4095 * math.exp(-7) / (1 + 4095 * math.exp(-7))
    assert abs(want - 0.79) < 0.005
    assert torch.allclose(case(), torch.full((), want, dtype=torch.float64), rtol=1e-13)
    base = baseline(case.graph, case.buffers)["O"].values
    assert float((base - want).abs().max()) < 0.02
    # what the shift is for: this P has no E4M3 value but 0
    assert float(quantize(torch.tensor(math.exp(-7)) / 4.73, torch.float8_e4m3fn)) == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_scales_and_amax(dtype):
    q, k, v = (x.float() for x in qkv(2, 4, 2, 2, sq=5, skv=6, d=16, dv=16))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scales = {"descale_q": 0.5, "descale_k": 2.0, "descale_v": 0.25, "scale_s": 4.0}
    scales |= {"descale_s": 0.5, "scale_o": 3.0}
    case = Attention(
        q, k, v, op="sdpa_fp8", o_dtype=dtype, attn_scale=0.3, right_bound=0, **fp8_scales(**scales)
    )
    wide = [q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))]
    scores = wide[0] @ wide[1].mT * (0.3 * 0.5 * 2.0)
    scores.masked_fill_(torch.ones(5, 6).triu(1).bool(), -INF)
    p = scores.softmax(-1)
    o = p @ wide[2] * (4.0 * 0.5 * 0.25)
    got = oracle(case.graph, case.buffers)
    assert torch.allclose(got["O"].values, o * 3.0, rtol=1e-12, atol=1e-14)
    assert math.isclose(float(got["Amax_O"].values), float(o.abs().max()), rel_tol=1e-12)
    assert math.isclose(float(got["Amax_S"].values), float(p.max()), rel_tol=1e-12)
    assert torch.allclose(got["Stats"].values, scores.logsumexp(-1, keepdim=True), rtol=1e-12)


def test_amax_without_a_live_row_and_fp8_saturation():
    words = {"use_padding_mask": True, "seq_len_q": ints(0), "seq_len_kv": ints(4096)}
    got = low_tail(**words)
    assert float(got("Amax_S")) == float(got("Amax_O")) == 0.0
    assert not got().any()
    big = low_tail(o_dtype=torch.float8_e4m3fn, **fp8_scales(scale_o=1e6))
    out = oracle(big.graph, big.buffers)["O"]
    assert float(out.values[0, 0, 0, 0]) > 1e5
    assert float(out.stored()[0, 0, 0, 0]) == 448.0


# -- what has no meaning --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, error",
    [
        ({"use_casual_mask": True}, ValueError),
        ({"seq_len_qq": ints(1)}, ValueError),
        ({"right_bound": 0}, ValueError),
        ({"score_mod": lambda graph, x: x}, NotImplementedError),
        ({"attn_scale": True}, TypeError),
        ({"attn_scale_prefolded": True, "attn_scale": 0.5}, ValueError),
    ],
)
def test_words_the_contract_does_not_know(words, error):
    case = Attention(*qkv(), **words)
    with pytest.raises(error):
        case()


# -- judging --------------------------------------------------------------------------------------


def judged(seed=5, scope=None, damage=None):
    """A drawn case whose outputs hold the baseline's answer, damaged; the reports."""
    built = draw_case(random.Random(seed), scope or PLAIN).build()
    built.graph.validate()
    results = baseline(built.graph, built.buffers)
    judge.write_outputs(built.graph, built.buffers, results)
    if damage is not None:
        damage(built)
    return judge.check(built.graph, built.buffers)


PLAIN = Scope(
    ops=("sdpa",),
    masks=("causal_br",),
    head_dims=((64, 64),),
    s_q=(24, 24),
    s_kv=(48, 48),
).only("padding", "stats")
PLAIN = PLAIN.with_always("padding", "stats")


def view(built, port: str) -> torch.Tensor:
    tensor = built.tensors[port]
    return built.buffers[tensor.uid].as_strided(tensor.dim, tensor.stride)


def test_the_baseline_passes_its_own_judgement():
    reports = {r.port: r for r in judged()}
    assert set(reports) == {"O", "Stats"}
    assert 0 < reports["O"].worst <= reports["O"].baseline < reports["O"].limit / 2


@pytest.mark.parametrize(
    "port, damage",
    [
        ("O", lambda x: x[0, 0, 0].fill_(math.nan)),
        ("O", lambda x: x.mul_(1.05)),
        ("O", lambda x: x[0, 0, -1].fill_(1e-6)),
        ("O", lambda x: x[0, 0, 0].add_(0.1)),
        ("O", lambda x: x[0, 0, :2].copy_(x[0, 0, :2].flip(0).clone())),
        ("Stats", lambda x: x[0, 0, 0].add_(1e-3)),
        ("Stats", lambda x: x[0, 0, -1].fill_(-1e30)),
        ("Stats", lambda x: x[0, 0, 0].fill_(-INF)),
        ("Stats", lambda x: x[0, 0, -1].fill_(math.nan)),
    ],
)
def test_a_wrong_answer_is_caught(port, damage):
    seed = next(  # the first two rows of batch 0 see keys, the last one is padding
        s
        for s in range(999)
        if (c := draw_case(random.Random(s), PLAIN)).len_q[0] < c.sq
        and 1 < c.len_q[0] <= c.len_kv[0]
    )
    judged(seed)
    with pytest.raises(AssertionError, match=f"^{port}"):
        judged(seed, damage=lambda built: damage(view(built, port)))


@pytest.mark.parametrize("excess, right", [(0.9, True), (1.1, False)])
def test_one_element_may_err_by_twice_the_baseline_and_the_floor(excess, right):
    values = torch.linspace(-1, 1, 2 * 64 * 64, dtype=torch.float64).reshape(1, 2, 64, 64)
    yes = torch.ones_like(values, dtype=torch.bool)
    noise = torch.full_like(values, 0.5)
    expected = {"O": Output(values, yes, ~yes, torch.bfloat16, noise)}
    base = {"O": Output(values + 1e-2, yes, ~yes, torch.bfloat16)}
    own = abs(float(values[0, 1, 5, 7])) * 2.0**-8  # a unit roundoff of O
    limit = 2 * 1e-2 + own + 2 * 2.0**-8 * 0.5  # and two of P times its noise
    actual = values.clone()
    actual[0, 1, 5, 7] += excess * limit
    if right:
        assert judge.compare({"O": actual}, expected, base)[0].at == (0, 1, 5, 7)
        return
    with pytest.raises(AssertionError, match="over the limit"):
        judge.compare({"O": actual}, expected, base)


def test_the_noise_of_two_equal_probabilities():
    v = torch.tensor([3.0, -4.0])[None, None, :, None].expand(1, 1, 2, 8).to(torch.bfloat16)
    case = Attention(*qkv(skv=2)[:2], v, attn_scale=0.0)
    noise = oracle(case.graph, case.buffers)["O"].noise
    assert torch.allclose(noise, torch.full_like(noise, 2.5))  # sqrt(1.5^2 + 2^2)


def test_the_floor_of_a_sum_of_exponentials_knows_the_scores():
    """Scores near -100 carry 100 times the rounding of scores near 1 into the sum."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    yes = torch.ones_like(one, dtype=torch.bool)
    error = 30 * 2.0**-18
    for peak, right in ((-1.0, False), (-100.0, True)):
        expected = {
            "score_sum_exp": Output(one, yes, ~yes, torch.float32),
            "score_max": Output(one * peak, yes, ~yes, torch.float32),
        }
        try:
            judge.compare({"score_sum_exp": one + error}, expected, expected)
        except AssertionError:
            assert not right
        else:
            assert right


def test_the_baselines_first_product_is_cut_towards_zero():
    a, b = (draw(8, 64, dtype=torch.float32, seed=s).abs() for s in (1, 2))
    exact, got = a.double() @ b.double().T, tensor_core_product(a, b.T).double()
    assert bool((got <= exact).all()) and bool((got < exact).any())
    assert bool((got >= exact * (1 - 4 * 2.0**-23)).all())
    assert torch.equal(tensor_core_product(-a, b.T).double(), -got)


def test_small_rounding_errors_everywhere_are_caught_in_the_mean():
    """Half the worst error that is allowed, but in every element."""

    def damage(built):
        expected = oracle(built.graph, built.buffers)
        limit = next(r for r in judged() if r.port == "O").limit
        x = view(built, "O")
        noise = torch.where(expected["O"].exact, 0.0, 0.5 * limit)
        x.copy_((expected["O"].values + noise).to(x.dtype))

    with pytest.raises(AssertionError, match="rms error"):
        judged(damage=damage)


@pytest.mark.parametrize("mask", ["causal", "window_br", "band"])
def test_one_key_more_or_less_is_caught(mask):
    """An off-by-one in a bound is not hidden by the tolerance."""
    scope = Scope(
        masks=(mask,), s_q=(6, 24), s_kv=(12, 48), groups=(1, 2), always=frozenset({"stats"})
    ).only("stats", "padding", "negative_scale")
    for seed in range(20):
        built = draw_case(random.Random(seed), scope).build()
        judge.write_outputs(built.graph, built.buffers, oracle(built.graph, built.buffers))
        judge.check(built.graph, built.buffers)
        node = built.graph.nodes[0]
        old = resolve_band(built.case.op, node.params)
        right = (old.right or 0) + 1
        if old.right is None or right >= min(built.case.len_kv) or min(built.case.len_q) < 2:
            continue
        for word in ("use_causal_mask", "use_causal_mask_bottom_right", RIGHT, "right_bound"):
            node.params.pop(word, None)
        node.params[RIGHT if built.case.op == "sdpa" else "right_bound"] = right
        if old.bottom_right:
            node.params.update(BR)
        judge.write_outputs(built.graph, built.buffers, oracle(built.graph, built.buffers))
        node.params[RIGHT if built.case.op == "sdpa" else "right_bound"] = old.right
        with pytest.raises(AssertionError):
            judge.check(built.graph, built.buffers)


# -- the generator --------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_drawn_graphs_are_legal_and_leave_dead_memory_alone(block):
    for seed in range(block * 25, block * 25 + 25):
        built = draw_case(random.Random(seed)).build()
        built.graph.validate()
        expected = oracle(built.graph, built.buffers)
        for port, out in expected.items():
            assert not out.values[out.defined].isnan().any(), (seed, port)
        before = judge.read_outputs(built.graph, built.buffers)
        for port, values in before.items():
            assert values[expected[port].defined].isnan().all(), (seed, port)
        judge.write_outputs(built.graph, built.buffers, expected)
        built.check_canaries()
        judge.check(built.graph, built.buffers)
        built.poison()
        if any(bool(expected[port].defined.any()) for port in built.outputs):
            with pytest.raises(AssertionError, match="NaN"):
                judge.check(built.graph, built.buffers)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases(Scope(batch=(1, 2), kv_heads=(1, 2), groups=(1, 2), s_q=(1, 8), s_kv=(1, 16))))
def test_the_strategy_draws_legal_graphs(case):
    built = case.build()
    built.graph.validate()
    judge.write_outputs(built.graph, built.buffers, baseline(built.graph, built.buffers))
    judge.check(built.graph, built.buffers)
    built.check_canaries()


def test_a_case_is_its_seed():
    one, two = (draw_case(random.Random(77)) for _ in range(2))
    assert one == two
    first, second = one.build(), two.build()
    for name, arena in first.arenas.items():
        assert torch.equal(arena.view(torch.uint8), second.arenas[name].view(torch.uint8))


def test_every_feature_mask_and_layout_is_drawn_and_can_be_left_out():
    drawn = [draw_case(random.Random(s)) for s in range(1500)]
    on = {f for case in drawn for f in case.on}
    assert on == set(DEFAULT_FEATURES)
    assert not any({"stats", "virtual_stats"} <= case.on for case in drawn)
    for feature in DEFAULT_FEATURES - {"padding"}:
        assert any(feature not in case.on for case in drawn)
        scope = Scope().without(feature)
        assert all(feature not in draw_case(random.Random(s), scope).on for s in range(40))
    layouts = {name for case in drawn for name in case.layouts.values()}
    assert layouts == set(LAYOUTS) | set(RAGGED_LAYOUTS)
    bands = {(c.band.bottom_right, c.band.left is None, c.band.right) for c in drawn}
    assert {b[:2] for b in bands} == {(x, y) for x in (True, False) for y in (True, False)}
    assert {b[2] is None for b in bands} == {True, False}
    for mask in MASKS[1:]:
        for band in (draw_case(random.Random(s), Scope(masks=(mask,))).band for s in range(5)):
            assert band.bottom_right == mask.endswith("_br")
            assert (band.left is None) >= mask.startswith("causal")
            assert (band.right is None) == mask.startswith("left")
    shapes = {(c.hq // c.hk) for c in drawn}
    assert set(Scope().groups) <= shapes
    assert any(min(c.len_q) == 0 for c in drawn) and any(min(c.len_kv) == 0 for c in drawn)
    assert any(c.sq > c.skv for c in drawn)
    assert any(n > c.skv for c in drawn if c.lengths for n in c.lengths.kv)


@pytest.mark.parametrize("op", ["sdpa", "sdpa_fp8"])
@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_a_required_feature_is_there_and_legal(feature, op):
    only = {"amax": "sdpa_fp8", "unpaired_fp8_scales": "sdpa_fp8", "half_scale_o": "sdpa_fp8"}
    only |= {"bias": "sdpa", "kv_mask": "sdpa"}
    scope = Scope(ops=(op,), rate=0.1).with_always(feature)
    if feature == "virtual_stats":
        scope = scope.without("stats")
    seeds = range(8) if only.get(feature, op) == op else ()
    for seed in seeds:
        case = draw_case(random.Random(seed), scope)
        if not case.on & NEVER_TOGETHER.get(feature, set()):
            assert feature in case.on
        case.build().graph.validate()


NEVER_TOGETHER = {
    "ragged_kv": {"paging"},
    "overlong": {"ragged_kv"},
    "kv_mask": {"paging", "ragged_kv"},
    "low_scores": {"prefolded", "zero_scale", "negative_scale", "plain_scale"},
    "tensor_scale": {"prefolded"},
    "plain_scale": {"prefolded"},
    "zero_scale": {"prefolded"},
    "negative_scale": {"prefolded"},
    "int_scale": {"prefolded"},
    "unequal_pages": {"one_table", "shared_table"},
    "one_table": {"shared_table"},
    "amax": {"dropout"},
}


def test_drawn_keywords_are_the_frontends():
    """The builders take any word; the compiled signatures say which exist."""
    python_only = {"kv_mask", "softmax_precision", "attn_scale_prefolded"}
    split = {"_dropout_n": "dropout", "dropout_0": "dropout", "dropout_1": "dropout"}
    for seed in range(80):
        node = draw_case(random.Random(seed)).build().graph.nodes[0]
        signature = getattr(cudnn._compiled_module.backend_graph, node.node_type.name.lower())
        known = {part.split(":")[0].strip() for part in signature.__doc__.split(")")[0].split(",")}
        outputs = {"O", "Stats", "Amax_S", "Amax_O"}
        words = (set(node.inputs) | set(node.params) | set(node.outputs)) - outputs - python_only
        assert {split.get(w, w) for w in words} <= known, seed


def test_writing_around_the_outputs_or_into_inputs_is_caught():
    scope = Scope(ops=("sdpa",)).with_always("ragged_gaps", "stats")
    built = draw_case(random.Random(3), scope.without("virtual_stats")).build()
    built.check_canaries()
    for name, arena in built.arenas.items():
        data = arena.view(torch.uint8)
        saved = data[0].clone()
        data[0] = saved ^ 1
        with pytest.raises(AssertionError, match=name):
            built.check_canaries()
        data[0] = saved
    place = built.places["O"]
    covered = torch.cat([place.index(b).flatten() for b in range(built.case.b)])
    arena = built.arenas["O"]
    gap = next(i for i in range(place.base, arena.numel()) if i not in set(covered.tolist()))
    arena[gap] = 1.0
    with pytest.raises(AssertionError, match="outside its rows"):
        built.check_canaries()


REACHES = {
    "alibi": lambda node, built: node.params["use_alibi_mask"],
    "prefolded": lambda node, built: node.params["attn_scale_prefolded"],
    "virtual_stats": lambda node, built: node.outputs["Stats"].is_virtual,
    "stats": lambda node, built: not node.outputs["Stats"].is_virtual,
    "amax": lambda node, built: {"Amax_S", "Amax_O"} <= set(built.outputs),
    "plain_scale": lambda node, built: "attn_scale" not in {**node.inputs, **node.params},
    "tensor_scale": lambda node, built: "attn_scale" in node.inputs,
    "zero_scale": lambda node, built: built.case.scale[1] == 0.0,
    "negative_scale": lambda node, built: built.case.scale[1] < 0.0,
    "ragged_q": lambda node, built: all(built.tensors[p].ragged_offset for p in ("q", "O")),
    "ragged_kv": lambda node, built: all(built.tensors[p].ragged_offset for p in ("k", "v")),
    "overlong": lambda node, built: max(built.case.lengths.kv) > built.case.skv,
    "low_scores": lambda node, built: float(view(built, "Stats").nan_to_num(0, 0, 0).min()) < -60,
}


@pytest.mark.parametrize("feature", sorted(REACHES))
def test_a_drawn_feature_reaches_the_graph(feature):
    scope = Scope(ops=("sdpa_fp8" if feature == "amax" else "sdpa",), masks=("causal",), rate=0.0)
    scope = scope.with_always(feature, *(() if feature == "virtual_stats" else ("stats",)))
    for seed in range(5):
        built = draw_case(random.Random(seed), scope).build()
        judge.write_outputs(built.graph, built.buffers, oracle(built.graph, built.buffers))
        assert REACHES[feature](built.graph.nodes[0], built)


def test_shared_pages_odd_strides_and_additive_masks_are_real():
    scope = Scope(batch=(4, 4), s_kv=(48, 48), page_sizes=(4,), pool_layouts=("hnd",), rate=0.0)
    for seed in range(5):
        paged = scope.with_always("prefix_pages")
        built = draw_case(random.Random(seed), paged).build()
        columns = [built.tensors[f"table_{side}"] for side in "kv"]
        first = [built.buffers[t.uid][:, 0, 0, 0].tolist() for t in columns]
        full = [b for b, n in enumerate(built.case.len_kv) if n >= 4]
        assert all(len(full) < 2 or row[full[0]] == row[full[1]] for row in first)
        odd = draw_case(random.Random(seed), Scope(layouts=("odd",), rate=0.0)).build()
        assert all(odd.tensors[port].stride[2] % 8 for port in "qkv")
        masked = Scope(ops=("sdpa",), s_kv=(48, 48), rate=0.0).with_always("kv_mask")
        built = draw_case(random.Random(seed), masked).build()
        mask = built.buffers[built.tensors["kv_mask"].uid]
        assert float(mask.double().min()) in (0.0, -1e4, -9984.0)
        assert mask.dtype is torch.bool or float(mask.double().min()) < 0


def test_dead_memory_of_inputs_is_nan():
    """Exactly the live elements of Q, K and V hold numbers."""
    scope = Scope(layouts=("bhsd", "bshd", "padded", "odd")).without("prefix_pages")
    for seed in range(40):
        built = draw_case(random.Random(seed), scope).build()
        case, live = built.case, 0
        sizes = {"q": (case.len_q, case.hq * case.dqk), "k": (case.len_kv, case.hk * case.dqk)}
        sizes["v"] = (case.len_kv, case.hv * case.dv)
        held = [
            built.arenas[name] for name in ("q", "k", "v", "joint", "pool") if name in built.arenas
        ]
        live = sum(sum(rows) * width for rows, width in sizes.values())
        assert sum(int((~x.float().isnan()).sum()) for x in held) == live, seed


def test_unknown_features_are_refused():
    with pytest.raises(ValueError, match="pages_of_gold"):
        Scope(features=frozenset({"pages_of_gold"}))
    assert set(FEATURES) > set(DEFAULT_FEATURES)

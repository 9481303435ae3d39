"""The decode rows' numbers: masks, sinks, empty work, FP8 scales and maxima, named behaviours."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import cudnn
import pytest
import torch

from tests.gpu.decode_problem import (
    BF16,
    CAUSAL_BR,
    E4M3,
    E5M2,
    F16,
    INF,
    ROWS,
    Decode,
    Form,
    as_bytes,
    assert_same_bits,
    band,
)
from tests.gpu.qualify import DECODE, DECODE_FP8, prove, row_named
from tests.gpu.serving import plan_names, workspace_bytes
from tests.reference.draws import Scope, draw_case

KINDS = pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
TYPES = pytest.mark.parametrize("dtype", [BF16, F16, E4M3, E5M2], ids=str)
SINKS = (-1000.0, 100.0, 0.0, -3.5, 30.0, 1.0, -100.0, 2.0)


# ---- empty and partly empty work


@TYPES
def test_keyless_rows_are_zero_and_minus_infinity(dtype, handle):
    """A sequence without keys, one without queries, one with neither."""
    form = Form(dtype, lengths=(0, 40, 0, 7), rows=(3, 0, 0, 3), sq=3)
    problem = Decode(form, handle)
    problem.check()
    for index in problem.plans:
        problem.run(index)
        dead = problem.o[:3], problem.stats[:3]
        assert bool((dead[0] == 0).all()) and bool((dead[1] == -INF).all())


@KINDS
@pytest.mark.parametrize("sq", [1, 64], ids="sq{}".format)
def test_all_sequences_empty_terminates(dtype, sq, handle):
    problem = Decode(Form(dtype, lengths=(0,) * 5, capacity=512, sq=sq), handle)
    problem.check()
    for index in problem.plans:
        problem.run(index)
        assert bool((problem.o == 0).all()) and bool((problem.stats == -INF).all())


@TYPES
@pytest.mark.parametrize("sq", [1, 3], ids="sq{}".format)
def test_stats_of_a_keyless_row_are_the_sink(dtype, sq, handle):
    """Single queries with a sink, and sinks from -1000 to 100."""
    problem = Decode(Form(dtype, lengths=(0, 70, 0, 300), sq=sq, sink=SINKS), handle)
    problem.check()
    sinks = torch.tensor(SINKS, device="cuda").view(1, -1, 1, 1)
    for index in problem.plans:
        problem.run(index)
        keyless = problem.stats[::2]
        assert bool(((keyless - sinks).abs() <= 1e-6 * sinks.abs()).all())
        assert bool((problem.o[::2] == 0).all())


@KINDS
@pytest.mark.parametrize("sink", [None, SINKS], ids=["bare", "sink"])
def test_log2_stats_of_keyless_rows_are_no_nan(dtype, sink, handle):
    words = {"stats_use_log2": True}
    form = Form(dtype, lengths=(0, 70, 3, 300), sq=4, sink=sink, words={**words, **CAUSAL_BR})
    problem = Decode(form, handle)
    problem.check()
    assert not bool(problem.stats.isnan().any())


@TYPES
@pytest.mark.parametrize("sq", range(2, 9), ids="sq{}".format)
def test_speculative_rows_without_a_key(dtype, sq, handle):
    """Row i sees keys up to len_kv - len_q + i; below 0 it sees none."""
    form = Form(dtype, lengths=(1, 3, 0, 40, 300), sq=sq, words=CAUSAL_BR)
    problem = Decode(form, handle)
    problem.check()
    hidden = sq - 1
    assert bool((problem.stats[0, :, :hidden] == -INF).all())
    assert bool(problem.stats[0, :, hidden:].isfinite().all())


@KINDS
def test_rows_past_a_length_are_zero_and_minus_infinity(dtype, handle):
    form = Form(dtype, lengths=(90, 33, 200, 5), rows=(8, 3, 0, 1), sq=8, words=CAUSAL_BR)
    problem = Decode(form, handle)
    problem.check()
    for b, count in enumerate(form.rows or ()):
        assert bool((problem.o[b, :, count:] == 0).all())
        assert bool((problem.stats[b, :, count:] == -INF).all())


@KINDS
@pytest.mark.parametrize("sq", [8, 64, 80], ids="sq{}".format)
def test_a_whole_tile_without_a_key(dtype, sq, handle):
    """Top-left with a left window: rows past the last key see nothing."""
    words = band(dtype, left=3, right=0)
    Decode(Form(dtype, lengths=(2, 300, 0, 40), sq=sq, words=words), handle).check()


@KINDS
@pytest.mark.parametrize("lengths", [(5,), (1,), (0,), (129,), (3, 32768)], ids=str)
def test_more_parts_than_keys(dtype, lengths, handle):
    """The declaration promises long sequences, the lengths are short: idle parts add nothing."""
    Decode(Form(dtype, lengths=lengths, capacity=32768, page=64), handle).check()


# ---- masks, heads, scales


@KINDS
@pytest.mark.parametrize("bottom_right", [False, True], ids=["top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("left", "right"),
    [(1, 0), (20, 0), (5000, 0), (None, 0), (None, 3), (20, 3), (20, None), (1, 500)],
    ids=str,
)
def test_bands(dtype, left, right, bottom_right, handle):
    """A left bound counts the diagonal; a right bound admits future keys."""
    words = band(dtype, left, right, bottom_right)
    form = Form(dtype, lengths=(33, 300, 2, 129), rows=(5, 5, 5, 2), sq=5, words=words)
    problem = Decode(form, handle)
    problem.check()
    if (left, right, bottom_right) == (1, 0, False):
        # each row sees one key: O is that row of V
        _, _, v = problem.operands(0)
        assert float((problem.o[0].double() - v[:, :5]).abs().max()) < 0.02


@KINDS
@pytest.mark.parametrize("sq", [1, 5, 64], ids="sq{}".format)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_groups(dtype, sq, group, handle):
    """Among them those that do not divide a tile of packed rows."""
    form = Form(dtype, lengths=(33, 300, 2), sq=sq, heads=(2 * group, 2), words=CAUSAL_BR)
    Decode(form, handle).check()


@KINDS
@pytest.mark.parametrize("heads", [(16, 1), (96, 1), (96, 8)], ids=str)
def test_one_key_head_and_many_query_heads(dtype, heads, handle):
    Decode(Form(dtype, lengths=(33, 300), sq=2, heads=heads, words=CAUSAL_BR), handle).check()


FLAVORS = [
    (64, 64),
    (80, 80),
    (96, 112),
    (128, 128),
    (144, 112),
    (192, 128),
    (160, 160),
    (208, 240),
    (256, 256),
]


@KINDS
@pytest.mark.parametrize("d", FLAVORS, ids=str)
def test_head_dims_between_flavors(dtype, d, handle):
    Decode(Form(dtype, lengths=(33, 300, 2), sq=3, d=d, words=CAUSAL_BR), handle).check()


@KINDS
def test_a_scale_of_zero_weighs_visible_keys_equally(dtype, handle):
    form = Form(dtype, lengths=(33, 300, 2, 129), words={"attn_scale": 0.0})
    problem = Decode(form, handle)
    problem.check()
    mean = torch.stack([problem.operands(b)[2].mean(1) for b in range(4)])
    assert float((problem.o[:, :, 0].double() - mean).abs().max()) < 1e-2
    lse = torch.tensor(form.lengths, device="cuda").log().view(-1, 1, 1, 1)
    assert float((problem.stats - lse).abs().max()) < 1e-4


@KINDS
def test_a_negative_scale(dtype, handle):
    words = {"attn_scale": -(128**-0.5), **CAUSAL_BR}
    Decode(Form(dtype, lengths=(33, 300, 2, 129), sq=3, words=words), handle).check()


# ---- named behaviours, drawn


def _plain(scope: Scope, **more) -> Scope:
    """One flavor and type: what differs from draw to draw is the behaviour."""
    wanted = {
        "s_q": (1, 20),
        "s_kv": (1, 400),
        "batch": (2, 4),
        "head_dims": ((128, 128),),
        "io_dtypes": ("BFLOAT16",),
        "fp8_dtypes": ("FP8_E4M3",),
    }
    return replace(scope.only("stats", "padding"), **{**wanted, **more})


_SCORES = {"s_q": (1, 8), "s_kv": (65, 700), "masks": ("none", "causal")}
# what is drawn -> (features that are on in every draw, ranges)
BEHAVIOURS: dict[str, tuple[tuple[str, ...], dict]] = {
    "lengths_as_prefix_sums": (("cu_seq_len", "stats"), {}),
    "lengths_of_rank_1": (("rank1_lengths", "paging"), {}),
    "empty_sequences_with_extreme_sinks": (
        ("zero_length", "sink", "extreme_sink", "paging", "stats"),
        {},
    ),
    "packed_queries_with_gaps": (("ragged_q", "ragged_gaps", "stats"), {}),
    "packed_queries_over_pages": (("ragged_q", "ragged_gaps", "paging", "stats", "max_total"), {}),
    "packed_queries_with_dense_stats": (("ragged_q", "ragged_stats_dense", "stats"), {}),
    "one_offset_tensor_for_several_ports": (("ragged_q", "shared_offsets", "stats"), {}),
    "one_table_for_both": (("shared_table",), {}),
    "wide_and_strided_tables": (("wide_table",), {}),
    "pages_of_unequal_size": (("unequal_pages",), {}),
    "one_side_in_pages": (("one_table",), {}),
    "a_page_of_two_sequences": (("prefix_pages",), {}),
    "one_interleaved_pool": (("paging",), {"pool_layouts": ("kv",)}),
    "token_major_pages_of_16": (("paging",), {"pool_layouts": ("nhd",), "page_sizes": (16,)}),
    "log2_stats": (("log2", "stats", "sink"), {}),
    "virtual_stats": (("virtual_stats",), {}),
    "no_scale": (("plain_scale", "stats"), {}),
    "scores_near_minus_100_without_padding": (("low_scores", "stats"), _SCORES),
    "overlong_lengths": (("overlong", "paging"), {"masks": ("none", "causal", "window")}),
    "left_bound_of_zero_or_less": (("nonpositive_left", "stats"), {"masks": ("window", "band")}),
    "interleaved_dense_operands": ((), {"layouts": ("qkv", "kv", "padded"), "s_q": (1, 60)}),
    "broadcast_keys": ((), {"layouts": ("bhsd", "bcast_b", "bcast_h")}),
    "buffers_bound_flat": (("flat_buffers", "paging"), {}),
}
FP8_BEHAVIOURS: dict[str, tuple[tuple[str, ...], dict]] = {
    "unpaired_scales": (("unpaired_fp8_scales", "amax", "stats"), {}),
    "scale_o_of_a_16_bit_output": (
        ("half_scale_o", "amax"),
        {"fp8_o_dtypes": ("HALF", "BFLOAT16")},
    ),
    "maxima_of_packed_queries": (("amax", "ragged_q", "ragged_gaps"), {}),
    "maxima_with_a_sink": (("amax", "sink", "zero_length", "paging"), {}),
    "v_of_mean_1": (("v_mean", "amax"), {}),
}
_DRAWN = [(DECODE, name) for name in BEHAVIOURS]
_DRAWN += [(DECODE_FP8, name) for name in (*BEHAVIOURS, *FP8_BEHAVIOURS)]


def behaviour_case(scope: Scope, name: str, seed: int):
    """One draw in which the features of the behaviour are on."""
    features, more = {**BEHAVIOURS, **FP8_BEHAVIOURS}[name]
    scope = _plain(scope, **more).with_always(*features)
    if name.endswith("without_padding"):
        scope = scope.without("padding")
    generator = random.Random(f"{name} {seed}")
    while True:
        case = draw_case(generator, scope)
        if set(features) <= case.on:
            return case


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("scope", "name"), _DRAWN, ids=[f"{'fp8' if s is DECODE_FP8 else 'f16'}-{n}" for s, n in _DRAWN]
)
def test_behaviour(scope, name, seed, handle):
    row = row_named(ROWS[E4M3 if scope is DECODE_FP8 else BF16])
    _, reasons = prove(behaviour_case(scope, name, seed), row, handle)
    assert not reasons


# ---- FP8: P, sums, scales


def one_key_against_many(port: str, position: torch.Tensor, shape, generator) -> torch.Tensor:
    """Key 0 scores 0 and has V = 0; every other one -7 and V = 1. The first column is all of QK."""
    out = torch.zeros(shape, device=position.device)
    later = (position > 0).float()[:, None, :]
    if port == "v":
        return out + later[..., None]
    out[..., 0] = 1.0 if port == "q" else -7.0 * later
    return out


UNIT = {"descale_q": 1.0, "descale_k": 1.0, "descale_v": 1.0, "descale_s": 1.0, "scale_s": 1.0}


@TYPES
@pytest.mark.parametrize("sq", [1, 8], ids="sq{}".format)
def test_small_probabilities_do_not_vanish(dtype, sq, handle):
    form = Form(
        dtype,
        o_dtype=F16 if dtype.itemsize == 1 else None,
        lengths=(4096,),
        sq=sq,
        scales=UNIT,
        words={"attn_scale": 1.0},
        values=one_key_against_many,
    )
    problem = Decode(form, handle)
    others = 4095 * math.exp(-7.0)
    for index in problem.plans:
        problem.run(index)
        assert float((problem.o.double() - others / (1 + others)).abs().max()) < 4e-3
        assert float((problem.stats - math.log1p(others)).abs().max()) < 1e-3


def mean_one(port: str, position: torch.Tensor, shape, generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator, device=position.device)
    return 1.0 + 0.5 * x if port == "v" else x


@TYPES
def test_the_error_of_a_long_row_is_flat(dtype, handle):
    """Relative error of O with V of mean 1, at 8k, 32k and 131,072 keys."""
    errors = []
    for keys in (8192, 32768, 131_072):
        form = Form(
            dtype,
            o_dtype=F16 if dtype.itemsize == 1 else None,
            lengths=(keys,),
            heads=(4, 1),
            page=64,
            values=mean_one,
        )
        problem = Decode(form, handle)
        q, k, v = problem.operands(0)
        p = (q @ k.transpose(1, 2) * form.d[0] ** -0.5).softmax(-1)
        expected = p @ v
        errors.append(0.0)
        for index in problem.plans:
            problem.run(index)
            error = (problem.o[0].double() - expected).norm() / expected.norm()
            errors[-1] = max(errors[-1], float(error))
    print(dtype, errors)
    # rounding O itself
    unit = torch.finfo(BF16 if dtype is BF16 else F16).eps
    assert max(errors) < 2 * unit + 1e-3
    assert errors[2] < 1.5 * errors[0] + unit / 4


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("o_dtype", [E4M3, E5M2, F16, BF16], ids=str)
@pytest.mark.parametrize("sq", [1, 8], ids="sq{}".format)
def test_fp8_outputs(dtype, o_dtype, sq, handle):
    scales = {"scale_o": 32.0 if o_dtype.itemsize == 1 else 1.0}
    words = CAUSAL_BR if sq > 1 else {}
    form = Form(dtype, o_dtype, lengths=(33, 300, 0, 2), sq=sq, scales=scales, words=words)
    Decode(form, handle).check()


@pytest.mark.parametrize(("o_dtype", "scale_o"), [(E4M3, 2.0**14), (E5M2, 2.0**21)], ids=str)
def test_fp8_outputs_saturate(o_dtype, scale_o, handle):
    form = Form(E4M3, o_dtype, lengths=(33, 300, 0, 2), sq=2, scales={"scale_o": scale_o})
    problem = Decode(form, handle)
    problem.check()
    for index in problem.plans:
        problem.run(index)
        values = problem.o.float()
        assert bool(values.isfinite().all())
        assert float(values.abs().max()) == torch.finfo(o_dtype).max


def test_scale_s_and_descale_s_are_no_pair(handle):
    """4 and 0.5 double O, in the same plan: scales are read at each run."""
    scales = {"scale_s": 4.0, "descale_s": 0.25}
    problem = Decode(Form(E4M3, lengths=(33, 300, 3000), sq=2, scales=scales), handle)
    problem.check()
    for index in problem.plans:
        problem.scales["descale_s"].fill_(0.25)
        paired = problem.answer(index)
        problem.scales["descale_s"].fill_(0.5)
        doubled = problem.answer(index)
        assert torch.equal(doubled["o"], 2 * paired["o"])
        assert torch.equal(doubled["Amax_O"], 2 * paired["Amax_O"])
        assert_same_bits({"s": doubled["Amax_S"]}, {"s": paired["Amax_S"]})
        assert_same_bits({"s": doubled["stats"]}, {"s": paired["stats"]})
    problem.check()


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v", "scale_o"])
def test_a_changed_scale_is_not_stale(name, handle):
    form = Form(E4M3, E4M3, lengths=(33, 300, 3000), sq=2, scales={"scale_o": 32.0})
    problem = Decode(form, handle)
    problem.check()
    problem.scales[name].mul_(1.75)
    problem.check()


# ---- FP8: the maxima


def test_amax_o_is_before_scale_o(handle):
    form = Form(E4M3, E4M3, lengths=(33, 300, 3000), scales={"scale_o": 2.0})
    problem = Decode(form, handle)
    problem.check()
    for index in problem.plans:
        problem.scales["scale_o"].fill_(2.0)
        low = problem.answer(index)
        problem.scales["scale_o"].fill_(4096.0)
        high = problem.answer(index)
        for name in problem.amax:
            assert_same_bits({name: high[name]}, {name: low[name]})


def test_maxima_start_anew_with_each_run(handle):
    problem = Decode(Form(E4M3, lengths=(33, 300, 3000), sq=2), handle)
    space = torch.empty(
        max(workspace_bytes(problem.graph, index) for index in problem.plans) or 1,
        dtype=torch.uint8,
        device="cuda",
    )
    for index in problem.plans:
        problem.scales["descale_v"].fill_(0.5)
        large = problem.answer(index)
        problem.scales["descale_v"].fill_(0.125)
        # over the maxima of the run before
        problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
        torch.cuda.synchronize()
        assert torch.equal(problem.amax["Amax_O"] * 4, large["Amax_O"])


@pytest.mark.parametrize("sink", [None, SINKS], ids=["bare", "sink"])
@pytest.mark.parametrize("rows", [(2, 2, 2), (0, 0, 0)], ids=["no_keys", "no_queries"])
def test_maxima_of_no_live_row_are_zero(rows, sink, handle):
    lengths = (0, 0, 0) if rows[0] else (33, 300, 3000)
    form = Form(E4M3, lengths=lengths, rows=rows, capacity=3000, sq=2, sink=sink)
    problem = Decode(form, handle)
    for index in problem.plans:
        problem.run(index)
        assert {name: float(x) for name, x in problem.amax.items()} == {"Amax_S": 0, "Amax_O": 0}


@pytest.mark.parametrize("sink", [None, (2.0,) * 8], ids=["bare", "sink"])
@pytest.mark.parametrize("scale_s", [1.0, 256.0])
def test_amax_s_is_the_largest_probability_before_scale_s(scale_s, sink, handle):
    """Over live rows only: dead ones are NaN. A probability is exp(score - log-sum-exp)."""
    form = Form(
        E4M3,
        lengths=(300, 90, 3000),
        rows=(3, 0, 2),
        sq=3,
        sink=sink,
        scales={"scale_s": scale_s, "descale_s": 1 / scale_s},
    )
    problem = Decode(form, handle)
    largest = 0.0
    for b in (0, 2):
        q, k, _ = problem.operands(b)
        scores = q @ k.transpose(1, 2) * form.d[0] ** -0.5
        extra = torch.full_like(scores[..., :1], -INF if sink is None else sink[0])
        lse = torch.cat([scores, extra], -1).logsumexp(-1, keepdim=True)
        largest = max(largest, float((scores - lse).exp().max()))
    for index in problem.plans:
        problem.run(index)
        assert abs(float(problem.amax["Amax_S"]) / largest - 1) < 5e-3


@pytest.mark.parametrize("page", [16, 64, None], ids=["page16", "page64", "dense"])
@pytest.mark.parametrize("scale_s", [1.0, 256.0])
def test_amax_s_is_that_of_the_backends_fp8_plan(page, scale_s, handle):
    """Where the backend takes the graph: e4m3 O, 8 query rows, no mask, every sequence full."""
    form = Form(
        E4M3,
        E4M3,
        lengths=(256,) * 4,
        sq=8,
        page=page,
        pool="hnd",
        scales={"scale_o": 32.0, "scale_s": scale_s, "descale_s": 1 / scale_s},
    )
    problem = Decode(form, handle)
    problem.check()
    ours = {name: float(x) for name, x in problem.amax.items()}
    names = plan_names(problem.graph)
    index = next((i for i, name in enumerate(names) if not name.startswith("frost_")), None)
    if index is None:
        pytest.skip(f"the backend has no plan: {problem.graph.explain().backend[:300]}")
    try:
        need = workspace_bytes(problem.graph, index)
    except (RuntimeError, NotImplementedError, cudnn.cudnnGraphNotSupportedError) as refusal:
        pytest.skip(f"the backend's plan does not build: {str(refusal)[:300]}")
    assert problem.graph.selected_engine is None
    problem.poison()
    space = torch.empty(max(need, 1), dtype=torch.uint8, device="cuda")
    problem.graph.execute(problem.pack, space, handle)
    torch.cuda.synchronize()
    theirs = {name: float(x) for name, x in problem.amax.items()}
    print(f"{names[index]}: backend {theirs}, ours {ours}")
    assert abs(theirs["Amax_S"] / ours["Amax_S"] - 1) < 0.02, f"backend {theirs}, ours {ours}"


def test_the_maxima_alone_do_not_change_the_output(handle):
    """A graph that leaves both maxima virtual gives the same bits."""
    form = Form(E4M3, lengths=(33, 300, 3000), sq=2)
    with_maxima = Decode(form, handle).answer()
    problem = Decode(form, handle, plan=False)
    node = problem.graph.nodes[0]
    for name in problem.amax:
        node.outputs[name].set_output(False)
        del problem.pack[problem.uid.pop(name)]
    problem.plan()
    without = problem.answer()
    for name in ("o", "stats"):
        assert torch.equal(as_bytes(without[name]), as_bytes(with_maxima[name]))

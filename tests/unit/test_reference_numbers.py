"""The reference row's numbers, case by case: scales, masks, statistics and FP8."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_frost.analyzer.facts import Band, Dropout, Lengths, Operand, Scale
from cudnn_frost.engines.reference import alibi_slopes
from cudnn_frost.vocab import DType

from .test_reference_support import (
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
    qkv,
)

# ---- 22: scales


@pytest.mark.parametrize("value", [0.0, -0.7, 2.5])
@pytest.mark.parametrize("form", ["host", "pass_by_value", "device"])
def test_attn_scale_forms(form: str, value: float) -> None:
    tensors = qkv()
    memory = Memory()
    operand = memory.add("scale", torch.full((1, 1, 1, 1) if form == "device" else (), value))
    scale = Scale(form=form, operand=operand)
    if form == "host":
        scale = Scale(form=form, value=value)
    run = dense(memory, tensors, attn_scale=scale, band=CAUSAL).go()
    check_by_hand(run, tensors, lambda b, i, j: j <= i, scale=float(torch.tensor(value)))


def test_scale_zero_is_uniform_over_the_visible_keys() -> None:
    q, k, v = qkv(b=1, h_q=1, s_q=7)
    run = dense(Memory(), (q, k, v), attn_scale=Scale(form="host", value=0.0), band=CAUSAL).go()
    for i in range(7):
        torch.testing.assert_close(run.o[0, 0, i], v[0, 0, : i + 1].double().mean(0))
        assert run.stats[0, 0, i].item() == pytest.approx(math.log(i + 1))


def test_sink_is_not_scaled() -> None:
    memory = Memory()
    tensors = qkv(h_q=2)
    sink = memory.add("sink", torch.tensor([0.5, -1.5]).reshape(1, 2, 1, 1))
    scale = Scale(form="host", value=0.25)
    run = dense(memory, tensors, sink=sink, attn_scale=scale).go()
    heads = [{"sink": 0.5}, {"sink": -1.5}]
    check_by_hand(run, tensors, lambda b, i, j: True, scale=0.25, head=lambda b, h: heads[h])


def test_known_value_needs_no_buffer() -> None:
    tensors = qkv()
    unbound = Operand(uid=999, name="scale", dtype=DType.FLOAT, dim=(), stride=())
    scale = Scale(form="pass_by_value", value=0.5, operand=unbound)
    run = dense(Memory(), tensors, attn_scale=scale).go()
    check_by_hand(run, tensors, lambda b, i, j: True, scale=0.5)


def test_prefolded_scale_is_in_bits() -> None:
    q, k, v = qkv()
    plain = dense(Memory(), (q, k, v), attn_scale=Scale(form="host", value=0.3)).go()
    folded = q.double() * 0.3 * math.log2(math.e)
    run = dense(Memory(), (folded.float(), k, v), attn_scale_prefolded=True).go()
    torch.testing.assert_close(run.o, plain.o, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.stats, plain.stats, rtol=1e-5, atol=1e-6)


# ---- 23: masks


@pytest.mark.parametrize("alignment", ["TOP_LEFT", "BOTTOM_RIGHT"])
@pytest.mark.parametrize("left", [None, 1, 2, 100, 0, -2])
@pytest.mark.parametrize("right", [None, 0, 2, 100])
@pytest.mark.parametrize("s_q, s_kv", [(4, 7), (7, 4), (1, 7)])
def test_bands(alignment, left, right, s_q, s_kv) -> None:
    tensors = qkv(b=1, h_q=1, s_q=s_q, s_kv=s_kv)
    run = dense(Memory(), tensors, band=Band(alignment=alignment, left=left, right=right)).go()
    offset = s_kv - s_q if alignment == "BOTTOM_RIGHT" else 0

    def visible(b, i, j):
        inside_right = right is None or j <= i + offset + right
        return inside_right and (left is None or j > i + offset - left)

    check_by_hand(run, tensors, visible)


def test_left_bound_counts_the_diagonal() -> None:
    q, k, v = qkv(b=1, h_q=1, s_q=7)
    run = dense(Memory(), (q, k, v), band=Band(left=1, right=0)).go()
    torch.testing.assert_close(run.o[0, 0], v[0, 0].double())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("forms", ["both", "q", "kv"])
@pytest.mark.parametrize("rank", [1, 4])
def test_cumulative_lengths_per_side(dtype: torch.dtype, forms: str, rank: int) -> None:
    tensors = qkv(b=3)
    memory = Memory()
    lens = {"q": [2, 0, 5], "kv": [7, 4, 1]}
    fields = {}
    for side, values in lens.items():
        form = "seq_len"
        if forms in ("both", side):
            form, values = "cu_seq_len", [sum(values[:b]) for b in range(4)]
        dim = (len(values), *(1,) * (rank - 1))
        operand = memory.ints(side, values, dtype, dim)
        fields[f"seq_len_{side}"] = Lengths(form=form, operand=operand)
    run = dense(memory, tensors, **fields, band=CAUSAL_BR).go()
    check_by_hand(
        run,
        tensors,
        lambda b, i, j: (
            i < lens["q"][b] and j < lens["kv"][b] and j <= i + lens["kv"][b] - lens["q"][b]
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [(2, 2, 5, 7), (1, 2, 5, 7), (2, 1, 5, 7), (1, 1, 1, 7)])
@pytest.mark.parametrize("turned", [False, True])
def test_bias_types_broadcasts_and_strides(dtype, dim, turned) -> None:
    memory = Memory()
    tensors = qkv()
    values = draw(*dim, seed=3, dtype=dtype)
    b, h, s, _ = dim
    stride = (h * b, b, b * h * 7, 1) if turned and s == 1 else None
    if turned and s > 1:
        stride = (s * h, s, 1, b * h * s)
    bias = memory.add("bias", values, stride)
    fields = lengths(memory, [5, 3], [6, 7])
    run = dense(memory, tensors, bias=bias, **fields, attn_scale=Scale(form="host", value=0.5)).go()
    full = values.double().expand(2, 2, 5, 7)
    check_by_hand(
        run,
        tensors,
        lambda b, i, j: i < [5, 3][b] and j < [6, 7][b],
        scale=0.5,
        head=lambda b, h: {"add": lambda i, j: float(full[b, h, i, j])},
    )


def test_bias_of_minus_infinity_makes_a_keyless_row() -> None:
    memory = Memory()
    values = torch.zeros(1, 1, 5, 7)
    values[:, :, 3] = -INF
    run = dense(memory, qkv(), bias=memory.add("bias", values)).go()
    assert not run.o[:, :, 3].any() and (run.stats[:, :, 3] == -INF).all()
    assert (run.stats[:, :, 2] > -INF).all()


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


@pytest.mark.parametrize("band", [CAUSAL, CAUSAL_BR], ids=["top left", "bottom right"])
def test_alibi_takes_plain_indices(band: Band) -> None:
    tensors = qkv(b=1, h_q=3, s_q=4, s_kv=7)
    run = dense(Memory(), tensors, band=band, alibi=True).go()
    offset = 3 if band.alignment == "BOTTOM_RIGHT" else 0
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    check_by_hand(
        run,
        tensors,
        lambda b, i, j: j <= i + offset,
        head=lambda b, h: {"add": lambda i, j: slopes[h] * (j - i)},
    )


def test_window_keeps_bias_masks_and_alibi_in_step() -> None:
    # the window starts past key 0, so every operand over keys is read from its middle
    memory = Memory()
    tensors = qkv(b=1, s_q=2, s_kv=9)
    bias, extra = draw(1, 2, 2, 9, seed=4), draw(1, 1, 1, 9, seed=5)
    run = dense(
        memory,
        tensors,
        band=Band(left=4, right=0, alignment="BOTTOM_RIGHT"),
        bias=memory.add("bias", bias),
        kv_mask=memory.add("kv_mask", extra),
        alibi=True,
    ).go()
    slopes = [2.0**-4, 2.0**-8]

    def terms(b, h):
        return {
            "add": lambda i, j: float(bias[0, h, i, j] + extra[0, 0, 0, j]) + slopes[h] * (j - i)
        }

    check_by_hand(run, tensors, lambda b, i, j: i + 7 - 4 < j <= i + 7, head=terms)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_kv_mask(batches: int, dtype: torch.dtype) -> None:
    memory = Memory()
    tensors = qkv()
    values = draw(batches, 1, 1, 7, seed=6, dtype=torch.bfloat16)
    values = values > 0 if dtype == torch.bool else values.to(dtype)
    run = dense(memory, tensors, kv_mask=memory.add("kv_mask", values, (14, 14, 14, 2))).go()
    full = values.double().expand(2, 1, 1, 7)

    def terms(b, h):
        return {"add": lambda i, j: 0.0 if dtype == torch.bool else float(full[b, 0, 0, j])}

    check_by_hand(
        run, tensors, lambda b, i, j: dtype != torch.bool or bool(full[b, 0, 0, j]), head=terms
    )


def test_block_mask_bits_are_tiles_least_significant_first() -> None:
    # nine key tiles need two bytes; the last tile of either side is partial
    memory = Memory()
    s_q, s_kv = 130, 128 * 8 + 3
    tensors = qkv(b=1, h_q=2, h_k=1, s_q=s_q, s_kv=s_kv, d=2)
    bits = torch.tensor([[[0b00000001, 1], [0b10000000, 0]], [[0, 1], [0, 0]]], dtype=torch.uint8)
    block_mask = memory.add("block_mask", bits.reshape(1, 2, 2, 2))
    run = dense(memory, tensors, block_mask=block_mask).go()
    tiles = {(0, 0): {0, 8}, (0, 1): {7}, (1, 0): {8}, (1, 1): set()}
    for h in range(2):
        expected, stats = by_hand(
            tensors[0][0, h],
            tensors[1][0, 0],
            tensors[2][0, 0],
            lambda i, j, h=h: j // 128 in tiles[h, i // 128],
        )
        torch.testing.assert_close(run.o[0, h], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(run.stats[0, h, :, 0], stats, rtol=1e-6, atol=1e-6)


def test_dropout_by_a_mask_leaves_the_statistics() -> None:
    memory = Memory()
    tensors = qkv(b=1, h_q=1)
    kept = (draw(1, 1, 5, 7, seed=8) > 0).float()
    plain = dense(Memory(), tensors, band=CAUSAL, want=("stats", "amax_s")).go()
    dropout = Dropout(
        form="mask",
        mask=memory.add("mask", torch.where(torch.ones(5, 7).tril() > 0, kept, NAN)),
        scale=memory.add("scale", torch.full((1, 1, 1, 1), 2.0)),
    )
    run = dense(memory, tensors, band=CAUSAL, dropout=dropout, want=("stats", "amax_s")).go()
    assert torch.equal(run.stats, plain.stats) and torch.equal(run.amax_s, plain.amax_s)
    scores = (tensors[0] @ tensors[1].mT)[0, 0].double()
    p = torch.softmax(scores.masked_fill(torch.ones(5, 7).tril() == 0, -INF), -1)
    expected = (p * kept[0, 0] * 2.0) @ tensors[2][0, 0].double()
    torch.testing.assert_close(run.o[0, 0], expected, rtol=1e-5, atol=1e-6)


# ---- 24 to 28: FP8


SCALES = {
    "descale_q": 0.5,
    "descale_k": 3.0,
    "descale_v": 0.25,
    "descale_s": 1 / 256,
    "scale_s": 256.0,
    "scale_o": 1.0,
}


def fp8(memory, tensors, *, o_dtype=torch.float32, want=("stats",), **scales: float) -> Run:
    fields = {
        name: memory.add(name, torch.full((1, 1, 1, 1), value))
        for name, value in {**SCALES, **scales}.items()
    }
    return dense(memory, tensors, o_dtype=o_dtype, want=want, **fields)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_descales(dtype: torch.dtype) -> None:
    tensors = qkv(d=16, dtype=dtype)
    run = fp8(Memory(), tensors).go()
    q, k, v = (x.double() for x in tensors)
    check_by_hand(run, (q, k, v * 0.25), lambda b, i, j: True, scale=1.5)


def test_fp8_small_probabilities_are_kept() -> None:
    memory = Memory()
    q = torch.ones(1, 1, 1, 1).to(torch.float8_e4m3fn)
    k = torch.full((1, 1, 4096, 1), -7.0)
    v = torch.ones(1, 1, 4096, 1)
    k[0, 0, 0], v[0, 0, 0] = 0.0, 0.0
    ones = dict.fromkeys(SCALES, 1.0)
    tensors = (q, k.to(q.dtype), v.to(q.dtype))
    assert fp8(memory, tensors, **ones).go().o.item() == pytest.approx(0.7888, abs=1e-4)


def test_scale_s_and_descale_s_act_as_their_product() -> None:
    tensors = qkv(d=16, dtype=torch.float8_e4m3fn)
    want = ("stats", "amax_s", "amax_o")
    plain = fp8(Memory(), tensors, want=want, scale_s=1.0, descale_s=1.0).go()
    run = fp8(Memory(), tensors, want=want, scale_s=4.0, descale_s=0.5).go()
    torch.testing.assert_close(run.o, 2 * plain.o)
    torch.testing.assert_close(run.amax_o, 2 * plain.amax_o)
    assert torch.equal(run.stats, plain.stats) and torch.equal(run.amax_s, plain.amax_s)


def test_amax_is_taken_before_the_output_scale() -> None:
    tensors = qkv(d=16, dtype=torch.float8_e4m3fn)
    plain = fp8(Memory(), tensors, want=("stats", "amax_o")).go()
    run = fp8(Memory(), tensors, want=("stats", "amax_o"), scale_o=8.0).go()
    assert torch.equal(run.amax_o, plain.amax_o)
    assert run.amax_o.item() == pytest.approx(plain.o.abs().max().item())
    torch.testing.assert_close(run.o, 8 * plain.o)


def test_amax_s_is_the_largest_normalized_probability() -> None:
    memory = Memory()
    sink = memory.add("sink", torch.full((1, 1, 1, 1), math.log(6.0)))
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(3.0)]).reshape(1, 1, 2, 1)
    for extra, expected in (({}, 3 / 4), ({"sink": sink}, 3 / 10)):
        run = dense(memory, (q, k, torch.ones(1, 1, 2, 1)), want=("amax_s",), **extra).go()
        assert run.amax_s.item() == pytest.approx(expected)


def test_amax_covers_every_batch_and_is_reset_by_each_run() -> None:
    memory = Memory()
    tensors = qkv(b=3)
    tensors[2][1, 1] *= 50.0
    run = dense(memory, tensors, want=("amax_o", "amax_s")).go()
    first = run.amax_o.item()
    assert first == pytest.approx(run.o.abs().max().item()) and first > 10
    view = memory.view(run.facts.v, run.facts.v.dim, run.facts.v.stride)
    view.mul_(0.01)
    assert run.go().amax_o.item() == pytest.approx(0.01 * first)


def test_amax_without_a_live_row_is_zero() -> None:
    memory = Memory()
    run = dense(memory, qkv(), **lengths(memory, [0, 0], [7, 7]), want=("amax_o", "amax_s")).go()
    assert run.amax_o.item() == 0 and run.amax_s.item() == 0


@pytest.mark.parametrize("dtype, largest", [(torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)])
def test_fp8_output_saturates(dtype: torch.dtype, largest: float) -> None:
    for sign in (1.0, -1.0):
        memory = Memory()
        q = torch.zeros(1, 1, 1, 16).to(torch.float8_e4m3fn)
        v = torch.full((1, 1, 2, 16), sign * 448.0).to(torch.float8_e4m3fn)
        tensors = (q, torch.zeros(1, 1, 2, 16).to(q.dtype), v)
        want = ("amax_o",)
        run = fp8(memory, tensors, o_dtype=dtype, want=want, descale_v=1.0, scale_o=1e4).go("fp32")
        assert (run.o == sign * largest).all()
        assert run.amax_o.item() == pytest.approx(448.0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2],
)
@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_output_types_round_once(dtype: torch.dtype, inputs: torch.dtype) -> None:
    tensors = qkv(d=16, dtype=inputs)
    exact = dense(Memory(), tensors).go()
    run = dense(Memory(), tensors, o_dtype=dtype).go()
    assert torch.equal(run.o, exact.o.to(dtype).double())

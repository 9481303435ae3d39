"""Context-parallel attention: shards, merging, the provider's promises, 1, 2 and 4 gloo ranks."""

from __future__ import annotations

import threading
from typing import Any

import cudnn
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_frost.context_parallel import (
    MODE_VARIABLE,
    ForwardProvider,
    Mode,
    PackedSequences,
    Sharding,
    all_to_all_attention,
    merge,
)
from cudnn_frost.context_parallel import provider as provider_module

from .cp_ranks import Case, expected, failures_of, whole

CPU = torch.device("cpu")
# shorter than the parts, empty, one token, a prime
LENGTHS = (37, 5, 64, 1, 0, 3)

# ---- ranks

CASES = [
    Case(way, LENGTHS, balanced, causal, (4, 2))
    for way in ("all_to_all", "ring", "gather")
    for balanced in (True, False)
    for causal in (True, False)
]
CASES += [
    Case("all_to_all", (16, 9), True, True, (8, 1), dtype=torch.float16),
    Case("all_to_all", (16, 9), True, True, (4, 4), head_dims=(16, 32)),
    Case("ring", (2, 1, 3), True, True, (3, 1), dtype=torch.float16),
    Case("ring", (40,), True, True, (2, 2), head_dims=(24, 8)),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_its_tokens_attention(ranks):
    failures = failures_of(ranks, CASES)
    assert not failures, "\n".join(failures)


def test_a_wrong_result_on_a_rank_is_seen():
    """Another scale than the expected one."""
    (failure,) = failures_of(1, [Case("ring", (4,), True, True, (2, 2), scale=0.5)])
    assert "Tensor-likes are not close" in failure


# ---- shards

SHARDINGS = st.builds(
    Sharding,
    st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple),
    st.integers(1, 5),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(SHARDINGS)
def test_shards_are_a_partition_in_order(sharding):
    tokens = torch.arange(sum(sharding.lengths))
    shards = [sharding.shard(tokens, rank) for rank in range(sharding.ranks)]
    assert [len(x) for x in shards] == [sharding.tokens_of(r) for r in range(sharding.ranks)]
    assert torch.cat(shards).sort().values.equal(tokens)
    for rank, shard in enumerate(shards):
        assert shard.equal(shard.sort().values)
        bounds = sharding.cu_seqlens(sharding.lengths, CPU)
        held = torch.bucketize(shard, bounds[1:], right=True)
        assert torch.bincount(held, minlength=len(sharding.lengths)).tolist() == list(
            sharding.lengths_of(rank)
        )
    gathered = sharding.gather_index(CPU)
    assert torch.cat(shards).equal(gathered)
    assert gathered[sharding.scatter_index(CPU)].equal(tokens)


@settings(max_examples=50, deadline=None)
@given(st.integers(64, 4000), st.integers(2, 8))
def test_balanced_shards_have_even_causal_work(length, ranks):
    sharding = Sharding((length,), ranks)
    work = [int((sharding.positions(rank) + 1).sum()) for rank in range(ranks)]
    # parts differ by a token, whose work is at most the length
    assert max(work) - min(work) <= 3 * length


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((), 2), "lengths"),
        (((3, -1), 2), "lengths"),
        (((3,), 0), "ranks"),
    ],
)
def test_a_sharding_that_cannot_be(arguments, said):
    with pytest.raises(ValueError, match=said):
        Sharding(*arguments)


@pytest.mark.parametrize("arguments", [("12", 2), ((3.7,), 2), (6, 2), ((6,), "2"), ((6,), 2.0)])
def test_a_sharding_of_no_integers(arguments):
    with pytest.raises(TypeError, match="lengths, ranks: must be integers"):
        Sharding(*arguments)


def test_a_shard_of_another_length_or_rank():
    sharding = Sharding((4, 5), 2)
    with pytest.raises(ValueError, match="tokens: has 8 rows, want 9"):
        sharding.shard(torch.zeros(8), 0)
    with pytest.raises(ValueError, match="rank: must be from 0 to 1, got 2"):
        sharding.positions(2)


# ---- merging


@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_merged_parts_are_the_whole(cut):
    generator = torch.Generator().manual_seed(2)
    scores, v = (torch.randn(*s, generator=generator).double() for s in ((3, 8), (8, 4)))

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return scores[:, keys].softmax(-1) @ v[keys], scores[:, keys].logsumexp(-1)

    parts = [tuple(x.float() for x in attend(keys)) for keys in (slice(cut), slice(cut, None))]
    o, stats = merge(*parts[0], parts[1])
    wanted = attend(slice(None))
    torch.testing.assert_close(o.double(), wanted[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(stats.double(), wanted[1], atol=1e-6, rtol=1e-5)


def test_what_is_not_finite_stays_so():
    one = torch.zeros(1, 2), torch.zeros(1)
    o, _ = merge(*one, (torch.tensor([[float("nan"), float("inf")]]), torch.zeros(1)))
    assert bool(o[0, 0].isnan()) and bool(o[0, 1].isinf())
    unseen = torch.full((1, 2), float("nan")), torch.full((1,), float("-inf"))
    o, stats = merge(*one, unseen)
    assert bool((o == 0).all()) and bool((stats == 0).all())


def test_index_tensors_made_in_inference_mode_serve_outside_it():
    sharding = Sharding((7, 4), 2)
    with torch.inference_mode():
        kept = sharding.rows(0, 1, None, CPU), sharding.scatter_index(CPU)
    for index in kept:
        assert index is not None and not index.is_inference()
    x = torch.zeros(sum(sharding.lengths), requires_grad=True)
    x[kept[1]].sum().backward()


def test_rows_that_no_part_has_a_key_for_stay_zero():
    nothing = torch.zeros(2, 4), torch.full((2,), float("-inf"))
    o, stats = merge(*nothing, nothing)
    assert bool((o == 0).all()) and bool((stats == float("-inf")).all())


# ---- the provider

CASE = Case("", (5, 0, 9), False, True, (4, 2))


class Call:
    """Arguments of `ForwardProvider.forward`, correct until changed."""

    def __init__(self, case: Case = CASE) -> None:
        self.case = case
        self.q, self.k, self.v = whole(case)
        self.cu = Sharding(case.lengths, 1).cu_seqlens(case.lengths, CPU)
        self.words: dict[str, Any] = {"causal": case.causal}

    def run(self, provider: ForwardProvider | None = None, **changes: Any) -> Any:
        of_sequences = [
            changes.pop(name, default)
            for name, default in zip(PackedSequences._fields, (self.cu, self.cu, 9, 9), strict=True)
        ]
        operands = {"q": self.q, "k": self.k, "v": self.v}
        sequences = PackedSequences(*of_sequences)
        arguments = {**operands, "sequences": sequences, **self.words, **changes}
        return (provider or ForwardProvider("fallback")).forward(**arguments)


@pytest.mark.parametrize("causal", [True, False])
def test_forward_is_attention_and_its_stats(causal):
    case = Case("", (5, 0, 9), False, causal, (4, 2), (16, 32))
    call = Call(case)
    o, stats = call.run()
    wanted = expected(case)
    torch.testing.assert_close(o.double(), wanted[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(stats.double(), wanted[1], atol=2e-5, rtol=2e-5)
    out, sums = torch.empty_like(o), torch.empty_like(stats)
    again = call.run(out=out, stats=sums, origins={n: call.cu for n in ("q", "k", "v", "o")})
    assert again[0] is out and again[1] is sums
    assert out.equal(o) and sums.equal(stats)


def test_keys_and_queries_may_have_unequal_lengths():
    call = Call(Case("", (5, 2, 9), False, False, (2, 2)))
    call.k, call.v = (torch.cat([x, x])[:20].contiguous() for x in (call.k, call.v))
    cu = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    o, stats = call.run(cu_seqlens_kv=cu, max_seqlen_kv=12)
    scores = torch.einsum("qhd,khd->hqk", call.q[5:7].double(), call.k[7:8].double()) / 4
    torch.testing.assert_close(stats[5:7].double(), scores.logsumexp(-1).T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(o[5:7], call.v[7:8].expand(2, -1, -1), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["off", "fallback", "strict"])
def test_the_environment_names_the_mode(name, monkeypatch):
    monkeypatch.setenv(MODE_VARIABLE, name)
    assert ForwardProvider().mode is Mode(name)
    assert ForwardProvider("off").mode is Mode.OFF


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    assert ForwardProvider().mode is Mode.OFF
    monkeypatch.setenv(MODE_VARIABLE, "")
    assert ForwardProvider().mode is Mode.OFF
    assert Call().run(ForwardProvider()) is None
    with pytest.raises(ValueError, match="mode is off"):
        all_to_all_attention(*whole(CASE), Sharding((14,), 1), ForwardProvider())


def test_an_unknown_mode_is_named(monkeypatch):
    with pytest.raises(ValueError, match="mode: must be one of off, fallback, strict, got 'on'"):
        ForwardProvider("on")
    monkeypatch.setenv(MODE_VARIABLE, "1")
    with pytest.raises(ValueError, match="got '1'"):
        ForwardProvider()


def test_strict_mode_says_why_each_row_declined():
    with pytest.raises(cudnn.cudnnGraphNotSupportedError) as error:
        Call().run(ForwardProvider("strict"))
    said = str(error.value)
    assert "strict mode" in said and "frost_sdpa_fwd_prefill_sm90" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout", 0.1),
        ("bias", torch.zeros(1)),
        ("sink", torch.zeros(1)),
        ("page_table", torch.zeros(1)),
        ("window", (128, 0)),
    ],
)
def test_what_this_path_does_not_take_is_named(name, value):
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=f"{name}: context-parallel"):
        Call().run(**{name: value})
    Call().run(**{name: None})
    with pytest.raises(TypeError, match="dropuot"):
        Call().run(dropuot=0.1)


def test_plans_are_made_once_for_a_declaration(monkeypatch):
    made = []
    original = provider_module._make_plan
    monkeypatch.setattr(provider_module, "_make_plan", lambda *a: made.append(a[0]) or original(*a))
    provider, call = ForwardProvider("fallback"), Call()
    call.run(provider)
    call.run(provider, cu_seqlens_q=torch.tensor([0, 5, 5, 14], dtype=torch.int32))
    assert len(made) == 1
    call.run(provider, causal=False)
    call.run(provider, max_seqlen_q=10)
    assert len(made) == 3


def test_threads_may_make_the_same_plan_and_keep_one(monkeypatch):
    """No lock is held meanwhile: both are inside at once."""
    provider, call = ForwardProvider("fallback"), Call()
    original, inside = provider_module._make_plan, threading.Barrier(2, timeout=30)

    def make(*arguments):
        inside.wait()
        return original(*arguments)

    monkeypatch.setattr(provider_module, "_make_plan", make)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(call.run(provider))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and len(provider._plans) == 1
    assert results[0][0].equal(results[1][0])


def test_the_oldest_plans_are_given_up(monkeypatch):
    monkeypatch.setattr(provider_module, "_MOST_PLANS", 2)
    provider, call = ForwardProvider("fallback"), Call()
    for most in (9, 10, 11):
        call.run(provider, max_seqlen_q=most)
    assert [declared.max_q for declared in provider._plans] == [10, 11]


# ---- compactness: a broken promise is never an answer


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BROKEN: dict[str, dict[str, Any]] = {
    "q_starts_late": {"cu_seqlens_q": ints(1, 5, 5, 14)},
    "q_ends_early": {"cu_seqlens_q": ints(0, 5, 5, 13)},
    "q_ends_late": {"cu_seqlens_q": ints(0, 5, 5, 15)},
    "q_goes_back": {"cu_seqlens_q": ints(0, 9, 5, 14)},
    "q_is_negative": {"cu_seqlens_q": ints(0, -1, 5, 14)},
    "q_is_longer_than_said": {"max_seqlen_q": 8},
    "kv_starts_late": {"cu_seqlens_kv": ints(1, 5, 5, 14)},
    "kv_ends_early": {"cu_seqlens_kv": ints(0, 5, 5, 13)},
    "kv_ends_late": {"cu_seqlens_kv": ints(0, 5, 5, 2**31 - 1)},
    "kv_goes_back": {"cu_seqlens_kv": ints(0, 9, 5, 14)},
    "kv_is_longer_than_said": {"max_seqlen_kv": 8},
    "a_query_without_keys": {"cu_seqlens_kv": ints(0, 0, 5, 14)},
    "overflowing_lengths": {"cu_seqlens_q": ints(0, 2**31 - 1, -(2**31), 14)},
    **{
        f"{name}_has_a_gap": {"origins": {name: ints(0, 5, 6, 14)}}
        for name in ("q", "k", "v", "o", "stats")
    },
    "q_origin_is_not_zero": {"origins": {"q": ints(2, 5, 5, 14)}},
    "o_end_differs": {"origins": {"o": ints(0, 5, 5, 16)}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_fails_the_launch_and_writes_nothing(name):
    call = Call()
    out = torch.full((14, 4, 16), 7.0).bfloat16()
    stats = torch.full((14, 4), 7.0)
    with pytest.raises(RuntimeError, match="cu_seqlens|origins"):
        call.run(out=out, stats=stats, **BROKEN[name])
    assert bool((out == 7).all()) and bool((stats == 7).all())
    call.run(out=out, stats=stats)
    assert not bool((out == 7).any())


# ---- operands


def storage(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q_rank": ({"q": storage(14, 64)}, "q: must be"),
    "q_type": ({"q": torch.zeros(14, 4, 16)}, "q: must be float16 or bfloat16"),
    "k_type": ({"k": torch.zeros(14, 2, 16).half()}, "k: must be torch.bfloat16 as q"),
    "v_heads": ({"v": storage(14, 4, 16)}, "v: must have k's"),
    "v_tokens": ({"v": storage(13, 2, 16)}, "v: must have k's"),
    "k_width": ({"k": storage(14, 2, 8)}, "k: must have q's head_dim"),
    "k_heads": ({"k": storage(14, 3, 16), "v": storage(14, 3, 16)}, "k: 3 heads do not divide"),
    "q_strides": ({"q": storage(14, 8, 16)[:, ::2]}, "q: must be compact"),
    "q_address": ({"q": storage(14 * 64 + 1)[1:].view(14, 4, 16)}, "q: address .* 16-byte"),
    "cu_type": ({"cu_seqlens_q": torch.zeros(4)}, "cu_seqlens_q: must be"),
    "cu_wide": ({"cu_seqlens_kv": torch.zeros(4, dtype=torch.int64)}, "cu_seqlens_kv: must be"),
    "cu_rank": ({"cu_seqlens_q": ints(0)}, "cu_seqlens_q: must be"),
    "cu_batch": ({"cu_seqlens_kv": ints(0, 5, 14)}, "cu_seqlens_kv: has 3 entries"),
    "max": ({"max_seqlen_kv": 0}, "max_seqlen_kv: must be an int of 1 or more"),
    "max_none": ({"max_seqlen_q": None}, "max_seqlen_q: must be an int of 1 or more"),
    "no_width": ({"q": storage(14, 4, 0)}, "q: must be"),
    "scale": ({"scale": float("nan")}, "scale, causal: must be finite"),
    "causal": ({"causal": "no"}, "scale, causal: must be finite"),
    "out_shape": ({"out": storage(14, 4, 8)}, "out: must be"),
    "out_type": ({"out": torch.zeros(14, 4, 16)}, "out: must be"),
    "stats_type": ({"stats": torch.zeros(14, 4).half()}, "stats: must be torch.float32"),
    "origin_name": ({"origins": {"lse": ints(0, 5, 5, 14)}}, "origins: 'lse'"),
    "origin_shape": ({"origins": {"q": ints(0, 5)}}, "origins: q must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operand_that_cannot_be_used_is_named(name):
    changes, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        Call().run(**changes)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"])
def test_an_operand_that_is_no_tensor_is_named(name):
    with pytest.raises(TypeError, match=f"{name}: must be a torch.Tensor, got list"):
        Call().run(**{name: [0, 5, 5, 14]})


def test_outputs_that_overlap_an_operand_are_refused():
    call = Call()
    with pytest.raises(ValueError, match="out: overlaps"):
        call.run(out=call.q)
    arena = torch.zeros(14 * 4 * 16 + 14 * 4 * 2).bfloat16()
    out = arena[: 14 * 64].view(14, 4, 16)
    inside = arena[14 * 64 - 8 : 14 * 64 + 104].view(torch.float32)[:56].view(14, 4)
    with pytest.raises(ValueError, match="stats: overlaps"):
        call.run(out=out, stats=inside)
    behind = arena[14 * 64 :].view(torch.float32).view(14, 4)
    call.run(out=out, stats=behind)

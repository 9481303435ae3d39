"""The decode rows through `Graph`: who serves, memory nobody may trust, the calling process."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import cudnn
import pytest
import torch

from cudnn_frost.runtime import cache
from tests.gpu.decode_problem import (
    BF16,
    CAUSAL_BR,
    E4M3,
    GARBAGE,
    INF,
    NAN,
    Decode,
    Form,
    as_integers,
    assert_same_bits,
    band,
)
from tests.gpu.serving import plan_names, workspace_bytes

KINDS = pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
PAGES = pytest.mark.parametrize("page", [16, 64, None], ids=["page16", "page64", "dense"])


def spaces(problem: Decode) -> dict[int, torch.Tensor]:
    """A workspace for each of the row's plans, all of them built."""
    needs = {index: workspace_bytes(problem.graph, index) for index in problem.plans}
    return {
        index: torch.full((max(need, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        for index, need in needs.items()
    }


# ---- who serves


@KINDS
def test_the_rows_plans_are_first_and_every_one_answers_as_the_oracle(dtype, handle):
    problem = Decode(Form(dtype), handle)
    names = plan_names(problem.graph)
    print("\n".join(names))
    assert problem.plans[0] == 0
    assert names[-1] == "frost_sdpa_fwd_reference"
    assert not [n for n in names if n.startswith("frost_") and re.search(r"eng\d", n)]
    problem.check()


@KINDS
def test_a_replayed_plan_is_the_same_plan(dtype, handle):
    problem = Decode(Form(dtype), handle)
    engine, knobs = problem.graph.get_engine_and_knobs_at_index(0)
    again = Decode(Form(dtype), handle, plan=False)
    again.graph.create_execution_plan(engine, knobs)
    assert plan_names(again.graph)[0] == plan_names(problem.graph)[0]
    again.plans = [0]
    again.check()
    assert_same_bits(again.answer(0), problem.answer(0))


# ---- memory nobody may trust


@KINDS
@PAGES
@pytest.mark.parametrize("dead", [NAN, INF], ids=["nan", "inf"])
def test_dead_memory_does_not_reach_the_output(dtype, page, dead, handle):
    """Dead pages, the last page's tail, K and V past a length, Q past a length, the workspace."""
    lengths, rows = (33, 200, 0, 129), (5, 2, 4, 0)
    words = CAUSAL_BR
    problem = Decode(
        Form(dtype, lengths=lengths, sq=5, page=page, capacity=300, words=words), handle
    )
    for index in problem.plans:
        problem.set_lengths(lengths, rows, dead=0.0)
        clean = problem.answer(index, fill=0)
        problem.set_lengths(lengths, rows, dead=dead)
        assert_same_bits(problem.answer(index, fill=0xFF), clean)
        problem.verify()


@KINDS
@pytest.mark.parametrize("entry", GARBAGE)
def test_table_entries_past_the_live_pages_are_never_read(dtype, entry, handle):
    lengths = (33, 200, 0, 129)
    problem = Decode(Form(dtype, lengths=lengths, capacity=512), handle)
    for index in problem.plans:
        problem.set_lengths(lengths, garbage=(problem.pages - 1,))
        clean = problem.answer(index)
        problem.set_lengths(lengths, garbage=(entry,))
        assert_same_bits(problem.answer(index), clean)


@KINDS
@pytest.mark.parametrize("page", [16, 128])
def test_pages_before_the_window_are_never_read(dtype, page, handle):
    left = 20
    words = band(dtype, left=left, right=0, bottom_right=True)
    problem = Decode(
        Form(dtype, lengths=(1000, 130, 7, 515), capacity=1024, page=page, words=words), handle
    )
    problem.check()
    clean = {index: problem.answer(index) for index in problem.plans}
    for port, pool in (("k", problem.k), ("v", problem.v)):
        for b, n in enumerate(problem.live):
            gone = max(0, n - left) // page
            ids = problem.tables[port][b, 0, :gone, 0]
            as_integers(pool)[ids.long()] = -1 if dtype is BF16 else 0xFF
            ids.fill_(-1)
    for index in problem.plans:
        assert_same_bits(problem.answer(index), clean[index])


@KINDS
@pytest.mark.parametrize("maximum", [None, 100, 5000], ids=["table", "declared", "beyond"])
@pytest.mark.parametrize("length", [129, 5000, 2**31 - 1])
def test_a_length_above_the_maximum_is_clamped(dtype, maximum, length, handle):
    """At what the table holds, or at the declared maximum where that is less."""
    form = Form(dtype, lengths=(100, 3, 64), capacity=128, maximum=maximum)
    problem = Decode(form, handle)
    problem.set_lengths((length, 3, length))
    assert problem.live[0] == min(maximum or 128, 128)
    problem.check()


@KINDS
def test_a_length_above_dense_keys_is_clamped(dtype, handle):
    problem = Decode(Form(dtype, lengths=(100, 3, 64), page=None), handle)
    problem.set_lengths((10_000, 3, 101))
    problem.check()


@pytest.mark.parametrize(("dtype", "pages"), [(E4M3, 4200), (BF16, 2100)], ids=["e4m3", "bf16"])
def test_page_offsets_past_32_bits(dtype, pages, handle):
    """Both past 2^31 elements and 2^32 bytes; K and V in one storage."""
    form = Form(dtype, lengths=(700, 33, 1, 512), page_stride=1 << 20, pages=pages)
    problem = Decode(form, handle)
    used = problem.tables["k"][0, 0, :44, 0]
    assert int(used.max()) == pages - 1
    assert int(used.max()) * (1 << 20) * dtype.itemsize > 1 << 32
    problem.check()


@KINDS
def test_more_sequences_than_a_grid_axis_holds(dtype, handle):
    """Batch and batch times heads past 65,535; one key sequences and keyless ones among them."""
    b, size = 70_000, 8
    lengths = torch.randint(0, 2 * size + 1, (b,), generator=torch.Generator().manual_seed(1))
    form = Form(dtype, lengths=tuple(lengths.tolist()), heads=(2, 2), d=(64, 64), page=size)
    problem = Decode(form, handle)
    problem.run()
    expected, lse = many_sequences(problem, lengths.cuda())
    keyless = lengths.cuda() == 0
    got = problem.o.double()
    assert float((got - expected).norm() / expected.norm()) < 1e-2
    assert bool((problem.o[keyless] == 0).all())
    assert bool((problem.stats[keyless] == -INF).all())
    assert float((problem.stats - lse)[~keyless].abs().max()) < 1e-2


def many_sequences(problem: Decode, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O and Stats of one query row and one head a group, all sequences at once, in float64."""
    dtype, scales = problem.form.dtype, {n: float(x) for n, x in problem.scales.items()}
    columns = problem.form.columns
    sides = []
    for port, pool in (("k", problem.k), ("v", problem.v)):
        ids = problem.tables[port][:, 0, :, 0].long().clamp(0, problem.pages - 1)
        pages = as_integers(pool)[ids.flatten()].view(dtype).double()
        pages = pages.view(len(lengths), columns, *pages.shape[1:]).transpose(1, 2)
        sides.append(pages.flatten(2, 3) * scales.get(f"descale_{port}", 1.0))
    keys = torch.arange(sides[0].shape[2], device="cuda")
    hidden = (keys >= lengths[:, None])[:, None, :]
    q = problem.q.double()[:, :, 0] * scales.get("descale_q", 1.0)
    scores = (sides[0] * q[:, :, None]).sum(-1) * problem.form.d[0] ** -0.5
    scores = scores.masked_fill(hidden, -INF)
    p = scores.softmax(-1).nan_to_num(0.0)
    v = sides[1].masked_fill(hidden[..., None], 0.0)
    return (p[..., None] * v).sum(2)[:, :, None], scores.logsumexp(-1)[:, :, None, None]


@KINDS
@pytest.mark.parametrize(("b", "heads"), [(45, (6, 3)), (100, (8, 8))], ids=["45x3", "100x8"])
def test_nothing_is_written_behind_the_last_sequence(dtype, b, heads, handle):
    """More sequences than thread blocks, in number no multiple of what a block takes."""
    problem = Decode(Form(dtype, lengths=(33,) * b, heads=heads, capacity=128), handle)
    problem.check()
    guarded = {}
    for name, tensor in (("o", problem.o_arena), ("stats", problem.stats)):
        flat = torch.empty(2 * tensor.numel(), dtype=tensor.dtype, device="cuda")
        as_integers(flat).fill_(0x5A)
        guarded[name] = flat
        problem.pack[problem.uid[name]] = flat
    for index, space in spaces(problem).items():
        problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
        for name, flat in guarded.items():
            assert bool((as_integers(flat)[flat.numel() // 2 :] == 0x5A).all()), name


# ---- layouts


@KINDS
@pytest.mark.parametrize("pool", ["nhd", "hnd", "shared"])
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256])
def test_pools_by_strides_and_page_size(dtype, pool, page, handle):
    Decode(Form(dtype, pool=pool, page=page, lengths=(33, 300, 1, 257)), handle).check()


@KINDS
@pytest.mark.parametrize("keys", [1, 100, 129, 1000])
def test_dense_keys_without_a_padding_mask(dtype, keys, handle):
    """Keys past the extent are no keys, whatever a tile reads there."""
    form = Form(dtype, lengths=(keys, keys), page=None, padding=False, sq=1)
    Decode(form, handle).check()


def test_tables_of_unequal_width_are_refused_while_planning(handle):
    problem = Decode(Form(), handle, plan=False)
    b, _, columns, _ = problem.tables["v"].shape
    problem.tensors["v_table"].set_dim([b, 1, columns + 1, 1])
    assert any("paged_attention_v_table" in reason for reason in problem.declines())


def test_an_output_stride_off_16_bytes_declines_by_name_and_on_16_bytes_is_served(handle):
    form = Form(E4M3, o_dtype=E4M3, heads=(1, 1), sq=4, scales={"scale_o": 64.0})
    off = Decode(replace(form, o_pad=8), handle, plan=False)
    assert any("o.stride[2]" in reason for reason in off.declines())
    Decode(replace(form, o_pad=16), handle).check()


# ---- binding


@KINDS
@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_an_unaligned_address_is_an_error_naming_the_tensor(dtype, name, handle):
    problem = Decode(Form(dtype), handle)
    space = spaces(problem)[problem.plans[0]]
    uid = problem.uid[name]
    with pytest.raises(ValueError, match=f"tensor {name} .*16-byte aligned"):
        problem.graph.execute_plan_at_index(
            {**problem.pack, uid: problem.pack[uid].data_ptr() + 8}, space, problem.plans[0], handle
        )


@KINDS
def test_a_missing_or_small_workspace_is_an_error_with_the_size_needed(dtype, handle):
    form = Form(dtype, lengths=(32768,), page=64)
    problem = Decode(form, handle)
    needs = {index: workspace_bytes(problem.graph, index) for index in problem.plans}
    index = next(index for index, need in needs.items() if need)
    need = needs[index]
    small = torch.empty(need - 1, dtype=torch.uint8, device="cuda")
    problem.poison()
    before = problem.outputs()
    for space, said in ((None, "missing"), (small, str(need - 1))):
        with pytest.raises(ValueError, match=f"workspace: .*{said}.*needs {need}"):
            problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
    torch.cuda.synchronize()
    assert_same_bits(problem.outputs(), before)


def test_lengths_of_another_integer_type_are_an_error_naming_the_tensor(handle):
    problem = Decode(Form(), handle)
    space = spaces(problem)[problem.plans[0]]
    pack = {**problem.pack, problem.uid["seq_len_kv"]: problem.seq_kv.long()}
    with pytest.raises(ValueError, match="seq_len_kv.*torch.int64"):
        problem.graph.execute_plan_at_index(pack, space, problem.plans[0], handle)


# ---- the calling process


@KINDS
def test_execute_neither_synchronizes_nor_allocates(dtype, handle):
    problem = Decode(Form(dtype, lengths=(3000, 5, 0, 700), sq=3, words=CAUSAL_BR), handle)
    for index, space in spaces(problem).items():
        problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        free = torch.cuda.mem_get_info()[0]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.cuda.mem_get_info()[0] == free
        problem.verify()


@KINDS
@PAGES
def test_the_first_execute_can_be_captured_and_replayed_with_other_lengths(dtype, page, handle):
    """Sequences that are empty at capture and not at replay, and the reverse; their table rows
    are -1 while they are empty."""
    sink = (1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -0.5)
    form = Form(
        dtype, lengths=(0, 70, 0, 200), capacity=256, page=page, sq=2, sink=sink, words=CAUSAL_BR
    )
    for place in range(len(Decode(form, handle).plans)):
        problem = Decode(form, handle)
        problem.set_lengths(form.lengths, garbage=(-1,))
        index = problem.plans[place]
        need = workspace_bytes(problem.graph, index)
        space = torch.full((max(need, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        cudnn.set_stream(handle, stream.cuda_stream)
        torch.cuda.synchronize()
        try:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                problem.graph.execute(problem.pack, space, handle)
        finally:
            cudnn.set_stream(handle, 0)
        for lengths in ((3, 0, 64, 0), (0,) * 4, (256, 256, 1, 17), (0, 70, 0, 200), (3,) * 4):
            rows = tuple(min(n, 2) for n in lengths)
            problem.set_lengths(lengths, rows, garbage=(-1,), seed=sum(lengths))
            problem.poison()
            torch.cuda.synchronize()
            captured.replay()
            torch.cuda.synchronize()
            problem.verify()


@KINDS
def test_it_runs_on_the_handles_stream(dtype, handle):
    """The kernels wait for what their stream waits for, and for nothing else."""
    problem = Decode(Form(dtype, lengths=(3000, 5, 0, 700)), handle)
    other = as_integers(problem.q).flip(0)
    stream = torch.cuda.Stream()
    for index, space in spaces(problem).items():
        as_integers(problem.q).zero_()
        problem.poison()
        torch.cuda.synchronize()
        cudnn.set_stream(handle, stream.cuda_stream)
        try:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                as_integers(problem.q).copy_(other)
            problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
            stream.synchronize()
        finally:
            cudnn.set_stream(handle, 0)
        problem.verify()


@KINDS
def test_a_cold_thread_can_execute_with_addresses_alone(dtype, handle):
    """A thread that never touched CUDA has no current context."""
    problem = Decode(Form(dtype), handle)
    space = spaces(problem)[problem.plans[0]]
    problem.graph.build_plan_at_index(problem.plans[0])
    pack = {uid: x.data_ptr() for uid, x in problem.pack.items()}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            problem.graph.execute(pack, space.data_ptr(), handle)
        except BaseException as error:
            errors.append(error)

    problem.poison()
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors, errors
    torch.cuda.synchronize()
    problem.verify()


@KINDS
@pytest.mark.parametrize("page", [16, None], ids=["page16", "dense"])
def test_one_compile_serves_every_length_pool_and_batch(dtype, page, handle):
    first = Decode(Form(dtype, lengths=(96, 40), capacity=96, page=page), handle)
    first.check()
    compiled = set(cache._memo)
    for lengths, pages in (((128, 96), None), ((96, 40), 50), ((96,) * 9, 100), ((4096,), None)):
        form = Form(dtype, lengths=lengths, page=page, pages=pages if page else None)
        other = Decode(form, handle)
        other.run()
        other.verify()
    assert set(cache._memo) == compiled


# ---- the same bits


def growing_keys(port: str, position: torch.Tensor, shape, generator) -> torch.Tensor:
    """Scores whose maximum grows from tile to tile."""
    x = torch.randn(shape, generator=generator, device=position.device)
    return x * (0.25 + position[:, None, :, None] / 512) if port == "k" else x


@KINDS
def test_the_same_inputs_give_the_same_bits(dtype, handle):
    """Every tile rescales what was summed before."""
    form = Form(
        dtype,
        lengths=(3000, 1500, 31, 2047),
        sq=8,
        heads=(12, 2),
        words=CAUSAL_BR,
        values=growing_keys,
    )
    problem = Decode(form, handle)
    problem.check()
    for index, space in spaces(problem).items():
        first = problem.answer(index)
        for _ in range(200):
            problem.poison()
            problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
            assert_same_bits(problem.outputs(), first)


@KINDS
def test_a_sequences_bits_do_not_depend_on_its_neighbours_data(dtype, handle):
    problem = Decode(Form(dtype, lengths=(1000, 600, 33, 2000), sq=2), handle)
    lengths = problem.form.lengths
    for index in problem.plans:
        problem.set_lengths(lengths)
        alone = problem.answer(index)
        kept = [
            (pool, ids, as_integers(pool)[ids].clone())
            for port, pool in (("k", problem.k), ("v", problem.v))
            for ids in [problem.tables[port][0, 0, : -(-lengths[0] // 16), 0].long()]
        ]
        query = as_integers(problem.q)[0].clone()
        problem.set_lengths(lengths, seed=7)
        for pool, ids, data in kept:
            as_integers(pool)[ids] = data
        as_integers(problem.q)[0] = query
        changed = problem.answer(index)
        for name in ("o", "stats"):
            assert_same_bits({name: changed[name][0]}, {name: alone[name][0]})
            assert not torch.equal(changed[name][1], alone[name][1])

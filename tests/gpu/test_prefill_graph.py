"""The prefill row through `Graph`: who serves, what execute may not do, capture and replay."""

from __future__ import annotations

import math
import threading

import cudnn
import pytest
import torch

import cudnn_frost

ROW = "frost_sdpa_fwd_prefill_sm90"
B, H_Q, H_KV, S, D = 2, 8, 2, 1000, 128


def draw(heads: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(B, S, heads, D, device="cuda").to(dtype).transpose(1, 2)


class Problem:
    """A causal GQA graph with its buffers."""

    def __init__(self, handle, **options) -> None:
        self.q, self.k, self.v = draw(H_Q), draw(H_KV), draw(H_KV)
        self.o = torch.full_like(self.q, float("nan"))
        self.stats = torch.full((B, H_Q, S, 1), float("nan"), device="cuda")
        g = cudnn_frost.Graph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
            **options,
        )
        self.tensors = [
            g.tensor(dim=list(x.shape), stride=list(x.stride()), name=n, uid=i)
            for i, (n, x) in enumerate([("q", self.q), ("k", self.k), ("v", self.v)], 1)
        ]
        o, stats = g.sdpa(
            *self.tensors, attn_scale=D**-0.5, use_causal_mask=True, generate_stats=True
        )
        o.set_output(True).set_uid(4).set_dim(list(self.o.shape)).set_stride(list(self.o.stride()))
        stats.set_output(True).set_uid(5).set_data_type(cudnn.data_type.FLOAT)
        self.graph = g

    @property
    def pack(self) -> dict[int, torch.Tensor]:
        return {1: self.q, 2: self.k, 3: self.v, 4: self.o, 5: self.stats}

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.q.double()
        k, v = (x.double().repeat_interleave(H_Q // H_KV, 1) for x in (self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        hidden = torch.ones(S, S, dtype=torch.bool, device="cuda").triu(1)
        scores.masked_fill_(hidden, float("-inf"))
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)

    def check(self) -> None:
        o, lse = self.expected()
        assert float((self.o.double() - o).norm() / o.norm()) < 5e-3
        assert float((self.stats.double() - lse).abs().max()) < 1e-3

    def poison(self) -> None:
        self.o.fill_(float("nan"))
        self.stats.fill_(float("nan"))


@pytest.fixture
def built(handle) -> Problem:
    problem = Problem(handle)
    problem.graph.build([cudnn.heur_mode.A])
    assert problem.graph.selected_engine.name == ROW
    return problem


def test_the_rows_plan_is_first_and_the_backends_are_behind(built):
    g = built.graph
    names = [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]
    assert names[0].startswith(ROW + "[")
    assert names[-1] == "frost_sdpa_fwd_reference"
    backend = [n for n in names if not n.startswith("frost_")]
    assert backend and names[1 : 1 + len(backend)] == backend
    print("\n".join(names))


def test_the_row_answers_as_the_oracle(built, handle):
    built.graph.execute(built.pack, None, handle)
    built.check()


def test_after_deselection_the_backend_serves_the_same_answer(built, handle):
    g = built.graph
    g.execute(built.pack, None, handle)
    ours, ours_lse = built.o.clone(), built.stats.clone()
    g.deselect_engines(["frost_"])
    g.build()
    assert g.selected_engine is None
    built.poison()
    space = torch.empty(max(g.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    g.execute(built.pack, space, handle)
    built.check()
    assert float((built.o.float() - ours.float()).abs().max()) < 2e-2
    assert float((built.stats - ours_lse).abs().max()) < 1e-3


def test_every_plan_of_the_list_gives_the_answer(built, handle):
    g = built.graph
    for index in range(g.get_execution_plan_count()):
        g.build_plan_at_index(index)
        need = g.get_workspace_size_plan_at_index(index)
        space = torch.empty(max(need, 1), dtype=torch.uint8, device="cuda")
        built.poison()
        g.execute_plan_at_index(built.pack, space, index, handle)
        torch.cuda.synchronize()
        try:
            built.check()
        except AssertionError as error:
            raise AssertionError(f"plan {index}, {g.get_plan_name_at_index(index)}") from error


def test_execute_neither_synchronizes_nor_allocates(built, handle):
    built.graph.execute(built.pack, None, handle)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    free = torch.cuda.mem_get_info()[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            built.graph.execute(built.pack, None, handle)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.cuda.mem_get_info()[0] == free


def test_the_first_execute_can_be_captured_and_replayed_with_other_inputs(handle):
    problem = Problem(handle)
    problem.graph.build([cudnn.heur_mode.A])
    stream = torch.cuda.Stream()
    cudnn.set_stream(handle, stream.cuda_stream)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            problem.graph.execute(problem.pack, None, handle)
    finally:
        cudnn.set_stream(handle, 0)
    for _ in range(3):
        for x, heads in ((problem.q, H_Q), (problem.k, H_KV), (problem.v, H_KV)):
            x.copy_(draw(heads))
        problem.poison()
        graph.replay()
        torch.cuda.synchronize()
        problem.check()


def test_it_runs_on_the_handles_stream(handle):
    """The kernel waits for what its stream waits for, and for nothing else."""
    problem = Problem(handle)
    problem.graph.build([cudnn.heur_mode.A])
    stream = torch.cuda.Stream()
    replacement = draw(H_Q)
    cudnn.set_stream(handle, stream.cuda_stream)
    try:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            problem.q.copy_(replacement)
        problem.graph.execute(problem.pack, None, handle)
        stream.synchronize()
    finally:
        cudnn.set_stream(handle, 0)
    problem.check()


@pytest.mark.parametrize("form", ["tensor", "name", "address", "ordered"])
def test_every_binding_form(built, handle, form):
    values = list(built.pack.values())
    g = built.graph
    if form == "tensor":
        keys = [*built.tensors, *g.nodes[0].outputs.values()]
        g.execute(dict(zip(keys, values, strict=True)), None, handle)
    elif form == "name":
        names = ["q", "k", "v", *(t.name for t in g.nodes[0].outputs.values())]
        g.execute(dict(zip(names, values, strict=True)), None, handle)
    elif form == "address":
        g.execute({k: x.data_ptr() for k, x in built.pack.items()}, None, handle)
    else:
        order = [5, 3, 1, 2, 4]
        g.execute([built.pack[u] for u in order], None, handle, tensor_uids=order)
    torch.cuda.synchronize()
    built.check()


def test_an_unaligned_address_is_an_error_naming_the_tensor(built, handle):
    with pytest.raises(ValueError, match="tensor k .*16-byte aligned"):
        built.graph.execute({**built.pack, 2: built.k.data_ptr() + 2}, None, handle)


def test_a_host_tensor_is_an_error_naming_the_tensor(built, handle):
    with pytest.raises(ValueError, match="tensor v .*bound on cpu"):
        built.graph.execute({**built.pack, 3: built.v.cpu()}, None, handle)


def test_a_replayed_plan_is_the_same_plan(built, handle):
    engine, knobs = built.graph.get_engine_and_knobs_at_index(0)
    again = Problem(handle)
    again.graph.create_execution_plan(engine, knobs)
    assert again.graph.get_plan_name_at_index(0) == built.graph.get_plan_name_at_index(0)
    again.graph.execute(again.pack, None, handle)
    torch.cuda.synchronize()
    again.check()


def test_a_serialized_plan_runs_after_loading(built, handle):
    blob = built.graph.serialize(as_bytes=True)
    loaded = cudnn_frost.Graph(handle=handle)
    loaded.deserialize(blob)
    assert loaded.selected_engine.name == ROW
    built.poison()
    loaded.execute(built.pack, None, handle)
    torch.cuda.synchronize()
    built.check()


def test_the_same_inputs_give_the_same_bits(built, handle):
    built.graph.execute(built.pack, None, handle)
    first, first_lse = built.o.clone(), built.stats.clone()
    for _ in range(20):
        built.poison()
        built.graph.execute(built.pack, None, handle)
        assert torch.equal(built.o, first) and torch.equal(built.stats, first_lse)


def _in_threads(work, count: int) -> None:
    """Run work(i) in fresh threads; the first exception is raised here."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_cold_thread_can_execute_with_addresses_alone(built, handle):
    """A thread that never touched CUDA has no current context."""
    pack = {uid: x.data_ptr() for uid, x in built.pack.items()}
    _in_threads(lambda i: built.graph.execute(pack, None, handle), 1)
    torch.cuda.synchronize()
    built.check()


def test_threads_on_streams_of_their_own_share_a_plan(built):
    problems = [Problem(None) for _ in range(8)]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        own = cudnn.create_handle()
        stream = torch.cuda.Stream()
        cudnn.set_stream(own, stream.cuda_stream)
        for _ in range(20):
            built.graph.execute(problems[i].pack, None, own)
        stream.synchronize()
        cudnn.destroy_handle(own)

    _in_threads(work, 8)
    for problem in problems:
        problem.check()


def test_the_reference_row_serves_on_the_gpu_too(built, handle):
    g = built.graph
    last = g.get_execution_plan_count() - 1
    assert g.get_plan_name_at_index(last) == "frost_sdpa_fwd_reference"
    g.execute_plan_at_index(built.pack, None, last, handle)
    torch.cuda.synchronize()
    built.check()
    built.poison()
    g.execute_plan_at_index({u: x.data_ptr() for u, x in built.pack.items()}, None, last, handle)
    torch.cuda.synchronize()
    built.check()

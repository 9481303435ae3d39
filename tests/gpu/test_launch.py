"""Prepared launches and the recognizing launch of execute, on the device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.gpu.decode_problem import BF16, CAUSAL_BR, E4M3, Decode, Form, assert_same_bits

KINDS = pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])


class Prepared:
    """A row plan of a problem, prepared, with what its launches need."""

    def __init__(self, problem: Decode, index: int) -> None:
        self.problem = problem
        self.launcher = problem.graph.prepare(index)
        self.space = self.workspace()

    def workspace(self) -> torch.Tensor:
        nbytes = max(self.launcher.workspace_bytes, 1)
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda")

    def pointers(self, **changes: torch.Tensor) -> list[int]:
        pack = {
            **self.problem.pack,
            **{self.problem.uid[name]: tensor for name, tensor in changes.items()},
        }
        return [pack[slot.uid].data_ptr() for slot in self.launcher.slots]

    def launch(self, stream: int = 0) -> None:
        self.launcher.launch(self.pointers(), self.space.data_ptr(), stream)


def problem_of(dtype: torch.dtype, handle: Any, **changes: Any) -> Decode:
    form = {"lengths": (1000, 5, 0, 700), "capacity": 2048, "sq": 3, "words": CAUSAL_BR, **changes}
    return Decode(Form(dtype, **form), handle)


@KINDS
def test_a_prepared_launch_gives_the_bits_of_execute(dtype, handle):
    problem = problem_of(dtype, handle)
    for index in problem.plans:
        wanted = problem.answer(index)
        problem.verify()
        problem.poison()
        Prepared(problem, index).launch()
        torch.cuda.synchronize()
        assert_same_bits(problem.outputs(), wanted)


@KINDS
def test_execute_gives_the_same_bits_once_its_buffers_are_recognized(dtype, handle):
    problem = problem_of(dtype, handle)
    for index in problem.plans:
        wanted = problem.answer(index)
        space = Prepared(problem, index).workspace()
        for _ in range(3):
            problem.poison()
            problem.graph.execute_plan_at_index(problem.pack, space, index, handle)
            torch.cuda.synchronize()
            assert_same_bits(problem.outputs(), wanted)


@KINDS
def test_a_captured_launch_is_replayed_with_other_lengths(dtype, handle):
    problem = problem_of(dtype, handle)
    for index in problem.plans:
        prepared = Prepared(problem, index)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            prepared.launch(stream.cuda_stream)
        for lengths in ((3, 0, 64, 0), (2048, 1, 1, 17), (0, 0, 0, 0)):
            problem.set_lengths(lengths, tuple(min(n, 3) for n in lengths), seed=sum(lengths))
            problem.poison()
            torch.cuda.synchronize()
            captured.replay()
            torch.cuda.synchronize()
            problem.verify()


@KINDS
def test_threads_share_a_plan_on_streams_of_their_own(dtype, handle):
    problem = problem_of(dtype, handle)
    prepared = Prepared(problem, problem.plans[0])
    wanted = problem.answer(problem.plans[0])
    errors: list[BaseException] = []
    results: list[dict[str, torch.Tensor]] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                outputs = {n: torch.empty_like(x) for n, x in wanted.items()}
                outputs["o"] = torch.empty_strided(
                    problem.o.shape, problem.o.stride(), dtype=problem.o.dtype, device="cuda"
                )
                space = prepared.workspace()
            for _ in range(50):
                pointers = prepared.pointers(**outputs)
                prepared.launcher.launch(pointers, space.data_ptr(), stream.cuda_stream)
            stream.synchronize()
            results.append(outputs)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(results) == 8
    for outputs in results:
        assert_same_bits(outputs, wanted)


@KINDS
def test_a_prepared_launch_neither_synchronizes_nor_allocates(dtype, handle):
    problem = problem_of(dtype, handle)
    prepared = Prepared(problem, problem.plans[0])
    pointers, space = prepared.pointers(), prepared.space.data_ptr()
    prepared.launcher.launch(pointers, space, 0)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_stats(), torch.cuda.mem_get_info()[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            prepared.launcher.launch(pointers, space, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    key = "allocation.all.allocated"
    assert torch.cuda.memory_stats()[key] == before[key]
    assert torch.cuda.mem_get_info()[0] == free

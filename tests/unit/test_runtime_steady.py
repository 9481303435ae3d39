"""A kernel plan's execute: the checks the first time, recognized buffers from then on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import tvm_ffi

from cudnn_frost.runtime import cache, plan
from cudnn_frost.runtime.buffers import Slot
from cudnn_frost.runtime.plan import WORKSPACE_ALIGNMENT, KernelPlan
from cudnn_frost.vocab import DType

from . import samples

DIM = (2, 8, 4, 64)
BYTES = 2 * 8 * 4 * 64 * 2


def slot(name: str, dtype: DType = DType.BFLOAT16, align: int = 16) -> Slot:
    return Slot(name, samples.operand(name, DIM, dtype), align)


class Counted(KernelPlan):
    """A plan that counts how often its checks in Python run."""

    checks = 0

    def _checked(self, *arguments: Any) -> None:
        object.__setattr__(self, "checks", self.checks + 1)
        super()._checked(*arguments)


class Bench:
    """A plan of Q, an absent operand, O and a workspace, whose kernel records its calls."""

    def __init__(self, dtype: DType = DType.BFLOAT16, workspace_bytes: int = 256) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.slots = slot("q", dtype), slot("o", dtype)
        q, o = self.slots
        self.plan = Counted(
            entry=tvm_ffi.convert(lambda *arguments: self.calls.append(arguments)),
            key="",
            pointers=(q, None, o, None),
            constants=(7, 0.5),
            workspace_index=3 if workspace_bytes else None,
            workspace_bytes=workspace_bytes,
        )
        self.space = torch.empty(workspace_bytes + 64, dtype=torch.uint8)

    def bound(self, **changes: Any) -> dict[int, Any]:
        made = {"q": torch.zeros(DIM).bfloat16(), "o": torch.zeros(DIM).bfloat16(), **changes}
        return {slot.uid: made[slot.path] for slot in self.slots if made[slot.path] is not None}

    def run(self, bound: dict[int, Any], space: Any = None, stream: int | None = 5) -> None:
        self.plan.execute(bound, self.space if space is None else space, stream)

    def expect(self, bound: dict[int, Any], space: Any = None, stream: int = 5) -> None:
        """The last call is the one that these arguments make."""
        q, o = (
            x if isinstance(x, int) else x.data_ptr() for x in (bound[s.uid] for s in self.slots)
        )
        space = self.space if space is None else space
        address = space if isinstance(space, int) else space.data_ptr()
        wanted = [q, 0, o, address if self.plan.workspace_bytes else 0]
        pointers, *rest = self.calls[-1]
        assert list(pointers) == wanted and rest == [7, 0.5, stream]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("workspace", [0, 256])
def test_the_checks_run_once_and_every_call_gets_its_own_addresses(workspace):
    bench = Bench(workspace_bytes=workspace)
    for stream in (5, 6, None, 0):
        bound = bench.bound()
        bench.run(bound, stream=stream)
        bench.expect(bound, stream=stream or 0)
    assert len(bench.calls) == 4 and bench.plan.checks == 1


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("flat", lambda: torch.zeros(BYTES // 2).bfloat16()),
        ("bytes", lambda: torch.zeros(BYTES, dtype=torch.uint8)),
        ("larger", lambda: torch.zeros(3, *DIM[1:]).bfloat16()),
        ("batch_1", lambda: torch.zeros(1, *DIM).bfloat16()),
    ],
)
def test_other_buffers_are_checked_again_then_recognized(bench, name, other):
    bench.run(bench.bound())
    for _ in range(3):
        bound = bench.bound(q=other())
        bench.run(bound)
        bench.expect(bound)
    assert bench.plan.checks == 2


BAD = {
    "dtype": (lambda: torch.zeros(DIM).half(), "bound as torch.float16"),
    "wide": (lambda: torch.zeros(DIM), "bound as torch.float32"),
    "short": (lambda: torch.zeros(1, *DIM[1:]).bfloat16(), "4096 bytes"),
    "strides": (lambda: torch.zeros(2, 4, 8, 64).bfloat16().transpose(1, 2), "strides"),
    "expanded": (lambda: torch.zeros(1, *DIM[1:]).bfloat16().expand(DIM), "strides"),
    "aligned": (lambda: torch.zeros(BYTES // 2 + 8).bfloat16()[1:-7].view(DIM), "16-byte aligned"),
    "address": (lambda: 4104, "16-byte aligned"),
    "missing": (lambda: None, "missing a buffer for tensor uid"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_checks_refuse_is_refused_in_steady_state(bench, name):
    make, said = BAD[name]
    for _ in range(2):
        good = bench.bound()
        bench.run(good)
        calls = len(bench.calls)
        for _ in range(2):
            with pytest.raises((ValueError, KeyError), match=said):
                bench.run(bench.bound(q=make()))
        assert len(bench.calls) == calls


@pytest.mark.parametrize("wrong", ["text", object(), [1, 2], 1.5], ids=lambda x: type(x).__name__)
def test_what_is_no_buffer_is_refused_in_steady_state(bench, wrong):
    bench.run(bench.bound())
    with pytest.raises(TypeError, match="cannot bind a"):
        bench.run(bench.bound(q=wrong))
    assert len(bench.calls) == 1


def test_the_same_tensor_changed_in_place_is_checked_again(bench):
    x = torch.zeros(DIM).bfloat16()
    bench.run(bench.bound(q=x))
    x.resize_(1, *DIM[1:])
    with pytest.raises(ValueError, match="4096 bytes"):
        bench.run(bench.bound(q=x))


def test_a_workspace_is_checked_again(bench):
    bench.run(bench.bound())
    short = torch.empty(255, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace: has 255 bytes"):
        bench.run(bench.bound(), short)
    with pytest.raises(ValueError, match="workspace: missing"):
        bench.plan.execute(bench.bound(), None, 5)
    offset = WORKSPACE_ALIGNMENT // 2
    with pytest.raises(ValueError, match="workspace: address .* aligned"):
        bench.run(bench.bound(), bench.space[offset:])
    with pytest.raises(ValueError, match="workspace: address .* aligned"):
        bench.run(bench.bound(), bench.space.data_ptr() + offset)
    assert len(bench.calls) == 1


def test_addresses_are_taken(bench):
    for _ in range(3):
        bound = bench.bound(q=4096, o=8192)
        bench.run(bound, 1 << 20)
        bench.expect(bound, 1 << 20)
    assert bench.plan.checks == 1


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        (DType.HALF, torch.float16),
        (DType.FP8_E4M3, torch.float8_e4m3fn),
        (DType.FP8_E5M2, torch.float8_e5m2),
        (DType.INT32, torch.int32),
    ],
    ids=str,
)
def test_every_element_type_is_recognized(dtype, torch_dtype):
    bench = Bench(dtype)
    for _ in range(3):
        bound = bench.bound(**{n: torch.zeros(DIM).to(torch_dtype) for n in "qo"})
        bench.run(bound)
        bench.expect(bound)
    assert bench.plan.checks == 1


@pytest.mark.parametrize("kind", ["parameter", "view", "numpy"])
def test_other_kinds_of_tensors(bench, kind):
    def make() -> Any:
        x = torch.zeros(3, *DIM).bfloat16()
        if kind == "parameter":
            return torch.nn.Parameter(x[0])
        return x[1] if kind == "view" else x[0].view(torch.uint8).numpy()

    for _ in range(3):
        q, o = make(), torch.zeros(DIM).bfloat16()
        bench.run(bench.bound(q=q, o=o))
        address = q.ctypes.data if kind == "numpy" else q.data_ptr()
        assert list(bench.calls[-1][0]) == [address, 0, o.data_ptr(), bench.space.data_ptr()]


def test_without_a_launcher_every_call_is_checked(monkeypatch):
    def refuse():
        raise NotImplementedError("no compiler")

    monkeypatch.setattr(plan, "launcher", refuse)
    bench = Bench()
    for _ in range(2):
        bound = bench.bound()
        bench.run(bound)
        bench.expect(bound)
    assert bench.plan.checks == 2


def test_threads_that_bind_unequal_buffers_each_get_theirs(bench):
    errors: list[BaseException] = []
    wanted: list[tuple[int, int]] = []

    def work(index: int) -> None:
        try:
            flat = torch.zeros(BYTES // 2 + 64 * index).bfloat16()
            for _ in range(100):
                bench.run(bench.bound(q=flat), stream=index + 1)
            wanted.append((index + 1, flat.data_ptr()))
            kept.append(flat)
        except BaseException as error:
            errors.append(error)

    kept: list[torch.Tensor] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(bench.calls) == 600
    assert {(call[-1], call[0][0]) for call in bench.calls} == set(wanted)


def test_a_launcher_that_cannot_be_made_is_tried_once(tmp_path, monkeypatch):
    from cudnn_frost.runtime import launcher

    tried = []

    def refuse(path):
        tried.append(path)
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(launcher, "_built", refuse)
    launcher._found.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="Read-only"):
                launcher.launcher()
            bench = Bench()
            bench.run(bench.bound())
        assert len(tried) == 1
    finally:
        launcher._found.cache_clear()


def test_the_launcher_is_kept_and_loaded(tmp_path, monkeypatch):
    from cudnn_frost.runtime import launcher

    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    launcher._found.cache_clear()
    launcher.launcher()
    (kept,) = tmp_path.glob("*.so")
    launcher._found.cache_clear()
    monkeypatch.setenv("CXX", "false")
    assert launcher.launcher().get_function("prepare") and kept.exists()

"""The contract of prepared launches: slots, frames accepted and refused, callers in C++."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cudnn
import pytest
import tvm_ffi
from tvm_ffi import libinfo

import cudnn_frost
from cudnn_frost.analyzer.facts import Scale
from cudnn_frost.engines import ROWS
from cudnn_frost.heuristics.assemble import PlanEntry
from cudnn_frost.heuristics.propose import knobs_from_names
from cudnn_frost.runtime import cache, launcher, prepared
from cudnn_frost.runtime.build import build_plan
from cudnn_frost.runtime.plan import WORKSPACE_ALIGNMENT, ReferencePlan
from cudnn_frost.runtime.prepared import FEATURES, SCHEMA_VERSION, SLOTS, CannotPrepare, prepare
from cudnn_frost.vocab import KNOWN_TARGETS, DType

from . import samples
from .backend import declare

SM90 = KNOWN_TARGETS["sm90"]
EVERYTHING = sum(bit for bit, _ in FEATURES.values())
DECODE_KNOBS = {"STAGES": 3, "STREAM_K": 1, "TILE_M": 64, "TILE_N": 128}
# frames hold no operand of these: no kernel takes them
OUTSIDE = {"block_mask", "kv_mask", "rng_dump", "sf_o"}


def paged_facts(**changes: Any):
    """Paged decode with lengths, packed Q and O, a sink and Stats."""
    return samples.facts(
        s=(1, 256),
        packed=("q", "o"),
        paging=samples.paging(),
        seq_len_q=samples.lengths("q"),
        seq_len_kv=samples.lengths("kv"),
        sink=samples.operand("sink", (1, 8, 1, 1)),
        stats=samples.stats(s_q=1),
        **changes,
    )


def plan_of(row_name: str, facts, knobs: dict[str, int], device: int = 0):
    (row,) = (row for row in ROWS if row.name == row_name)
    entry = PlanEntry(row.engine_id, knobs_from_names(row, knobs), row)
    return build_plan(entry, facts, SM90, device)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Any, ...]]:
    """What reaches the kernel's entry."""
    found: list[tuple[Any, ...]] = []
    entry = tvm_ffi.convert(lambda *arguments: found.append(arguments))
    monkeypatch.setattr(cache, "entry_of", lambda *_: entry)
    return found


@pytest.fixture
def dense(calls):
    knobs = {"STAGES": 2, "TILE_M": 128, "TILE_N": 128}
    plan = plan_of("frost_sdpa_fwd_prefill_sm90", samples.facts(stats=samples.stats()), knobs)
    return SimpleNamespace(plan=plan, launch=prepare(plan), calls=calls)


@pytest.fixture
def paged(calls):
    plan = plan_of("frost_sdpa_fwd_decode_sm90", paged_facts(), DECODE_KNOBS)
    return SimpleNamespace(plan=plan, launch=prepare(plan), calls=calls)


def addresses(launch) -> dict[str, int]:
    return {slot.name: 4096 * (n + 1) for n, slot in enumerate(launch.slots)}


def frame(
    launch, *, version=SCHEMA_VERSION, known=EVERYTHING, space=1 << 40, size=1 << 40, **bound
):
    """A frame's arguments; every slot of the plan at an address of its own unless named."""
    given = {**addresses(launch), **{name.replace("__", "."): x for name, x in bound.items()}}
    return [version, known, *(given.get(slot) for slot in SLOTS), space, size, 0]


# ---- the schema


def test_the_header_is_current():
    path = Path(cudnn_frost.get_include()) / "cudnn_frost" / "launch.h"
    assert path.read_text() == prepared.header()


def test_every_operand_of_the_facts_has_a_slot():
    facts = paged_facts(
        attn_scale=Scale(form="device", operand=samples.operand("attn_scale")),
        **{name: samples.operand(name) for name in (*prepared._SCALES, "bias", "amax_s", "amax_o")},
        **{name: samples.stats(name=name) for name in ("score_max", "score_sum_exp")},
    )
    paths = set(facts.operands())
    assert paths <= set(SLOTS)
    never_packed_here = {name for name in SLOTS if name.endswith(".ragged_offset")} - paths
    assert set(SLOTS) == paths | never_packed_here
    bearing = {name for name, field in type(facts).model_fields.items() if "Operand" in str(field)}
    assert bearing - {*SLOTS} == OUTSIDE


def test_features_have_bits_of_their_own_and_cover_what_is_optional():
    bits = [bit for bit, _ in FEATURES.values()]
    assert (1 << len(bits)) - 1 == EVERYTHING
    covered = [slot for _, slots in FEATURES.values() for slot in slots]
    assert sorted([*covered, "q", "k", "v", "o", "stats"]) == sorted(SLOTS)


def test_slots_describe_the_plan(dense, paged):
    assert [slot.name for slot in dense.launch.slots] == ["q", "k", "v", "o", "stats"]
    q, *_, stats = dense.launch.slots
    facts = samples.facts()
    assert (q.uid, q.label, q.dtype, q.alignment) == (facts.q.uid, "q", DType.BFLOAT16, 16)
    assert q.nbytes == 2 * 8 * 256 * 128 * 2 and stats.nbytes == 2 * 8 * 256 * 4
    assert (stats.dtype, stats.alignment) == (DType.FLOAT, 4)
    assert dense.launch.features == 0 and dense.launch.workspace_bytes == 0
    names = [slot.name for slot in paged.launch.slots]
    assert names == [slot for slot in SLOTS if slot in names]
    assert {"paging.k_table", "sink", "q.ragged_offset", "seq_len_kv"} < set(names)
    wanted = ("lengths", "ragged", "paged_kv", "sink")
    assert paged.launch.features == sum(FEATURES[name][0] for name in wanted)
    assert paged.launch.workspace_bytes == paged.plan.workspace_bytes > 0
    packed = next(slot for slot in paged.launch.slots if slot.name == "q")
    assert packed.nbytes == 0
    assert paged.launch.key == paged.plan.key


def test_it_is_immutable(dense):
    with pytest.raises(FrozenInstanceError):
        dense.launch.device = 1


# ---- frames that are taken


def kernel_pointers(plan, bound: dict[str, int], workspace: int) -> list[int]:
    expected = [bound[slot.path] if slot else 0 for slot in plan.pointers]
    if plan.workspace_index is not None:
        expected[plan.workspace_index] = workspace
    return expected


@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("way", ["frame", "launch", "pointers"])
def test_the_entry_gets_what_execute_gives_it(kind, way, request):
    case = request.getfixturevalue(kind)
    bound, space = addresses(case.launch), 1 << 40
    if way == "frame":
        arguments = frame(case.launch)
        arguments[-1] = 77
        case.launch.frame(*arguments)
    elif way == "launch":
        case.launch.launch([bound[slot.name] for slot in case.launch.slots], space, 77)
    else:
        void = {name: ctypes.c_void_p(address) for name, address in bound.items()}
        arguments = frame(case.launch, **{n.replace(".", "__"): p for n, p in void.items()})
        arguments[-3], arguments[-1] = ctypes.c_void_p(space), ctypes.c_void_p(77)
        case.launch.frame(*arguments)
    by_uid = {slot.uid: bound[slot.name] for slot in case.launch.slots}
    case.plan.execute(by_uid, space, 77)
    prepared_call, executed = case.calls
    assert list(prepared_call[0]) == kernel_pointers(case.plan, bound, space)
    assert [repr(x) for x in prepared_call] == [repr(x) for x in executed]
    assert prepared_call[-1] == 77


def test_a_caller_that_knows_more_features_is_served(dense):
    dense.launch.frame(*frame(dense.launch, known=(1 << 62) - 1))
    assert len(dense.calls) == 1


def test_a_caller_that_knows_exactly_the_plans_features_is_served(paged):
    paged.launch.frame(*frame(paged.launch, known=paged.launch.features))
    assert len(paged.calls) == 1


def test_exactly_the_workspace_is_enough(paged):
    size = paged.launch.workspace_bytes
    paged.launch.frame(*frame(paged.launch, size=size))
    assert len(paged.calls) == 1


def test_a_plan_without_workspace_takes_none(dense):
    dense.launch.frame(*frame(dense.launch, space=None, size=0))
    dense.launch.launch([4096] * 5)
    assert len(dense.calls) == 2


def test_neutral_slots_are_null_or_zero(dense):
    dense.launch.frame(*frame(dense.launch, sink=None, bias=0, seq_len_q=ctypes.c_void_p()))
    assert len(dense.calls) == 1


def test_an_error_of_the_kernel_reaches_the_caller(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(cache, "entry_of", lambda *_: tvm_ffi.convert(refuse))
    knobs = {"STAGES": 2, "TILE_M": 128, "TILE_N": 128}
    launch = prepare(plan_of("frost_sdpa_fwd_prefill_sm90", samples.facts(), knobs))
    with pytest.raises(RuntimeError, match="no kernel image"):
        launch.launch([4096] * 4)


# ---- frames that are refused, before anything is launched


def refused(case, arguments, said: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=said):
        case.launch.frame(*arguments)
    assert not case.calls


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -1, 1 << 40])
def test_other_versions(dense, version):
    refused(dense, frame(dense.launch, version=version), rf"schema version.*got {version}")


@pytest.mark.parametrize("version", [None, 1.0, "1", ctypes.c_void_p(1)])
def test_a_version_that_is_no_integer(dense, version):
    refused(dense, frame(dense.launch, version=version), "schema version", TypeError)


def test_an_empty_frame(dense):
    refused(dense, [], "schema version")


@pytest.mark.parametrize("count", [1, 2, len(SLOTS), len(SLOTS) + 4, len(SLOTS) + 6])
def test_other_counts(dense, count):
    arguments = [*frame(dense.launch), 0, 0][:count]
    refused(dense, arguments, rf"has {len(SLOTS) + 5} arguments, got {count}", TypeError)


@pytest.mark.parametrize("name", ["lengths", "ragged", "paged_kv", "sink"])
def test_a_feature_the_caller_does_not_know(paged, name):
    bit = FEATURES[name][0]
    refused(paged, frame(paged.launch, known=EVERYTHING & ~bit), rf"features {bit} that")


def test_features_that_are_no_integer(paged):
    refused(paged, frame(paged.launch, known="all"), "known features", TypeError)


@pytest.mark.parametrize("name", ["q", "o", "stats", "paging.v_table", "seq_len_kv", "sink"])
def test_an_operand_that_is_null(paged, name):
    arguments = frame(paged.launch, **{name.replace(".", "__"): None})
    refused(paged, arguments, rf"tensor {name}.*is null")


@pytest.mark.parametrize(
    "name", [slot for slot in SLOTS if slot not in ("q", "k", "v", "o", "stats")]
)
def test_an_operand_of_another_plan(dense, name):
    refused(
        dense,
        frame(dense.launch, **{name.replace(".", "__"): 4096}),
        rf"slot {name}: is no operand",
    )


@pytest.mark.parametrize(("name", "off"), [("q", 8), ("o", 2), ("stats", 2), ("sink", 1)])
def test_a_misaligned_operand(paged, name, off):
    refused(paged, frame(paged.launch, **{name: 4096 + off}), rf"tensor {name}.*-byte aligned")


@pytest.mark.parametrize("wrong", [1.5, "q", [1, 2]])
def test_an_operand_that_is_no_address(dense, wrong):
    refused(dense, frame(dense.launch, q=wrong), "tensor q.*expected an address", TypeError)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": None}, "workspace: is null"),
        ({"size": 0}, "workspace: has 0 bytes"),
        ({"size": -1}, "workspace: has -1 bytes"),
        ({"space": (1 << 40) + WORKSPACE_ALIGNMENT // 2}, "workspace: address .*aligned"),
    ],
)
def test_a_workspace_that_does_not_serve(paged, changes, said):
    refused(paged, frame(paged.launch, **changes), said)


def test_a_workspace_one_byte_short(paged):
    size = paged.launch.workspace_bytes - 1
    refused(paged, frame(paged.launch, size=size), f"workspace: has {size} bytes")


@pytest.mark.parametrize("place", [-1, -2, -3])
def test_a_tail_of_a_wrong_kind(paged, place):
    arguments = frame(paged.launch)
    arguments[place] = "text"
    refused(paged, arguments, "workspace|stream", TypeError)


@pytest.mark.parametrize("count", [0, 4, 6])
def test_launch_wants_an_address_per_slot(dense, count):
    with pytest.raises(ValueError, match=f"has 5 slots, got {count}"):
        dense.launch.launch([4096] * count)
    assert not dense.calls


def test_launch_names_a_null_and_a_misaligned_slot(dense):
    with pytest.raises(ValueError, match=r"tensor v.*is null"):
        dense.launch.launch([4096, 4096, 0, 4096, 4096])
    with pytest.raises(ValueError, match=r"tensor k.*not 16-byte aligned"):
        dense.launch.launch([4096, 4104, 4096, 4096, 4096])
    assert not dense.calls


_OTHER_DEVICE = """
int cuCtxGetDevice(int *device) { *device = 1; return 0; }
"""
_NO_CONTEXT = """
int cuCtxGetDevice(int *device) { return 201; }
"""
_ON_ANOTHER_DEVICE = """
import sys, tvm_ffi
from cudnn_frost.runtime import cache
from tests.unit.test_prepared import plan_of, samples, prepare
calls = []
cache.entry_of = lambda *_: tvm_ffi.convert(lambda *a: calls.append(a))
plans = [plan_of("frost_sdpa_fwd_prefill_sm90", samples.facts(),
                 {"STAGES": 2, "TILE_M": 128, "TILE_N": 128}, device) for device in (0, 1)]
for plan in plans:
    try:
        prepare(plan).launch([4096] * 4)
    except ValueError as error:
        print(error, len(calls))
"""


@pytest.mark.parametrize(
    ("driver", "current"),
    [(_OTHER_DEVICE, 1), (_NO_CONTEXT, 0)],
    ids=["device_1", "no_context"],
)
def test_another_device_is_refused_by_name(tmp_path, driver, current):
    """In a process whose driver says which device is current; without a context, the first."""
    source = tmp_path / "driver.c"
    source.write_text(driver)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _ON_ANOTHER_DEVICE],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    said = f"built for cuda:{1 - current}, the current device is cuda:{current}"
    assert done.stdout.count("built for") == 1 and said in done.stdout, done.stderr
    assert done.stdout.strip().endswith(str(1 - current))


# ---- what cannot be prepared


def test_the_reference_plan():
    with pytest.raises(CannotPrepare, match="runs in Python"):
        prepare(ReferencePlan.build(samples.facts()))


def test_an_operand_without_a_slot(dense):
    foreign = replace(dense.plan.pointers[0], path="kv_mask")
    plan = replace(dense.plan, pointers=(foreign, *dense.plan.pointers[1:]))
    with pytest.raises(CannotPrepare, match="no slot for kv_mask"):
        prepare(plan)


def test_a_graph_says_which_plan_cannot_be_prepared(played):
    played.declines = True
    graph = declare()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"reference cannot be prepared"):
        graph.prepare()


def test_a_backend_plan_cannot_be_prepared(played):
    graph = declare()
    graph.build([cudnn.heur_mode.A])
    index = next(i for i in range(3) if "eng8" in graph.get_plan_name_at_index(i))
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"eng8.*backend launches it"):
        graph.prepare(index)


@pytest.fixture
def no_launcher(monkeypatch, tmp_path):
    """An empty cache in a process that has not looked for the launcher."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "empty"))
    launcher._found.cache_clear()
    yield
    launcher._found.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "said"), [("nobody", r"needs a C\+\+ compiler"), ("false", "false .* failed")]
)
def test_without_a_compiler_the_reason_is_said(dense, no_launcher, monkeypatch, compiler, said):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NotImplementedError, match=said):
        prepare(dense.plan)


# ---- callers


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Any:
    """frames.cc, built as its users would build theirs."""
    path = tmp_path_factory.mktemp("native") / "frames.so"
    source = Path(__file__).parent / "native" / "frames.cc"
    includes = [f"-I{folder}" for folder in (cudnn_frost.get_include(), *libinfo.include_paths())]
    command = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared", *includes, "-o", path, source]
    subprocess.run(command, check=True)
    return tvm_ffi.load_module(str(path))


def _reaches(counter: ctypes.c_int64, wanted: int, seconds: float) -> bool:
    """Watches without ever giving the GIL away."""
    end = time.perf_counter() + seconds
    while counter.value < wanted and time.perf_counter() < end:
        pass
    return counter.value >= wanted


def steady(native: Any, monkeypatch, entry: Any, counter: ctypes.c_int64) -> bool:
    """Whether C++ gets through its launches while this thread holds the GIL."""
    monkeypatch.setattr(cache, "entry_of", lambda *_: entry)
    knobs = {"STAGES": 2, "TILE_M": 128, "TILE_N": 128}
    launch = prepare(plan_of("frost_sdpa_fwd_prefill_sm90", samples.facts(), knobs))
    failed = ctypes.c_int64.from_address(native.get_function("failure_address")())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        native.get_function("steady")(launch.frame, [4096] * 4, 1000)
        done = _reaches(counter, 1000, 2.0)
    finally:
        sys.setswitchinterval(interval)
    end = time.perf_counter() + 10
    while counter.value < 1000 and time.perf_counter() < end:
        time.sleep(0.01)
    assert counter.value == 1000 and failed.value == 0
    return done


def test_cpp_launches_while_a_python_thread_holds_the_gil(native, monkeypatch):
    counter = ctypes.c_int64.from_address(native.get_function("counter_address")())
    assert steady(native, monkeypatch, native.get_function("counting_entry")(), counter)


def test_a_launch_that_needed_the_gil_would_be_seen(native, monkeypatch):
    """The same with an entry in Python: the check above can fail."""
    counter = ctypes.c_int64(0)

    def count(*arguments: Any) -> None:
        counter.value += 1

    assert not steady(native, monkeypatch, tvm_ffi.convert(count), counter)


def test_cpp_finds_a_published_launch_by_name(dense):
    dense.launch.publish("cudnn_frost.test.published")
    tvm_ffi.get_global_func("cudnn_frost.test.published")(*frame(dense.launch))
    assert len(dense.calls) == 1
    with pytest.raises(ValueError, match="a global function already"):
        dense.launch.publish("cudnn_frost.test.published")
    dense.launch.publish("cudnn_frost.test.published", override=True)


def test_threads_share_one_launch(dense):
    def work() -> None:
        for _ in range(50):
            dense.launch.launch([4096] * 5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(dense.calls) == 400

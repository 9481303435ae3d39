"""One list out of the rows' plans and libcudnn's own: indices, filters, the walk, replay, blobs.

Every case compares with a plain `cudnn.pygraph` of the same declaration, planned for an H200 by
the installed libcudnn. The declaration's head dim is one that no Hopper row takes.
"""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import cudnn
import pytest
import torch

import cudnn_frost

from .backend import HK, B, D, H, S, declare

REFERENCE = "frost_sdpa_fwd_reference"
PREFILL = "frost_sdpa_fwd_prefill_sm90"
DISABLE = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
ALL = cudnn.build_plan_policy.ALL
Unsupported = cudnn.cudnnGraphNotSupportedError


def names(g: Any) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


@pytest.fixture
def plain(hopper) -> Any:
    """The backend alone, planned."""
    g = declare(cudnn.pygraph, options=hopper)
    g.create_execution_plans()
    return g


@pytest.fixture
def graph(hopper) -> Any:
    return declare(options=hopper)


@pytest.fixture
def planned(graph) -> Any:
    graph.create_execution_plans()
    return graph


def barred(g: Any) -> list[int]:
    """The plans that may not run, asked without building any."""
    found = []
    for index in range(g.get_execution_plan_count()):
        with pytest.raises((ValueError, RuntimeError)) as error:
            g.execute_plan_at_index({}, None, index)
        if "excluded" in str(error.value):
            found.append(index)
    return found


def buffers(seed: int = 0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pack = {i: torch.randn(B, h, S, D, generator=generator) for i, h in ((1, H), (2, HK), (3, HK))}
    return {
        **{i: x.bfloat16() for i, x in pack.items()},
        4: torch.full((B, H, S, D), float("nan"), dtype=torch.bfloat16),
        5: torch.full((B, H, S, 1), float("nan")),
    }


def check(pack: dict[int, torch.Tensor]) -> None:
    q, k, v = (pack[i].double() for i in (1, 2, 3))
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * 0.2
    scores.masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(pack[4].double(), scores.softmax(-1) @ v, atol=1e-2, rtol=1e-2)
    lse = scores.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(pack[5].double(), lse, atol=1e-5, rtol=1e-5)


# ---- the list


def test_the_backends_block_then_the_reference_row(plain, planned):
    assert len(names(plain)) >= 2
    assert names(planned) == [*names(plain), REFERENCE]
    assert planned.get_execution_plan_count() == len(planned.plans)
    assert planned.backend_plan_entries() == plain.backend_plan_entries()


@pytest.mark.parametrize("modes", [None, [A], [A, FALLBACK], [FALLBACK, A], [A, A]])
def test_modes_keep_the_backends_order(hopper, modes):
    listed = []
    for cls in (cudnn.pygraph, cudnn_frost.Graph):
        g = declare(cls, options=hopper)
        g.create_execution_plans(modes)
        listed.append(names(g))
    assert listed[1] == [*listed[0], REFERENCE]


def test_a_mode_in_which_the_backend_has_nothing_leaves_the_row(graph, hopper):
    with pytest.raises(Unsupported):
        declare(cudnn.pygraph, options=hopper).create_execution_plans([FALLBACK])
    graph.create_execution_plans([FALLBACK])
    assert names(graph) == [REFERENCE]
    assert "declined" in str(graph.explain())


def test_every_index_means_the_same_plan_on_both_sides(plain, planned):
    for index, name in enumerate(names(plain)):
        assert planned.get_plan_name_at_index(index) == name
        here, there = planned.plans[index], plain.plans[index]
        assert (here.engine_id, here.knobs) == (there.engine_id, there.knobs)
        for reader in ("get_engine_and_knobs_at_index", "get_behavior_notes_for_plan_at_index"):
            assert getattr(planned, reader)(index) == getattr(plain, reader)(index)
    sizes = []
    for g in (plain, planned):
        g.build_plans()
        sizes.append([g.get_workspace_size()])
        g.build_plan_at_index(1)
        sizes[-1].append(g.get_workspace_size())
        assert g.selected_engine is None
    # unequal, so that a plan taken for another shows
    assert sizes[0] == sizes[1] and sizes[0][0] > sizes[0][1] == 0


def test_names_knobs_and_ids_are_public(planned):
    for index, name in enumerate(names(planned)):
        engine, knobs = planned.get_engine_and_knobs_at_index(index)
        assert type(engine) is int
        assert all(isinstance(k, cudnn.knob_type) and type(n) is int for k, n in knobs.items())
        assert name.startswith("frost_") == (engine >= 20_000)
        assert name.startswith("frost_") != bool(re.search(r"eng\d", name))


def test_the_list_is_a_copy(planned):
    count = len(planned.plans)
    planned.plans.clear()
    assert len(planned.plans) == count


def test_the_backends_entries_can_be_read_before_planning(graph, plain):
    assert graph.backend_plan_entries() == plain.backend_plan_entries()
    graph.create_execution_plans()
    assert names(graph) == [*names(plain), REFERENCE]


def test_support_can_be_checked_before_planning(graph, plain):
    graph.check_support()
    graph.create_execution_plans()
    assert names(graph) == [*names(plain), REFERENCE]


def test_the_environment_keeps_every_row_out(monkeypatch, graph, plain):
    monkeypatch.setenv(DISABLE, "0")
    graph.create_execution_plans()
    assert names(graph) == names(plain)
    assert f"{REFERENCE}: declined" in str(graph.explain())


# ---- Hopper rows in front


def prefill(options: dict[str, Any], cls: Any = cudnn_frost.Graph) -> Any:
    g = cls(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **options,
    )
    q = g.tensor(dim=[2, 4, 256, 128], name="q", uid=1)
    k, v = (g.tensor(dim=[2, 2, 256, 128], name=n, uid=i) for n, i in (("k", 2), ("v", 3)))
    o, _ = g.sdpa(q=q, k=k, v=v, attn_scale=0.1, generate_stats=False, name="sdpa")
    o.set_output(True).set_uid(4)
    return g


@pytest.fixture
def hopper_first(hopper, monkeypatch) -> Any:
    """A planned graph with a Hopper row's plan in front, and the backend's names."""
    monkeypatch.setenv("CUDNN_FROST_UNQUALIFIED", "1")
    g = prefill(hopper)
    g.create_execution_plans()
    alone = prefill(hopper, cudnn.pygraph)
    alone.create_execution_plans()
    return g, names(alone)


def test_a_graph_plans_for_the_device_it_names(hopper, monkeypatch):
    """`sm_version` is major * 10 + minor, as the frontend reads it."""
    assert hopper["sm_version"] == 90
    monkeypatch.setenv("CUDNN_FROST_UNQUALIFIED", "1")
    g = prefill(hopper)
    assert g.explain().target.cc == (9, 0)
    g.create_execution_plans()
    assert names(g)[0].startswith(f"{PREFILL}[")


def test_rows_lead_and_the_reference_row_ends(hopper_first):
    g, backend = hopper_first
    listed = names(g)
    ours = [n for n in listed if n.startswith("frost_") and n != REFERENCE]
    assert ours[0].startswith(f"{PREFILL}[") and listed == [*ours, *backend, REFERENCE]
    for index, name in enumerate(ours):
        _, knobs = g.get_engine_and_knobs_at_index(index)
        said = ", ".join(f"{k.name}={knobs[k]}" for k in sorted(knobs, key=lambda k: k.name))
        assert name == f"{name.partition('[')[0]}[{said}]"


def test_barring_a_backend_plan_bars_that_one_behind_rows(hopper_first):
    g, backend = hopper_first
    first = names(g).index(backend[0])
    g.deselect_engines([backend[0]])
    with pytest.raises(ValueError, match=re.escape(backend[0])):
        g.build_plan_at_index(first)
    g.build_plan_at_index(first + 1)
    assert g.selected_engine is None


def test_deselecting_the_rows_leaves_the_backend(hopper_first):
    g, backend = hopper_first
    g.deselect_engines(["frost_"])
    g.build_plans()
    assert g.selected_engine is None
    index = names(g).index(backend[0])
    assert g.get_workspace_size() == g.get_workspace_size_plan_at_index(index)
    with pytest.raises(ValueError, match="excluded"):
        g.build_plan_at_index(0)


def test_a_hopper_plan_is_replayed_from_its_record(hopper_first, hopper):
    g, _ = hopper_first
    record = g.get_engine_and_knobs_at_index(0)
    fresh = prefill(hopper)
    fresh._target = g._target
    assert fresh.create_execution_plan(*record) is fresh
    assert names(fresh) == names(g)[:1]
    assert fresh.get_engine_and_knobs_at_index(0) == record


# ---- filters and the walk


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("method", "argument", "barring"),
    [
        ("deselect_engines", ["eng"], [0, 1]),
        ("deselect_engines", ["eng9"], [0]),
        ("deselect_engines", ["k40=2", REFERENCE], [1, 2]),
        ("deselect_engines", ["sdpa_fwd"], [2]),
        ("deselect_engines", ["nobody"], []),
        ("deselect_engines", [], []),
        ("deselect_behavior_notes", [cudnn.behavior_note.RUNTIME_COMPILATION], [0, 1]),
        ("select_behavior_notes", [cudnn.behavior_note.RUNTIME_COMPILATION], [2]),
        ("select_behavior_notes", [], []),
        ("select_numeric_notes", [cudnn.numerical_note.TENSOR_CORE], [2]),
    ],
)
def test_filters_act_on_both_sides(graph, before, method, argument, barring):
    if before:
        assert getattr(graph, method)(argument) is graph
    graph.create_execution_plans()
    listed = names(graph)
    if not before:
        assert getattr(graph, method)(argument) is graph
    graph.check_support()
    assert barred(graph) == barring
    assert names(graph) == listed and listed[-1] == REFERENCE


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("deselect_engines", ["eng"]),
        ("deselect_behavior_notes", [cudnn.behavior_note.RUNTIME_COMPILATION]),
        ("deselect_numeric_notes", [cudnn.numerical_note.TENSOR_CORE]),
    ],
)
def test_the_walk_ends_at_the_row_that_is_left(graph, before, method, argument):
    if before:
        getattr(graph, method)(argument)
    graph.create_execution_plans()
    if not before:
        getattr(graph, method)(argument)
    graph.build_plans()
    assert graph.selected_engine.name == REFERENCE


def test_cumulative_filters(planned):
    planned.deselect_engines(["eng9"]).deselect_engines(["eng8"])
    assert barred(planned) == [0, 1]


@pytest.mark.parametrize("before", [True, False])
def test_a_workspace_limit_bars_what_needs_more(graph, before):
    if before:
        graph.deselect_workspace_greater_than(0)
    graph.create_execution_plans()
    if not before:
        graph.deselect_workspace_greater_than(0)
    graph.build_plans()
    assert graph.get_workspace_size() == 0 and graph.selected_engine is None


def test_filters_that_leave_nothing_say_so(planned):
    planned.deselect_engines(["eng"])
    planned.deselect_engines([REFERENCE])
    with pytest.raises(Unsupported, match="no plan in the list could be built"):
        planned.build_plans()
    with pytest.raises(Unsupported, match="no plan in the list could be built"):
        planned.execute(buffers())


def test_barring_the_built_plan_alone_unbuilds_it(planned):
    planned.build_plans()
    size = planned.get_workspace_size()
    planned.deselect_engines([REFERENCE])
    assert planned.get_workspace_size() == size
    planned.deselect_engines([names(planned)[0]])
    with pytest.raises(RuntimeError, match=r"build\(\)"):
        planned.get_workspace_size()
    planned.build_plans()
    assert planned.get_workspace_size() != size and planned.selected_engine is None


def test_barring_the_built_reference_row_unbuilds_it(planned):
    planned.select_plan(2).build_plans()
    planned.deselect_engines(["reference"])
    with pytest.raises(RuntimeError, match=r"build\(\)"):
        planned.get_workspace_size()
    with pytest.raises(ValueError, match="pinned"):
        planned.build_plans()


def test_a_pin_unbuilds_and_is_strict(planned):
    planned.build_plan_at_index(2)
    assert planned.select_plan(1) is planned
    with pytest.raises(RuntimeError, match=r"build\(\)"):
        planned.get_workspace_size()
    planned.build_plans()
    assert planned.selected_engine is None
    planned.deselect_engines(["eng8"])
    for _ in range(2):
        with pytest.raises(ValueError, match="pinned"):
            planned.build_plans()
    planned.select_plan(2).build_plans()
    assert planned.selected_engine.name == REFERENCE


def test_build_all_keeps_the_selected_plan(planned):
    planned.build_plans(ALL)
    kept = planned.get_workspace_size()
    assert planned.selected_engine is None
    assert [planned.get_workspace_size_plan_at_index(i) for i in range(3)] == [kept, 0, 0]


def test_build_all_passes_over_barred_plans(planned):
    planned.deselect_engines(["eng9"])
    planned.select_plan(2).build_plans(policy=ALL)
    assert planned.selected_engine.name == REFERENCE
    assert planned.get_workspace_size_plan_at_index(1) == 0
    with pytest.raises(ValueError, match="excluded"):
        planned.get_workspace_size_plan_at_index(0)


def test_building_needs_no_planning_and_never_plans_twice(graph):
    graph.deselect_engines(["eng"])
    graph.build_plans()
    listed = names(graph)
    graph.build([FALLBACK])
    graph.build()
    assert names(graph) == listed and len(listed) == 3


# ---- execution


def test_the_selected_plan_is_the_one_that_runs(planned):
    planned.build_plans()
    pack, space = buffers(), torch.zeros(planned.get_workspace_size(), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{space.numel()}-byte workspace"):
        planned.execute(pack)
    # libcudnn has no device to launch on
    with pytest.raises(RuntimeError, match="handle"):
        planned.execute(pack, space)
    assert pack[4].isnan().all()
    planned.execute_plan_at_index(pack, None, 2)
    check(pack)
    assert planned.selected_engine is None and planned.get_workspace_size() == space.numel()
    planned.select_plan(2)
    pack = buffers(1)
    planned.execute(pack)
    check(pack)


def test_execution_builds_an_unplanned_graph(graph):
    graph.deselect_engines(["eng"])
    pack = buffers()
    graph.execute(pack)
    check(pack)
    assert graph.selected_engine.name == REFERENCE


def test_a_barred_plan_does_not_run(planned):
    planned.deselect_engines(["frost"])
    pack = buffers()
    with pytest.raises(ValueError, match="excluded"):
        planned.execute_plan_at_index(pack, None, 2)
    assert pack[4].isnan().all()


# ---- replay and persistence


def test_every_plan_of_the_list_is_replayed(planned, hopper):
    for index, name in enumerate(names(planned)):
        fresh = declare(options=hopper)
        record = planned.get_engine_and_knobs_at_index(index)
        assert fresh.create_execution_plan(*record) is fresh
        assert names(fresh) == [name] and fresh.get_engine_and_knobs_at_index(0) == record
        with pytest.raises(RuntimeError, match="one-shot"):
            fresh.create_execution_plans()
    fresh.build_plans()
    assert fresh.selected_engine.name == REFERENCE


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1]])
def test_replayed_plans_of_both_sides_share_a_list(planned, hopper, order):
    fresh = declare(options=hopper)
    for index in order:
        fresh.create_execution_plan(*planned.get_engine_and_knobs_at_index(index))
    assert names(fresh) == [names(planned)[i] for i in order]
    fresh.deselect_engines(["eng8"])
    assert barred(fresh) == [order.index(1)]
    fresh.build_plan_at_index(order.index(0))
    assert fresh.get_workspace_size() > 0


def test_replay_appends_to_a_planned_list(planned):
    listed = names(planned)
    for index in (0, 2):
        planned.create_execution_plan(*planned.get_engine_and_knobs_at_index(index))
    assert names(planned) == [*listed, listed[0], listed[2]]


def test_a_replayed_plan_obeys_earlier_filters(planned, hopper):
    fresh = declare(options=hopper)
    fresh.deselect_engines([REFERENCE])
    fresh.create_execution_plan(*planned.get_engine_and_knobs_at_index(2))
    with pytest.raises(Unsupported):
        fresh.build_plans()


@pytest.mark.parametrize(
    ("engine", "error"),
    [(29_999, ValueError), (999_999, ValueError), (777, RuntimeError), (-1, RuntimeError)],
)
def test_an_id_nobody_owns_changes_nothing(graph, engine, error):
    with pytest.raises(error, match=str(engine) if error is ValueError else "engine id"):
        graph.create_execution_plan(engine, {})
    assert graph.plans == []
    graph.create_execution_plans()
    assert names(graph)[-1] == REFERENCE


def test_rows_that_are_off_are_not_replayed(planned, hopper, monkeypatch):
    record = planned.get_engine_and_knobs_at_index(2)
    monkeypatch.setenv(DISABLE, "0")
    fresh = declare(options=hopper)
    with pytest.raises(Unsupported, match=DISABLE):
        fresh.create_execution_plan(*record)


def test_a_backend_plan_is_serialized_as_the_backends(planned, hopper):
    planned.build_plan_at_index(1)
    blob = planned.serialize(as_bytes=True)
    assert list(blob) == planned.serialize()
    for cls in (cudnn.pygraph, cudnn_frost.Graph):
        loaded = cls(**hopper)
        loaded.deserialize(blob)
        assert loaded.get_workspace_size() == planned.get_workspace_size()
        assert loaded.nodes == [] and loaded.get_execution_plan_count() == 1
        assert loaded.selected_engine is None


@pytest.mark.parametrize(
    "load",
    [
        lambda g, blob: g.deserialize(blob),
        lambda g, blob: g.deserialize(list(blob)),
        lambda g, blob: g.deserialize(bytearray(blob)),
        lambda g, blob: g.deserialize(None, blob),
        lambda g, blob: g.deserialize(None, blob, enforce_precompiled=False),
        lambda g, blob: g.deserialize(pyobj=blob),
    ],
)
def test_a_row_plan_is_serialized_as_its_declaration(planned, load):
    planned.select_plan(2).build_plans()
    blob = planned.serialize(as_bytes=True)
    loaded = cudnn_frost.Graph()
    load(loaded, blob)
    assert names(loaded) == [REFERENCE] and loaded.selected_engine.name == REFERENCE
    assert loaded.get_engine_and_knobs_at_index(0) == planned.get_engine_and_knobs_at_index(2)
    pack = buffers()
    loaded.execute(pack)
    check(pack)
    assert loaded.serialize(as_bytes=True) == blob


def test_a_row_plan_is_refused_by_the_frontend_alone(planned):
    planned.select_plan(2).build_plans()
    with pytest.raises(RuntimeError):
        cudnn.pygraph().deserialize(planned.serialize(as_bytes=True))


def test_a_row_plan_is_not_loaded_where_rows_are_off(planned, monkeypatch):
    planned.select_plan(2).build_plans()
    blob = planned.serialize()
    monkeypatch.setenv(DISABLE, "0")
    loaded = cudnn_frost.Graph()
    loaded._mine = 1
    with pytest.raises(Unsupported, match=DISABLE):
        loaded.deserialize(blob)
    assert loaded.get_execution_plan_count() == 0 and loaded._mine == 1


def test_native_capture_is_refused_for_a_row_alone(planned):
    planned.select_plan(2).build_plans()
    for method in ("populate_cuda_graph", "update_cuda_graph"):
        with pytest.raises(Unsupported, match=REFERENCE):
            getattr(planned, method)(None, {}, 0, 0)
    planned.select_plan(0)
    with pytest.raises(TypeError):
        planned.populate_cuda_graph(None, {}, 0, 0)


# ---- no plan, and reasons


def test_no_plan_gives_both_sides_reasons(hopper):
    asked = {"softmax_precision": cudnn.data_type.HALF}
    said = []
    for cls in (cudnn.pygraph, cudnn_frost.Graph):
        g = declare(cls, options=hopper, **asked)
        with pytest.raises(Unsupported) as error:
            g.create_execution_plans()
        said.append(str(error.value))
        assert g.plans == [] and g.get_execution_plan_count() == 0
    assert said[1].startswith(said[0])
    ours = said[1][len(said[0]) :]
    assert REFERENCE in ours and "softmax_precision" in ours


def test_no_plan_and_rows_off_is_the_frontends_error(hopper, monkeypatch):
    monkeypatch.setenv(DISABLE, "0")
    said = []
    for cls in (cudnn.pygraph, cudnn_frost.Graph):
        with pytest.raises(Unsupported) as error:
            declare(
                cls, options=hopper, softmax_precision=cudnn.data_type.HALF
            ).create_execution_plans()
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_misspelt_argument_is_named_by_every_row(hopper):
    g = declare(options=hopper, use_casual_mask=True)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        g.create_execution_plans()
    text = str(g.explain())
    assert f"{REFERENCE}: declined" in text
    assert "use_casual_mask" in text and "use_causal_mask" in text


def test_what_the_backend_refuses_the_row_may_serve(hopper):
    """An integer scale is a cast error to libcudnn; the row reads it as a number."""
    with pytest.raises(Unsupported, match="bad_cast"):
        declare(cudnn.pygraph, options=hopper, attn_scale=1).create_execution_plans()
    g = declare(options=hopper, attn_scale=1)
    g.build()
    assert names(g) == [REFERENCE] and "bad_cast" in str(g.explain())


# ---- the object


def test_ad_hoc_attributes_and_collection(planned):
    planned._flashinfer_stats_use_log2 = True
    planned.anything = [1]
    assert planned._flashinfer_stats_use_log2 and planned.anything == [1]
    with pytest.raises(AttributeError):
        _ = planned.nothing
    g = declare()
    gone = weakref.ref(g)
    del g
    gc.collect()
    assert gone() is None


def test_a_planned_graph_is_frozen(planned):
    with pytest.raises(RuntimeError, match="frozen"):
        planned.sdpa(None, None, None)
    q = planned.find_tensor("q")
    with pytest.raises(RuntimeError):
        q.set_dim([1, 1, 1, 8])
    assert q.set_uid(1) is q
    assert planned.tensor(dim=[1, 1, 1, 1], name="late").get_name() == "late"

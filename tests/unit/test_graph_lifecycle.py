"""`Graph` from declaration to built plan: one list, stable indices, filters, pins, the walk."""

from __future__ import annotations

import inspect
import weakref

import cudnn
import pytest
import torch

import cudnn_frost
from cudnn_frost import graph as graph_module

from .backend import HK, KNOB, D, S, declare

REFERENCE = "frost_sdpa_fwd_reference"
BACKEND = ["eng8_k24=1", "eng9_k24=7", "eng1_k24=0"]


def names(g) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


def planned(**sdpa):
    g = declare(**sdpa)
    g.create_execution_plans()
    return g


def test_one_list_the_reference_row_last(played):
    g = planned()
    assert names(g) == [*BACKEND, REFERENCE]
    assert [p.engine_id for p in g.plans] == [8, 9, 1, 910_000]
    assert g.get_execution_plan_count() == 4


def test_the_modes_asked_for_are_the_modes_listed(played):
    g = declare()
    g.create_execution_plans([cudnn.heur_mode.FALLBACK])
    assert names(g) == ["eng1_k24=0", REFERENCE]


def test_planning_is_one_shot(played):
    g = planned()
    with pytest.raises(RuntimeError, match="one-shot"):
        g.create_execution_plans()


def test_before_planning(played):
    g = declare()
    assert g.get_execution_plan_count() == 0 and g.plans == []
    with pytest.raises(RuntimeError, match="create_execution_plans"):
        g.select_plan(0)
    with pytest.raises(RuntimeError, match=r"build\(\)"):
        g.get_workspace_size()


@pytest.mark.parametrize("index", [-1, 4, 100])
def test_an_index_out_of_range_is_an_index_error(played, index):
    g = planned()
    for method in (
        g.get_plan_name_at_index,
        g.select_plan,
        g.build_plan_at_index,
        g.get_engine_and_knobs_at_index,
        g.get_workspace_size_plan_at_index,
        g.get_behavior_notes_for_plan_at_index,
    ):
        with pytest.raises(IndexError, match="out of range"):
            method(index)


def test_the_walk_takes_the_first_that_builds(played):
    played.unbuildable = ("eng8",)
    g = planned()
    g.build_plans()
    assert g.backend.built == [1] and g.selected_engine is None
    assert g.get_workspace_size() == 1001


def test_the_walk_ends_at_the_reference_row(played):
    played.unbuildable = ("eng",)
    g = planned()
    g.build()
    assert g.selected_engine.name == REFERENCE and g.get_workspace_size() == 0


def test_when_nothing_builds_every_reason_is_given(played):
    played.unbuildable = ("eng",)
    g = planned()
    g.deselect_engines([REFERENCE])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError) as error:
        g.build_plans()
    for name in BACKEND:
        assert f"{name} does not build" in str(error.value)


def test_a_pin_is_strict(played):
    played.unbuildable = ("eng9",)
    g = planned()
    assert g.select_plan(1) is g
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="eng9"):
        g.build_plans()
    g.select_plan(3).build_plans()
    assert g.selected_engine.name == REFERENCE


def test_a_pin_that_is_barred_is_an_error(played):
    g = planned()
    g.select_plan(1)
    g.deselect_engines(["eng9"])
    with pytest.raises(ValueError, match="pinned.*excluded"):
        g.build_plans()


@pytest.mark.parametrize("before", [True, False])
def test_deselection_by_substring_before_or_after_planning(played, before):
    g = declare()
    if before:
        assert g.deselect_engines(["eng8", "k24=7"]) is g
    g.create_execution_plans()
    if not before:
        g.deselect_engines(["eng8"])
        g.deselect_engines(["k24=7"])
    g.build()
    # the list itself never changes
    assert names(g) == [*BACKEND, REFERENCE]
    assert g.backend.built == [2]


def test_rows_are_deselected_by_name_too(played):
    played.unbuildable = ("eng",)
    g = planned()
    g.deselect_engines(["frost_"])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        g.build()


def test_deselecting_the_built_plan_unbuilds_it(played):
    g = planned()
    g.build()
    g.deselect_engines(["eng8"])
    with pytest.raises(RuntimeError, match=r"build\(\)"):
        g.get_workspace_size()
    g.build()
    assert g.backend.built == [0, 1]


@pytest.mark.parametrize(
    "method", ["build_plan_at_index", "get_workspace_size_plan_at_index", "execute_plan_at_index"]
)
def test_a_barred_plan_cannot_be_reached_by_index(played, method):
    g = planned()
    g.deselect_engines([REFERENCE])
    arguments = ({}, None, 3) if method == "execute_plan_at_index" else (3,)
    with pytest.raises(ValueError, match="excluded"):
        getattr(g, method)(*arguments)


def test_behavior_notes_filter_both_sides(played):
    note = cudnn.behavior_note.RUNTIME_COMPILATION
    g = planned()
    g.deselect_behavior_notes([note])
    g.build()
    assert g.selected_engine.name == REFERENCE
    g = planned()
    g.select_behavior_notes([note])
    with pytest.raises(ValueError, match="excluded"):
        g.build_plan_at_index(3)
    assert g.get_behavior_notes_for_plan_at_index(3) == []
    assert g.get_behavior_notes_for_plan_at_index(0) == [note]


def test_numeric_notes_filter_the_rows(played):
    g = planned()
    g.select_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
    with pytest.raises(ValueError, match="excluded"):
        g.build_plan_at_index(3)


def test_build_all_keeps_the_selected_plan(played):
    g = planned()
    g.build_plans(cudnn.build_plan_policy.ALL)
    # every backend plan, then the kept one again so that the backend agrees
    assert g.backend.built == [0, 1, 2, 0] and g.selected_engine is None
    g = planned()
    g.select_plan(3).build_plans(policy=cudnn.build_plan_policy.ALL)
    assert g.selected_engine.name == REFERENCE


def test_build_plan_at_index_selects(played):
    g = planned()
    assert g.build_plan_at_index(3) is g
    assert g.selected_engine.name == REFERENCE
    assert g.build_plan_at_index(1).get_workspace_size() == 1001


def test_a_declining_backend_leaves_the_rows(played):
    played.declines = True
    g = declare()
    g.build([cudnn.heur_mode.A])
    assert names(g) == [REFERENCE] and g.selected_engine.name == REFERENCE
    assert "the played backend declined" in str(g.explain())


def test_no_plan_anywhere_reports_both_sides(played):
    played.declines = True
    g = declare(use_casual_mask=True)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError) as error:
        g.create_execution_plans()
    assert "the played backend declined" in str(error.value)
    assert "use_casual_mask" in str(error.value) and "use_causal_mask" in str(error.value)
    assert g.plans == [] and g.get_execution_plan_count() == 0
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        g.create_execution_plans()


def test_another_failure_of_the_backend_is_not_a_decline(played, monkeypatch):
    def fails(self, heuristics=None):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(played, "create_execution_plans", fails)
    with pytest.raises(RuntimeError, match="the device is lost"):
        declare().create_execution_plans()


def test_the_environment_keeps_every_row_out(played, monkeypatch):
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "0")
    assert names(planned()) == BACKEND


def test_a_graph_no_row_wants_is_the_backends_alone(played):
    g = planned(use_casual_mask=True)
    assert names(g) == BACKEND and g.plans == g.backend.plans


def test_a_recorded_plan_is_replayed_on_a_fresh_graph(played):
    g = planned()
    engine, knobs = g.get_engine_and_knobs_at_index(3)
    fresh = declare()
    assert fresh.create_execution_plan(engine, knobs) is fresh
    assert names(fresh) == [REFERENCE]
    with pytest.raises(RuntimeError, match="one-shot"):
        fresh.create_execution_plans()
    with pytest.raises(RuntimeError, match="(?i)frozen|mutat|plann"):
        fresh.sdpa(q=fresh.tensor(dim=[1, 1, 1, 8]), k=None, v=None)


def test_a_backend_plan_is_replayed_behind_the_rows(played):
    g = planned()
    g.create_execution_plan(8, {KNOB: 3})
    assert names(g) == [*BACKEND, REFERENCE, "eng8_again"]
    g.select_plan(4).build_plans()
    assert g.backend.built == [3]


def test_an_unknown_row_id_or_knob_is_an_error():
    with pytest.raises(ValueError, match="knob"):
        declare().create_execution_plan(910_000, {cudnn.knob_type.TILE_M: 128})
    with pytest.raises(ValueError, match="920000"):
        declare().create_execution_plan(920_000, {})


def test_a_declined_row_cannot_be_replayed(played):
    knobs = {getattr(cudnn.knob_type, k): n for k, n in (("STAGES", 2), ("TILE_M", 128))}
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="takes sm90"):
        declare().create_execution_plan(910_001, {**knobs, cudnn.knob_type.TILE_N: 128})


def test_knobs_are_public(played):
    assert planned().get_engine_and_knobs_at_index(0) == (8, {KNOB: 1})
    assert planned().get_engine_and_knobs_at_index(3) == (910_000, {})


def test_explain_before_and_after_planning(played):
    g = declare()
    before = g.explain()
    assert [name for name, _ in before.ranked] == [REFERENCE]
    g.create_execution_plans()
    after = g.explain()
    assert [name for name, _ in after.ranked] == [*BACKEND, REFERENCE]
    assert len(after.as_dict()["rows"]) == 5
    with pytest.raises(ValueError, match="sm12"):
        g.explain("sm12")
    with pytest.raises(TypeError, match="target: must be a Target or a name, got int"):
        g.explain(90)


def test_facts_are_taken_before_the_backend_plans(played, monkeypatch):
    plan = played.create_execution_plans

    def rewrites(self, heuristics=None):
        plan(self, heuristics)
        k = self.find_tensor(2)
        object.__setattr__(k, "stride", (1, 1, 1, 1))

    monkeypatch.setattr(played, "create_execution_plans", rewrites)
    g = planned()
    facts = g.explain().analysis.facts
    assert facts is not None and facts.k.stride == (HK * S * D, S * D, D, 1)


EARLY = ("check_support", "backend_plan_entries", "key", "build_operation_graph")


@pytest.mark.parametrize("method", EARLY)
def test_facts_are_taken_before_any_lowering(played, monkeypatch, method):
    def lowers(self):
        self._freeze()
        object.__setattr__(self.find_tensor(2), "stride", (1, 1, 1, 1))

    monkeypatch.setattr(played, method, lowers)
    g = declare()
    getattr(g, method)()
    declared = (HK * S * D, S * D, D, 1)
    assert g.explain().analysis.facts.k.stride == declared
    g.create_execution_plans()
    assert g.explain().analysis.facts.k.stride == declared


@pytest.mark.parametrize("query", [None, *EARLY])
def test_facts_follow_the_declaration_until_it_is_lowered(played, monkeypatch, query):
    g = declare()
    g.build_operation_graph()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="declined this graph"):
        g.create_execution_plan(910_003)
    strides = (HK * S * D, D, HK * D, 1)
    g.find_tensor(2).set_stride(list(strides))
    if query is not None:
        monkeypatch.setattr(played, query, played._freeze)
        getattr(g, query)()
    assert g.explain().analysis.facts.k.stride == strides
    g.create_execution_plans()
    assert g.explain().analysis.facts.k.stride == strides


def test_no_row_serves_what_cannot_be_read(played):
    g = declare()
    g.find_tensor(2).name = 7
    g.check_support()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="cannot be read"):
        g.create_execution_plan(910_000)
    g.create_execution_plans()
    assert names(g) == BACKEND


def test_native_capture_is_the_backends(played):
    g = planned()
    g.build_plan_at_index(3)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="capture execute"):
        g.populate_cuda_graph(None, {}, 0, 0)


def test_a_workspace_limit_declines_a_plan(played, monkeypatch):
    played.unbuildable = ("eng",)
    g = planned()
    g.deselect_workspace_greater_than(10)
    g.build()
    assert g.selected_engine.name == REFERENCE


def test_the_surface_is_the_frontends():
    ours, theirs = cudnn_frost.Graph, graph_module._BackendGraph
    public = [n for n, _ in inspect.getmembers(theirs) if not n.startswith("_")]
    assert not [n for n in public if not hasattr(ours, n)]
    assert inspect.signature(ours.__init__) == inspect.signature(theirs.__init__)
    assert "tensor_uids" in inspect.signature(ours.execute).parameters
    accepted = inspect.signature(theirs.execute).parameters
    assert list(inspect.signature(ours.execute).parameters) == list(accepted)


def test_the_selected_index_is_of_the_merged_list(played):
    g = planned()
    g.build_plan_at_index(3)
    assert g.get_plan_name_at_index(g._plan_index) == REFERENCE


def test_attributes_and_weak_references(played):
    g = planned()
    g._flashinfer_stats_use_log2 = True
    assert weakref.ref(g)() is g and g._flashinfer_stats_use_log2


def test_install_redirects_the_name_and_uninstall_undoes_it():
    original = cudnn.pygraph
    cudnn_frost.install()
    try:
        assert cudnn.pygraph is cudnn_frost.Graph
        with cudnn.graph(None) as (g, _):
            assert isinstance(g, cudnn_frost.Graph) and type(g.backend) is original
    finally:
        cudnn_frost.uninstall()
    assert cudnn.pygraph is original


def test_a_graph_of_another_kind_is_the_frontends_own():
    def script(cls):
        g = cls(
            io_data_type=cudnn.data_type.HALF,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        a = g.tensor(dim=[1, 8, 8], name="a")
        b = g.tensor(dim=[1, 8, 8], name="b")
        c = g.relu(g.matmul(a, b, name="mm"), name="act")
        c.set_output(True)
        seen = [[n.name for n in g.nodes], g.get_execution_plan_count(), g.plans]
        for step in ("validate", "build_operation_graph", "create_execution_plans", "build"):
            try:
                getattr(g, step)()
            except Exception as error:
                seen.append((step, type(error).__name__, str(error)))
        return seen

    assert script(cudnn_frost.Graph) == script(cudnn.pygraph)


def test_the_frontends_private_readers_are_as_expected():
    """What `runtime.frontend` reads has no documented name: fail here when it changed."""
    from cudnn_frost.runtime import frontend

    g = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16)
    q, k, v = (torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16) for _ in "qkv")
    g.sdpa(q=q, k=k, v=v, is_inference=True)
    bound = frontend.auto_bound(g)
    assert [t is x for t, x in zip(bound.values(), (q, k, v), strict=False)] == [True] * 3
    frontend.freeze(g)
    with pytest.raises(RuntimeError):
        g.sdpa(q=q, k=k, v=v, is_inference=True)

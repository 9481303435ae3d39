"""A graph no row wants behaves as `cudnn.pygraph`: the same scripts on both classes, compared.

Results, exception types and messages are compared step by step, over the installed libcudnn's own
plans. What is compared is never written down here, so a new frontend moves both sides at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import cudnn
import pytest
import torch

import cudnn_frost

from .backend import declare

DISABLE = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
Step = Callable[[Any], Any]


def outcome(g: Any, step: Step) -> str:
    """What a step did, as text that two graphs can share."""
    try:
        result = step(g)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "the graph" if result is g else repr(result)
    return re.sub(r'"gid": \d+', '"gid"', said)


def log(cls: Any, make: Callable[[Any], Any], *steps: Step) -> list[str]:
    g = make(cls)
    return [outcome(g, step) for step in steps]


def same(make: Callable[[Any], Any], *steps: Step) -> list[str]:
    """Run the steps on both classes, demand one log, and return it for further checks."""
    theirs, ours = log(cudnn.pygraph, make, *steps), log(cudnn_frost.Graph, make, *steps)
    assert ours == theirs
    return ours


def names(g: Any) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


def typed(cls: Any, options: dict[str, Any], io: Any = cudnn.data_type.HALF) -> Any:
    return cls(
        io_data_type=io,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **options,
    )


def matmul(options: dict[str, Any], inner: int = 64) -> Callable[[Any], Any]:
    def make(cls: Any) -> Any:
        g = typed(cls, options)
        a = g.tensor(dim=[1, 64, 64], stride=[4096, 64, 1], name="a", uid=1)
        b = g.tensor(dim=[1, inner, 64], stride=[inner * 64, 64, 1], name="b", uid=2)
        c = g.relu(g.matmul(a, b, name="mm"), name="act")
        c.set_output(True).set_uid(3)
        return g

    return make


def convolution(options: dict[str, Any]) -> Callable[[Any], Any]:
    """Its plans are precompiled: they build in no time."""

    def make(cls: Any) -> Any:
        g = typed(cls, options)
        x = g.tensor(dim=[1, 8, 8, 8], stride=[512, 1, 64, 8], name="x", uid=1)
        w = g.tensor(dim=[8, 8, 1, 1], stride=[8, 1, 8, 8], name="w", uid=2)
        y = g.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1], name="conv")
        y.set_output(True).set_uid(3)
        return g

    return make


def backward(options: dict[str, Any], **sdpa: Any) -> Callable[[Any], Any]:
    dim, stride = [2, 4, 256, 64], [4 * 256 * 64, 256 * 64, 64, 1]

    def make(cls: Any) -> Any:
        g = typed(cls, options, cudnn.data_type.BFLOAT16)
        operands = [g.tensor(dim=dim, stride=stride, name=n) for n in ("q", "k", "v", "o", "dO")]
        stats = g.tensor(
            dim=[2, 4, 256, 1],
            stride=[1024, 256, 1, 1],
            data_type=cudnn.data_type.FLOAT,
            name="stats",
        )
        asked = {"attn_scale": 0.1, "use_causal_mask": True, **sdpa}
        for gradient in g.sdpa_backward(*operands, stats, name="bwd", **asked):
            gradient.set_output(True).set_dim(dim).set_stride(stride)
        return g

    return make


def forward(options: dict[str, Any], **sdpa: Any) -> Callable[[Any], Any]:
    return lambda cls: declare(cls, options=options, **sdpa)


def empty(options: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda cls: typed(cls, options)


# ---- the whole lifecycle


LIFECYCLE: tuple[Step, ...] = (
    lambda g: (g.get_execution_plan_count(), g.plans, g.selected_engine),
    lambda g: g.get_plan_name_at_index(0),
    lambda g: g.select_plan(0),
    lambda g: g.get_workspace_size(),
    lambda g: g.serialize(),
    lambda g: g.validate(),
    lambda g: g.build_operation_graph(),
    lambda g: g.create_execution_plans([A]),
    lambda g: g.create_execution_plans([A]),
    lambda g: (names(g), g.plans, g.selected_engine, g.backend_plan_entries()),
    lambda g: [g.get_engine_and_knobs_at_index(i) for i in range(2)],
    lambda g: [g.get_behavior_notes_for_plan_at_index(i) for i in range(2)],
    lambda g: g.check_support(),
    lambda g: g.get_workspace_size(),
    lambda g: g.build_plans(),
    lambda g: (g.get_workspace_size(), g.get_behavior_notes()),
    lambda g: len(g.serialize()) == len(g.serialize(as_bytes=True)),
    lambda g: g.key(),
    lambda g: g.deselect_engines([g.get_plan_name_at_index(0)]),
    lambda g: g.get_workspace_size(),
    lambda g: g.build_plan_at_index(0),
    lambda g: g.build_plans(),
    lambda g: g.get_workspace_size(),
    lambda g: g.select_plan(0),
    lambda g: g.build_plans(),
    lambda g: g.select_plan(1),
    lambda g: g.build_plans(),
    lambda g: g.create_execution_plan(*g.get_engine_and_knobs_at_index(1)),
    lambda g: (names(g), g.plans),
    lambda g: g.tensor(dim=[1, 1, 1, 1], name="late").get_name(),
    lambda g: g.relu(g.nodes[0].inputs and next(iter(g.nodes[0].inputs.values()))),
    lambda g: repr(g),
)


KINDS = {
    "matmul": matmul,
    "convolution": convolution,
    "backward": backward,
    "rows_off": forward,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_lifecycle(hopper, monkeypatch, kind):
    make = KINDS[kind](hopper)
    if kind == "rows_off":
        monkeypatch.setenv(DISABLE, "0")
    seen = same(make, *LIFECYCLE)
    # the script reached plans, built one and serialized it
    assert seen[7] == "None" and "eng" in seen[9] and seen[14] == "None" and seen[16] == "True"


@pytest.mark.parametrize("index", [-1, 50, "x", None, 1.5])
def test_bad_indices(hopper, index):
    same(
        convolution(hopper),
        lambda g: g.create_execution_plans([A]),
        lambda g: g.get_plan_name_at_index(index),
        lambda g: g.select_plan(index),
        lambda g: g.get_engine_and_knobs_at_index(index),
        lambda g: g.get_workspace_size_plan_at_index(index),
        lambda g: g.build_plan_at_index(index),
        lambda g: g.get_behavior_notes_for_plan_at_index(index),
        lambda g: g.execute_plan_at_index({}, None, index),
    )


@pytest.mark.parametrize("heuristics", [None, [], [A], [A, A], [FALLBACK], [cudnn.heur_mode.B], 3])
def test_heuristics(hopper, heuristics):
    same(
        convolution(hopper),
        lambda g: g.create_execution_plans(heuristics),
        lambda g: (g.get_execution_plan_count(), [p.mode for p in g.plans]),
    )


FILTERS: dict[str, Step] = {
    "engines": lambda g: g.deselect_engines(["eng47"]),
    "every_engine": lambda g: g.deselect_engines(["eng"]),
    "a_string": lambda g: g.deselect_engines("eng47"),
    "workspace": lambda g: g.deselect_workspace_greater_than(0),
    "without_note": lambda g: g.deselect_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION]),
    "with_note": lambda g: g.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION]),
    "without_numeric": lambda g: g.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE]),
    "with_numeric": lambda g: g.select_numeric_notes([cudnn.numerical_note.TENSOR_CORE]),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", FILTERS)
def test_filters(hopper, name, before):
    steps = [FILTERS[name], lambda g: g.create_execution_plans([A])]
    same(
        convolution(hopper),
        *(steps if before else reversed(steps)),
        lambda g: g.check_support(),
        lambda g: g.build_plans(),
        lambda g: (names(g), g.selected_engine),
        lambda g: g.get_workspace_size(),
    )


FIRST: dict[str, Step] = {
    "validate": lambda g: g.validate(),
    "build_operation_graph": lambda g: g.build_operation_graph(),
    "create_execution_plans": lambda g: g.create_execution_plans(),
    "create_execution_plan": lambda g: g.create_execution_plan(8, {}),
    "unknown_python_id": lambda g: g.create_execution_plan(29_999, {}),
    "check_support": lambda g: g.check_support(),
    "build_plans": lambda g: g.build_plans(),
    "build": lambda g: g.build(),
    "build_all": lambda g: g.build_plans(cudnn.build_plan_policy.ALL),
    "key": lambda g: g.key(),
    "backend_plan_entries": lambda g: g.backend_plan_entries(),
    "serialize": lambda g: g.serialize(),
    "deserialize": lambda g: g.deserialize(b"zz"),
    "execute": lambda g: g.execute({}),
    "execute_plan_at_index": lambda g: g.execute_plan_at_index({}, None, 0),
    "build_plan_at_index": lambda g: g.build_plan_at_index(0),
    "get_engine_count": lambda g: g.get_engine_count(),
    "no_such_name": lambda g: g.no_such_name,
}

GRAPHS: dict[str, Callable[..., Callable[[Any], Any]]] = {
    "convolution": convolution,
    "matmul_unequal": lambda options: matmul(options, inner=32),
    "empty": empty,
    "misspelt": lambda options: forward(options, use_casual_mask=True),
    "negative_bound": lambda options: forward(
        options, diagonal_band_right_bound=-1, use_causal_mask=False
    ),
    "integer_flag": lambda options: forward(options, use_causal_mask=1),
    "backward_misspelt": lambda options: backward(options, use_casual_mask=True),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("kind", GRAPHS)
def test_any_method_may_come_first(hopper, kind, first):
    same(
        GRAPHS[kind](hopper),
        FIRST[first],
        lambda g: (g.get_execution_plan_count(), g.plans, g.selected_engine),
    )


@pytest.mark.parametrize("first", ["check_support", "backend_plan_entries", "key"])
@pytest.mark.parametrize("kind", ["convolution", "matmul", "backward"])
def test_planning_after_a_query(hopper, kind, first):
    seen = same(
        KINDS[kind](hopper),
        FIRST[first],
        lambda g: [(t.get_dim(), t.get_stride(), t.get_data_type()) for t in g.tensors.values()],
        lambda g: g.create_execution_plans([A]),
        lambda g: (names(g), g.plans),
        lambda g: g.check_support(),
    )
    assert seen[2] == "None"


UNREADABLE: dict[str, dict[str, Any]] = {
    "name": {"name": 7},
    "uid": {"uid": "one"},
    "ragged_offset": {"ragged_offset": 7},
    "stride": {"stride": ["a", "b", "c", "d"]},
    "fraction": {"dim": [2, 4, 16.5, 32]},
}


@pytest.mark.parametrize("first", ["check_support", "key", "create_execution_plans", "build"])
@pytest.mark.parametrize("what", UNREADABLE)
def test_declarations_that_cannot_be_read(hopper, what, first):
    def make(cls: Any) -> Any:
        g = typed(cls, hopper)
        arguments = {"dim": [2, 4, 16, 32], "name": "q", **UNREADABLE[what]}
        k, v = (g.tensor(dim=[2, 4, 16, 32], name=n) for n in "kv")
        o, _ = g.sdpa(q=g.tensor(**arguments), k=k, v=v, generate_stats=False, name="sdpa")
        o.set_output(True)
        return g

    same(make, FIRST[first])


# ---- execution and persistence


HALVES = torch.zeros(4096, dtype=torch.half)
EXECUTIONS: dict[str, Step] = {
    "no_pack": lambda g: g.execute(None),
    "no_buffers": lambda g: g.execute({}),
    "one_buffer": lambda g: g.execute({1: HALVES}),
    "none": lambda g: g.execute({1: None, 2: HALVES}),
    "unknown_name": lambda g: g.execute({"nobody": HALVES}),
    "integer_handle": lambda g: g.execute({1: 16, 2: 16, 3: 16}, None, 7),
    "object": lambda g: g.execute({1: object(), 2: 16, 3: 16}),
    "ordered_short": lambda g: g.execute([16], tensor_uids=[1, 2]),
    "ordered_twice": lambda g: g.execute([16, 16], tensor_uids=[1, 1]),
    "ordered_mapping": lambda g: g.execute({1: 16, 2: 16, 3: 16}, tensor_uids=[1, 2, 3]),
    "ordered_missing": lambda g: g.execute([16], tensor_uids=[1]),
    "addresses": lambda g: g.execute({1: 16, 2: 16, 3: 16}),
    "at_index": lambda g: g.execute_plan_at_index({1: 16, 2: 16, 3: 16}, None, 1),
    "overrides_apart": lambda g: g.execute({1: 16, 2: 16, 3: 16}, override_uids=[1]),
}


@pytest.mark.parametrize("form", EXECUTIONS)
def test_execution_mistakes(hopper, form):
    same(convolution(hopper), lambda g: g.build([A]), EXECUTIONS[form], lambda g: g.selected_engine)


def test_a_serialized_plan_passes_through(hopper):
    blobs = []
    for cls in (cudnn.pygraph, cudnn_frost.Graph):
        g = convolution(hopper)(cls)
        g.build([A])
        blobs.append(g.serialize(as_bytes=True))
    for blob in blobs:
        same(
            empty(hopper),
            lambda g, blob=blob: g.deserialize(blob),
            lambda g: (g.nodes, g.plans, g.get_execution_plan_count(), g.selected_engine),
            lambda g: g.get_plan_name_at_index(0),
            lambda g: g.get_workspace_size(),
            lambda g: g.execute({}),
            lambda g: g.execute({1: 16, 2: 16, 3: 16}),
            lambda g, blob=blob: g.serialize(as_bytes=True) == blob,
            lambda g: g.check_support(),
            lambda g: g.create_execution_plans(),
        )


@pytest.mark.parametrize(
    "load",
    [
        lambda g, blob: g.deserialize(list(blob)),
        lambda g, blob: g.deserialize(None, blob),
        lambda g, blob: g.deserialize(blob, blob, blob, blob),
        lambda g, blob: g.deserialize(),
        lambda g, blob: g.deserialize(blob[:50]),
    ],
)
def test_forms_of_deserialize(hopper, load):
    g = convolution(hopper)(cudnn.pygraph)
    g.build([A])
    blob = g.serialize(as_bytes=True)
    same(
        empty(hopper),
        lambda g: load(g, blob),
        lambda g: (g.get_execution_plan_count(), g.nodes),
        lambda g: g.get_workspace_size(),
    )


def test_a_recorded_plan_is_replayed(hopper):
    g = backward(hopper)(cudnn.pygraph)
    g.create_execution_plans([A])
    engine, knobs = g.get_engine_and_knobs_at_index(1)
    seen = same(
        backward(hopper),
        lambda g: g.create_execution_plan(engine, knobs),
        lambda g: (names(g), g.plans),
        lambda g: g.create_execution_plans(),
        lambda g: g.build_plans(),
        lambda g: g.get_workspace_size(),
    )
    assert seen[0] == "the graph" and seen[3] == "None"


# ---- the class and its instances


@pytest.mark.parametrize(
    "arguments",
    [
        ((), {}),
        (("name", cudnn.data_type.HALF, cudnn.data_type.FLOAT, cudnn.data_type.FLOAT), {}),
        ((), {"is_cuda_graph_replay_expected": True, "is_override_shape_enabled": True}),
        ((), {"something_new": 3}),
    ],
)
def test_constructors(arguments):
    positional, keyed = arguments
    same(
        lambda cls: cls(*positional, **keyed),
        lambda g: (g.context, g.nodes, g.tensors, g.plans, g.is_cuda_graph_replay_expected),
        lambda g: repr(g),
    )


@pytest.mark.parametrize("positional", [range(13), range(30)])
def test_too_many_arguments(positional):
    for cls in (cudnn.pygraph, cudnn_frost.Graph):
        with pytest.raises(TypeError, match="positional arguments"):
            cls(*positional)


def test_readers_of_the_declaration(hopper):
    same(
        forward(hopper),
        lambda g: (list(g.tensors), g.nodes, g.context, g.get_inputs(), g.get_outputs()),
        lambda g: g.find_tensor("q") is g.tensors["q"] and g.find_tensor(1) is g.tensors["q"],
        lambda g: g.find_tensor("nobody"),
        lambda g: setattr(g, "is_cuda_graph_replay_expected", True),
        lambda g: g.is_cuda_graph_replay_expected,
        lambda g: g.sdpa(1, 2, 3, 4),
        lambda g: g.sdpa(1, q=1),
    )


def test_what_the_lowered_graph_answers(hopper):
    same(
        forward(hopper),
        lambda g: g.create_execution_plans(),
        lambda g: g.get_engine_count(),
        lambda g: g.get_knobs_for_engine(8),
        lambda g: g.query_tensor_attributes_of_uid(1).get_dim(),
    )


def test_methods_take_the_same_arguments():
    """Callers read signatures to learn what a version can do."""
    apart = {}
    for name, member in inspect.getmembers(cudnn.pygraph):
        if name.startswith("_") or not callable(member):
            continue
        theirs = inspect.signature(member).parameters
        ours = inspect.signature(getattr(cudnn_frost.Graph, name)).parameters
        wanted = [
            p.name for p in theirs.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if [n for n in wanted if n not in ours or ours[n].default != theirs[n].default]:
            apart[name] = str(inspect.signature(getattr(cudnn_frost.Graph, name)))
    assert apart == {}

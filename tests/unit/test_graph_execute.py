"""Execution through the reference row: every binding form, bad input by name, persistence."""

from __future__ import annotations

import threading

import cudnn
import pytest
import torch

import cudnn_frost

from .backend import HK, B, D, H, PlayedBackend, S, declare

REFERENCE = "frost_sdpa_fwd_reference"


def buffers(seed: int = 0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(B, heads, S, D, generator=generator).bfloat16()

    return {
        1: draw(H),
        2: draw(HK),
        3: draw(HK),
        4: torch.full((B, H, S, D), float("nan"), dtype=torch.bfloat16),
        5: torch.full((B, H, S, 1), float("nan")),
    }


def check(pack: dict[int, torch.Tensor], causal: bool = True) -> None:
    q, k, v = (pack[i].double() for i in (1, 2, 3))
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * 0.2
    if causal:
        scores.masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(pack[4].double(), scores.softmax(-1) @ v, atol=1e-2, rtol=1e-2)
    lse = scores.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(pack[5].double(), lse, atol=1e-5, rtol=1e-5)


@pytest.fixture
def graph(played: type[PlayedBackend]) -> cudnn_frost.Graph:
    played.declines = True
    return declare()


def test_execute_builds_when_needed(graph):
    pack = buffers()
    graph.execute(pack)
    assert graph.selected_engine.name == REFERENCE
    check(pack)


@pytest.mark.parametrize("form", ["tensor", "name", "address", "ordered", "flat", "bytes", "numpy"])
def test_binding_forms(graph, form):
    pack = buffers()
    keyed: dict = dict(pack)
    if form == "tensor":
        keyed = {graph.find_tensor(uid): x for uid, x in pack.items()}
    elif form == "name":
        keyed = {graph.find_tensor(uid).name: x for uid, x in pack.items()}
    elif form == "address":
        keyed = {uid: x.data_ptr() for uid, x in pack.items()}
    elif form == "flat":
        keyed = {uid: x.view(-1) for uid, x in pack.items()}
    elif form == "bytes":
        keyed = {uid: x.view(-1).view(torch.uint8) for uid, x in pack.items()}
    elif form == "numpy":
        keyed = {**pack, 5: pack[5].numpy()}
    if form == "ordered":
        order = [4, 2, 5, 1, 3]
        graph.execute([pack[u] for u in order], tensor_uids=order)
    else:
        graph.execute({**keyed, None: pack[1], 99: pack[1]})
    check(pack)


def test_a_missing_buffer_is_named(graph):
    pack = buffers()
    del pack[3]
    with pytest.raises(ValueError, match=r"missing a buffer for tensor uid 3 \('v'\)"):
        graph.execute(pack)


@pytest.mark.parametrize(
    ("uid", "bad", "said"),
    [
        (2, torch.zeros(B, HK, S, D), "bound as torch.float32, declared BFLOAT16"),
        (3, torch.zeros(B, HK, S - 1, D, dtype=torch.bfloat16), "has 3840 bytes"),
        (1, torch.zeros(B, S, H, D, dtype=torch.bfloat16).transpose(1, 2), "bound with strides"),
        (5, torch.zeros(B, H, S, 1, dtype=torch.bfloat16), "declared FLOAT"),
    ],
)
def test_a_buffer_that_cannot_be_meant_is_named(graph, uid, bad, said):
    with pytest.raises(ValueError, match=said) as error:
        graph.execute({**buffers(), uid: bad})
    assert f"uid {uid}" in str(error.value)


def test_ordered_binding_mistakes(graph):
    pack = buffers()
    with pytest.raises(ValueError, match="names 5 tensors, 4 buffers"):
        graph.execute(list(pack.values())[:4], tensor_uids=list(pack))
    with pytest.raises(ValueError, match="Duplicate tensor uid 1"):
        graph.execute(list(pack.values()), tensor_uids=[1, 1, 3, 4, 5])
    with pytest.raises(ValueError, match="missing a buffer for tensor uid 5"):
        graph.execute(list(pack.values())[:4], tensor_uids=[1, 2, 3, 4])
    with pytest.raises(ValueError, match="not a mapping"):
        graph.execute(pack, tensor_uids=list(pack))


def test_unknown_and_ambiguous_names(graph):
    with pytest.raises(KeyError, match="nobody"):
        graph.execute({"nobody": buffers()[1]})


def test_an_ambiguous_name_is_an_error(played):
    played.declines = True
    g = cudnn_frost.Graph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    q, k, v = (g.tensor(dim=[1, 1, 8, 8], name="x") for _ in range(3))
    o, _ = g.sdpa(q=q, k=k, v=v, is_inference=True)
    o.set_output(True)
    with pytest.raises(ValueError, match="ambiguous"):
        g.execute({"x": torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)})


def test_a_plan_at_an_index_leaves_the_selection(played):
    g = declare()
    g.build()
    pack = buffers()
    g.execute_plan_at_index(pack, None, 3)
    check(pack)
    assert g.selected_engine is None
    g.execute(pack, workspace="space")
    assert g.backend.ran[-1][0] == 0 and g.backend.ran[-1][1]["workspace"] == "space"


def test_auto_bound_inputs_need_no_buffer(played):
    played.declines = True
    g = cudnn_frost.Graph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    pack = buffers()
    tensors = [g.tensor_like(pack[i]).set_is_pass_by_value(False) for i in (1, 2, 3)]
    o, stats = g.sdpa(*tensors, attn_scale=torch.tensor(0.2), generate_stats=True)
    o.set_output(True)
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    bound = {t: pack[i] for i, t in enumerate([*tensors, o, stats], 1)}
    g.execute(bound)
    check(pack, causal=False)


def test_overrides_are_honoured(graph):
    pack = buffers()
    short = S - 6
    uids = [1, 2, 3, 4, 5]
    shapes = [[B, h, short, d] for h, d in ((H, D), (HK, D), (HK, D), (H, D), (H, 1))]
    strides = [[h * S * d, S * d, d, 1] for h, d in ((H, D), (HK, D), (HK, D), (H, D), (H, 1))]
    graph.execute(pack, override_uids=uids, override_shapes=shapes, override_strides=strides)
    whole = buffers()
    graph.execute(whole)
    torch.testing.assert_close(pack[4][:, :, :short], whole[4][:, :, :short])
    assert pack[4][:, :, short:].isnan().all()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (([1], [[B, H, S, D]], []), "must name the same tensors"),
        (([77], [[B, H, S, D]], [[1, 1, 1, 1]]), "77, which is not an operand"),
        (([1], [[B, 3, S, D]], [[H * S * D, S * D, D, 1]]), "a divisor of q's 3 heads"),
    ],
)
def test_overrides_that_cannot_be_honoured_raise_before_launch(graph, overrides, said):
    uids, shapes, strides = overrides
    pack = buffers()
    with pytest.raises(ValueError, match=said):
        graph.execute(pack, override_uids=uids, override_shapes=shapes, override_strides=strides)
    assert pack[4].isnan().all()


def test_threads_share_a_graph(graph):
    graph.build()
    packs = [buffers(seed) for seed in range(8)]
    threads = [threading.Thread(target=graph.execute, args=(pack,)) for pack in packs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pack in packs:
        check(pack)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_row_plan_survives_serialization(graph, as_bytes):
    graph.build()
    blob = graph.serialize(as_bytes=as_bytes)
    assert isinstance(blob, bytes if as_bytes else list)
    loaded = cudnn_frost.Graph()
    loaded.deserialize(blob)
    assert loaded.get_execution_plan_count() == 1 and loaded.selected_engine.name == REFERENCE
    assert loaded.explain().analysis == graph.explain().analysis
    pack = buffers()
    loaded.execute(pack)
    check(pack)


def test_a_paged_fp8_plan_survives_serialization(played):
    """Every kind of operand is declared again: tables, lengths, scales, ragged offsets, sink."""
    import random

    from tests.reference import draws
    from tests.reference.compare import check as against_oracle

    played.declines = True
    done = 0
    for seed in range(12):
        case = draws.draw_case(random.Random(seed))
        built = case.build(graph_factory=cudnn_frost.Graph)
        built.graph.build()
        loaded = cudnn_frost.Graph()
        loaded.deserialize(built.graph.serialize(as_bytes=True))
        ours, theirs = loaded.explain().analysis, built.graph.explain().analysis
        assert ours.facts == theirs.facts, seed
        loaded.execute(built.buffers)
        against_oracle(built.graph, built.buffers)
        done += 1
    assert done == 12


def test_serialize_before_build_is_an_error(graph):
    graph.create_execution_plans()
    with pytest.raises(RuntimeError, match="build"):
        graph.serialize()


def test_a_backend_plan_serializes_as_the_backend_does(played):
    g = declare()
    g.build()
    assert g.serialize(as_bytes=True) == b"played"


@pytest.mark.parametrize("cut", [20, -5])
def test_a_damaged_blob_is_refused_and_changes_nothing(graph, cut):
    graph.build()
    blob = graph.serialize(as_bytes=True)
    loaded = cudnn_frost.Graph()
    before = loaded.backend
    with pytest.raises(ValueError, match="not a readable cudnn_frost plan"):
        loaded.deserialize(blob[:cut])
    assert loaded.backend is before and loaded.get_execution_plan_count() == 0


def test_a_plan_loads_into_an_empty_graph_only(graph):
    graph.build()
    with pytest.raises(RuntimeError, match="empty graph"):
        declare().deserialize(graph.serialize())


def test_a_callable_cannot_be_serialized(graph):
    graph.build()
    graph._record = graph._record.model_copy(
        update={
            "nodes": (
                graph._record.nodes[0].model_copy(update={"params": {"score_mod": object()}}),
            )
        }
    )
    with pytest.raises(ValueError, match="score_mod"):
        graph.serialize()

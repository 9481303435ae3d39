"""The frontend's dumps against live graphs: the same declaration gives the same facts.

`data/frontend_dumps.txt` holds one dump for each of `CASES`, as the frontend logs it while
lowering (CUDNN_FRONTEND_LOG_INFO=10 with CUDNN_FRONTEND_LOG_FILE set), the case's name as the
node's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudnn
import pytest

from cudnn_frost.analyzer.dumps import record_of_dump
from cudnn_frost.analyzer.extract import analyze
from cudnn_frost.analyzer.facts import SdpaFacts
from cudnn_frost.analyzer.files import read_source
from cudnn_frost.analyzer.live import record_of
from cudnn_frost.vocab import DType

DATA = Path(__file__).parent / "data"
DUMPS = DATA / "frontend_dumps.txt"
TYPE = cudnn.data_type
TL, BR = cudnn.diagonal_alignment.TOP_LEFT, cudnn.diagonal_alignment.BOTTOM_RIGHT
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
B, H, HK, S, D = 2, 4, 2, 32, 64

Keywords = dict[str, Any]


def index(g: Any, *dim: int, name: str = "", dtype: Any = TYPE.INT32) -> Any:
    return g.tensor(dim=list(dim), data_type=dtype, name=name)


def floats(g: Any, *dim: int, name: str = "", **kwargs: Any) -> Any:
    return g.tensor(dim=list(dim), data_type=TYPE.FLOAT, name=name, **kwargs)


def lengths(g: Any) -> Keywords:
    sides = ("seq_len_q", "seq_len_kv")
    return {"use_padding_mask": True, **{n: index(g, B, 1, 1, 1, name=n) for n in sides}}


def mixed_lengths(g: Any) -> Keywords:
    prefix = index(g, B + 1, name="cu", dtype=TYPE.INT64)
    rank1 = index(g, B, name="lens")
    return {"use_padding_mask": True, "seq_len_q": rank1, "cu_seq_len_kv": prefix}


def packed(g: Any) -> Keywords:
    offsets = index(g, B + 1, 1, 1, 1, name="offsets")

    def bshd(heads: int, name: str) -> Any:
        stride = [heads * D, D, heads * D, 1]
        return g.tensor(
            dim=[B, heads, S, D],
            stride=stride,
            name=name,
            ragged_offset=offsets,
            ragged_offset_multiplier=heads * D,
        )

    tensors = {"q": bshd(H, "q"), "k": bshd(HK, "k"), "v": bshd(HK, "v")}
    totals = {"max_total_seq_len_q": 60, "max_total_seq_len_kv": 61}
    return {**lengths(g), **tensors, **totals, "out_ragged": offsets}


def paged(g: Any) -> Keywords:
    sides = [f"paged_attention_{side}_table" for side in "kv"]
    pools = {n: g.tensor(dim=[64, HK, 8, D], name=n) for n in "kv"}
    tables = {n: index(g, B, 1, 4, 1, name=n) for n in sides}
    return {**lengths(g), **pools, **tables, "paged_attention_max_seq_len_kv": 30}


def philox(g: Any) -> Keywords:
    return {"dropout": (0.25, *(index(g, 1, 1, 1, 1, name=n) for n in ("seed", "offset")))}


def dropout_mask(g: Any) -> Keywords:
    return {"dropout": (g.tensor(dim=[B, H, S, S], name="m"), floats(g, 1, 1, 1, 1, name="s"))}


def row_outputs(g: Any) -> Keywords:
    return {n: floats(g, B, H, S, 1, name=n) for n in ("score_max", "score_sum_exp")}


def block_mask(g: Any) -> Keywords:
    unified = cudnn.attention_implementation.UNIFIED
    return {
        "block_mask": g.tensor(dim=[B, H, 1, 1], data_type=TYPE.UINT8, name="bits"),
        "implementation": unified,
    }


CASES: dict[str, tuple[str, Callable[[Any], Keywords]]] = {
    "plain": ("sdpa", lambda g: {}),
    "causal": ("sdpa", lambda g: {"use_causal_mask": True, "diagonal_alignment": BR}),
    "causal_bottom_right": ("sdpa", lambda g: {"use_causal_mask_bottom_right": True}),
    "window": ("sdpa", lambda g: {"sliding_window_length": 5, "use_causal_mask": True}),
    "band": (
        "sdpa",
        lambda g: {"diagonal_band_right_bound": 3, "diagonal_band_left_bound": 4},
    ),
    "right_bound": (
        "sdpa",
        lambda g: {"diagonal_band_right_bound": 3, "diagonal_alignment": BR},
    ),
    "lengths": ("sdpa", lengths),
    "mixed_lengths": ("sdpa", mixed_lengths),
    "packed": ("sdpa", packed),
    "paged": ("sdpa", paged),
    "scale": ("sdpa", lambda g: {"attn_scale": 0.125}),
    "scale_tensor": ("sdpa", lambda g: {"attn_scale": floats(g, 1, 1, 1, 1, name="scale")}),
    "scale_by_value": (
        "sdpa",
        lambda g: {"attn_scale": floats(g, 1, 1, 1, 1, name="scale", is_pass_by_value=True)},
    ),
    "bias": ("sdpa", lambda g: {"bias": floats(g, 1, H, S, S, name="bias")}),
    "alibi": ("sdpa", lambda g: {"use_alibi_mask": True, "use_causal_mask": True}),
    "philox": ("sdpa", philox),
    "dropout_mask": ("sdpa", dropout_mask),
    "sink": ("sdpa", lambda g: {"sink_token": floats(g, 1, H, 1, 1, name="sink")}),
    "row_outputs": ("sdpa", row_outputs),
    "rng_dump": ("sdpa", lambda g: {**philox(g), "rng_dump": floats(g, B, H, S, S, name="rng")}),
    "log2": ("sdpa", lambda g: {"stats_use_log2": True, "unfuse_fma": True}),
    "block_mask": ("sdpa", block_mask),
    "composite": (
        "sdpa",
        lambda g: {"implementation": cudnn.attention_implementation.COMPOSITE},
    ),
    "no_stats": ("sdpa", lambda g: {"generate_stats": False}),
    "inference": ("sdpa", lambda g: {"generate_stats": None, "is_inference": True}),
    "fp8": ("sdpa_fp8", lambda g: {"use_causal_mask": True}),
    "fp8_window": ("sdpa_fp8", lambda g: {"left_bound": 4, "right_bound": 0}),
    "fp8_paged": ("sdpa_fp8", paged),
}


def declare(case: str) -> Any:
    """The live graph of a case, its outputs real."""
    op, keywords_of = CASES[case]
    io = TYPE.BFLOAT16 if op == "sdpa" else TYPE.FP8_E4M3
    g = cudnn.pygraph(
        io_data_type=io,
        intermediate_data_type=TYPE.FLOAT,
        compute_data_type=TYPE.FLOAT,
        is_override_shape_enabled=case == "plain",
    )
    keywords: Keywords = {"generate_stats": True, **keywords_of(g)}
    for name, heads in (("q", H), ("k", HK), ("v", HK)):
        if name not in keywords:
            keywords[name] = g.tensor(dim=[B, heads, S, D], name=name)
    if op == "sdpa_fp8":
        keywords |= {name: floats(g, 1, 1, 1, 1, name=name) for name in SCALES}
    out_ragged = keywords.pop("out_ragged", None)
    o, stats, *amax = getattr(g, op)(name=case, **keywords)
    o.set_output(True)
    if stats is not None:
        stats.set_output(True).set_data_type(TYPE.FLOAT)
    if out_ragged is not None:
        o.set_ragged_offset(out_ragged).set_ragged_offset_multiplier(H * D)
    if case == "fp8":
        for tensor in amax:
            tensor.set_output(True).set_data_type(TYPE.FLOAT)
    return g


def live_facts(case: str) -> SdpaFacts:
    g = declare(case)
    facts = analyze(record_of(g, override_shape_enabled=case == "plain")).facts
    assert facts is not None
    return facts


def logged() -> dict[str, SdpaFacts]:
    found = {}
    for record in read_source(DUMPS):
        facts = analyze(record).facts
        assert facts is not None
        found[facts.name] = facts
    return found


def without_spelling(facts: SdpaFacts) -> SdpaFacts:
    """A dump holds the resolved implementation and mask, not what they were resolved from."""
    band = facts.band.model_copy(update={"spelling": ()})
    return facts.model_copy(update={"band": band, "implementation": ""})


@pytest.mark.parametrize("case", CASES)
def test_a_dump_gives_the_live_graphs_facts(case):
    live, dumped = live_facts(case), logged()[case]
    assert not live.malformations and not live.unknown_arguments
    assert without_spelling(dumped) == without_spelling(live)


def test_the_dumps_hold_what_they_are_named_after():
    """Equal facts on both sides mean nothing if both miss the feature."""
    facts = logged()
    assert facts["plain"].override_shape_enabled and not facts["fp8"].override_shape_enabled
    assert (facts["causal"].mask, facts["right_bound"].mask) == (
        "causal",
        "right_bound_bottom_right",
    )
    assert facts["packed"].ragged == ("q", "k", "v", "o")
    assert facts["packed"].max_total_seq_len_kv == 61
    assert facts["paged"].s_kv == 30 and facts["fp8_paged"].page_sizes == (8, 8)
    assert facts["mixed_lengths"].length_forms == ("seq_len", "cu_seq_len")
    forms = [facts[n].attn_scale.form for n in ("plain", "scale", "scale_tensor", "scale_by_value")]
    assert forms == ["absent", "host", "device", "pass_by_value"]
    dropouts = [facts[name].dropout for name in ("philox", "dropout_mask")]
    assert [d and d.form for d in dropouts] == ["philox", "mask"]
    for case, field in (
        ("bias", "bias"),
        ("alibi", "alibi"),
        ("sink", "sink"),
        ("row_outputs", "score_max"),
        ("row_outputs", "score_sum_exp"),
        ("rng_dump", "rng_dump"),
        ("log2", "stats_use_log2"),
        ("log2", "unfuse_fma"),
        ("block_mask", "block_mask"),
        ("fp8", "amax_s"),
        ("fp8", "amax_o"),
        ("fp8", "scale_o"),
        ("plain", "stats"),
    ):
        assert getattr(facts[case], field), case
    assert facts["no_stats"].stats is None and facts["fp8_window"].amax_o is None


def dump_of(case: str) -> dict[str, Any]:
    lines = (json.loads(line) for line in DUMPS.read_text().splitlines())
    return next(body for body in lines if body["nodes"][0]["name"] == case)


def facts_of(body: dict[str, Any]) -> SdpaFacts:
    facts = analyze(record_of_dump(body)).facts
    assert facts is not None
    return facts


def version_1(body: dict[str, Any], uids: bool) -> dict[str, Any]:
    """The same graph as version 1.0 writes it: tensors mapped by uid, or by name without uids."""
    tensors = {t["uid"]: t for t in body["tensors"]}
    offsets = {t.get("ragged_offset_uid") for t in tensors.values()}
    refs = {uid: uid if uids else t.get("name", str(uid)) for uid, t in tensors.items()}
    mapped = {
        str(refs[uid]): {
            **t,
            "uid": uid if uids else 0,
            "uid_assigned": uids,
            **({} if uids or "ragged_offset_uid" not in t else {"ragged_offset_uid": 0}),
        }
        for uid, t in tensors.items()
        if uid not in offsets
    }
    (node,) = body["nodes"]
    sides = {
        side: {port: refs[uid] for port, uid in node[side].items()}
        for side in ("inputs", "outputs")
    }
    return {**body, "json_version": "1.0", "nodes": [{**node, **sides}], "tensors": mapped}


@pytest.mark.parametrize("case", ["causal", "lengths", "paged", "fp8", "packed"])
@pytest.mark.parametrize("uids", [True, False])
def test_version_1_maps_tensors(case, uids):
    facts = facts_of(version_1(dump_of(case), uids))
    expected = logged()[case]
    assert not facts.malformations
    assert (facts.mask, facts.s_kv, facts.ragged) == (
        expected.mask,
        expected.s_kv,
        expected.ragged,
    )
    # the packed case's offsets are one tensor
    names = {name for name in facts.operands() if not name.endswith("ragged_offset")}
    assert len({facts.operands()[name].uid for name in names}) == len(names)
    assert len({facts.operands()[name].uid for name in facts.operands()}) == len(
        {x.uid for x in expected.operands().values()}
    )
    if uids:
        assert facts.operands().keys() == expected.operands().keys()
        assert facts.q == expected.q and facts.stats == expected.stats


def node_with(case: str, **attributes: Any) -> dict[str, Any]:
    body = dump_of(case)
    body["nodes"][0] |= attributes
    return body


def test_older_frontends_wrote_causal_flags():
    flags = {"causal_mask": False, "causal_mask_bottom_right": True}
    facts = facts_of(node_with("plain", tag="SDPA_FWD", **flags))
    assert facts.mask == "causal_bottom_right" and not facts.malformations
    facts = facts_of(node_with("plain", tag="SDPA_FWD", causal_mask=True, right_bound=0))
    assert facts.mask == "causal" and not facts.malformations
    facts = facts_of(node_with("plain", causal_mask=True, right_bound=2))
    assert [bad.subject for bad in facts.malformations] == ["diagonal_band_right_bound"]


def test_older_frontends_tagged_fp8_nodes_as_plain():
    assert facts_of(node_with("fp8", tag="SDPA_FWD")).op == "sdpa_fp8"
    body = node_with("fp8", tag="SDPA_FWD", is_mxfp8=True)
    assert analyze(record_of_dump(body)).ops == ("sdpa_mxfp8",)


def test_an_attribute_of_a_newer_frontend_is_named_not_missed():
    facts = facts_of(node_with("plain", score_cap="42280000"))
    assert [(u.kind, u.name) for u in facts.unknown_arguments] == [("param", "score_cap")]
    facts = facts_of(node_with("plain", tree_mask={"depth": 3}))
    assert [u.name for u in facts.unknown_arguments] == ["tree_mask"]
    assert not facts_of(node_with("plain", score_cap=None, tree=False)).unknown_arguments
    body = dump_of("plain")
    body["nodes"][0]["inputs"]["Softcap"] = body["nodes"][0]["inputs"]["Q"]
    assert [u.name for u in facts_of(body).unknown_arguments] == ["softcap"]


def test_dropout_without_a_seed_is_named_not_dropped():
    body = dump_of("philox")
    del body["nodes"][0]["inputs"]["Seed"]
    assert [bad.subject for bad in facts_of(body).malformations] == ["dropout"]


def test_a_composite_graph_dumped_after_lowering_has_its_key_turned_back():
    body = dump_of("composite")
    k = next(t for t in body["tensors"] if t["name"] == "k")
    for field in ("dim", "stride"):
        k[field][2], k[field][3] = k[field][3], k[field][2]
    assert k["stride"][2] == 1
    assert facts_of(body) == logged()["composite"]


def test_a_key_is_turned_back_in_composite_graphs_alone():
    body = node_with("composite", implementation="UNIFIED")
    k = next(t for t in body["tensors"] if t["name"] == "k")
    k["dim"][2:], k["stride"][2:] = [D, S], [1, D]
    assert "k.dim[3]" in [bad.subject for bad in facts_of(body).malformations]


def test_the_sample_dumps_are_the_graphs_they_were_taken_of():
    """Both samples were dumped after lowering, which adds a scale tensor of its own."""
    (record,) = read_source(DATA / "paged_decode.json")
    assert "attn_scale" not in record.nodes[0].inputs
    facts = analyze(record).facts
    assert facts is not None and facts.attn_scale.operand is None
    assert facts.q.dtype is DType.BFLOAT16 and not facts.malformations

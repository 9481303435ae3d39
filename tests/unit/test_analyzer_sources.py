"""Declarations out of files: this package's format, frontend dumps and logs, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import cudnn
import pytest

from cudnn_frost.analyzer.extract import analyze
from cudnn_frost.analyzer.files import SourceError, read_source
from cudnn_frost.analyzer.live import record_of
from cudnn_frost.vocab import DType

DATA = Path(__file__).parent / "data"


def facts_of(path: Path):
    (record,) = read_source(path)
    return analyze(record).facts


def test_the_paged_decode_dump():
    facts = facts_of(DATA / "paged_decode.json")
    assert facts is not None and not facts.malformations and not facts.unknown_arguments
    assert (facts.op, facts.b, facts.h_q, facts.h_k, facts.s_q, facts.s_kv) == (
        "sdpa",
        4,
        8,
        2,
        1,
        128,
    )
    assert facts.mask == "window_bottom_right" and (facts.band.left, facts.band.right) == (64, 0)
    assert facts.page_sizes == (16, 16) and facts.length_forms == ("seq_len", "seq_len")
    assert facts.attn_scale.form == "host"
    assert facts.attn_scale.value == pytest.approx(0.0884, abs=1e-6)


def test_the_ragged_prefill_dump():
    facts = facts_of(DATA / "thd_prefill.json")
    assert facts is not None and not facts.malformations and not facts.unknown_arguments
    assert facts.ragged == ("q", "k", "v", "o", "stats") and facts.sink is not None
    assert facts.q.ragged is not None and facts.q.ragged.multiplier == 1024
    assert facts.q.ragged.dtype is DType.INT32
    assert facts.length_forms == ("cu_seq_len", "cu_seq_len")
    assert (facts.max_total_seq_len_q, facts.max_total_seq_len_kv) == (777, 888)


def live_record():
    g = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    q, k, v = (g.tensor(dim=[2, 4, 32, 64], name=n) for n in "qkv")
    o, stats = g.sdpa(
        q=q, k=k, v=v, attn_scale=0.125, use_causal_mask_bottom_right=True, generate_stats=True
    )
    o.set_output(True)
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    return record_of(g)


def test_a_declaration_file_gives_the_live_graphs_facts(tmp_path):
    record = live_record()
    path = tmp_path / "graph.json"
    path.write_text(record.model_dump_json())
    assert facts_of(path) == analyze(record).facts


def test_a_list_of_declarations(tmp_path):
    body = json.loads(live_record().model_dump_json())
    path = tmp_path / "graphs.json"
    path.write_text(json.dumps([body, body]))
    assert len(read_source(path)) == 2


def test_a_log_holds_many_graphs_among_other_lines(tmp_path):
    lines = ["[cudnn_frontend] INFO: VALIDATING GRAPH"]
    for name in ("paged_decode", "thd_prefill"):
        dump = json.dumps(json.loads((DATA / f"{name}.json").read_text()), separators=(",", ":"))
        lines += [dump, "other text", '{"context": cut off', ""]
    path = tmp_path / "graphs.log"
    path.write_text("\n".join(lines))
    first, second = read_source(path)
    assert analyze(first).facts == facts_of(DATA / "paged_decode.json")
    assert analyze(second).facts == facts_of(DATA / "thd_prefill.json")


def test_other_ops_of_a_dump_are_recognised(tmp_path):
    body = json.loads((DATA / "paged_decode.json").read_text())
    body["nodes"][0]["tag"] = "SDPA_BWD"
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(body))
    (record,) = read_source(path)
    assert analyze(record).ops == ("sdpa_backward",)


def _without(*path):
    def change(body):
        inner = body
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return change


def _with(value, *path):
    def change(body):
        inner = body
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("context"), "context"),
        (_without("tensors"), "tensors"),
        (_without("nodes", 0, "tag"), "tag"),
        (_without("tensors", 0, "dim"), "dim"),
        (_with(999, "nodes", 0, "inputs", "Q"), "inputs.Q names no tensor"),
        (_with("xyz", "nodes", 0, "attn_scale_value"), "hex"),
    ],
)
def test_a_bad_dump_names_file_and_field(tmp_path, change, said):
    body = json.loads((DATA / "paged_decode.json").read_text())
    change(body)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(body))
    with pytest.raises(SourceError, match=said) as error:
        read_source(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_with([1, 2, 3], "nodes", 0, "inputs", "q", "dim", 0), "nodes.0.inputs.q.dim.0"),
        (_with("FLOAT128", "nodes", 0, "inputs", "q", "dtype"), "nodes.0.inputs.q.dtype"),
        (_with(True, "nodes", 0, "inpust"), "nodes.0.inpust"),
        (_without("nodes", 0, "op"), "nodes.0.op"),
    ],
)
def test_a_bad_declaration_names_file_and_field(tmp_path, change, field):
    body = json.loads(live_record().model_dump_json())
    change(body)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(body))
    with pytest.raises(SourceError) as error:
        read_source(path)
    assert error.value.field == field and error.value.path == str(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "neither JSON"),
        (b"{ not json", "neither JSON"),
        (b"[]", "holds no graph"),
        (b"3", "JSON object"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_unusable_files_say_so(tmp_path, content, said):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=said):
        read_source(path)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        read_source(tmp_path / "nowhere")

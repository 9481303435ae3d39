"""Nothing that can be written down makes the analyzer raise, and every bad file says where."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudnn_frost.analyzer.extract import analyze
from cudnn_frost.analyzer.facts import Analysis
from cudnn_frost.analyzer.files import SourceError, read_source
from cudnn_frost.analyzer.ports import ARGUMENTS
from cudnn_frost.analyzer.record import (
    GraphRecord,
    NodeRecord,
    OpaqueValue,
    RaggedRecord,
    TensorRecord,
)
from cudnn_frost.vocab import DType

DATA = Path(__file__).parent / "data"
DUMPS = [json.loads(line) for line in (DATA / "frontend_dumps.txt").read_text().splitlines()]

_EXTENT = st.sampled_from((0, 1, 2, 3, 4, 64, 128, -1, 1 << 40))
_GEOMETRY = st.lists(_EXTENT, max_size=5).map(tuple) | st.tuples(*[_EXTENT] * 4)
_UID = st.integers(-1, 12)
_DTYPE = st.sampled_from(list(DType))

_RAGGED = st.builds(
    RaggedRecord,
    uid=_UID,
    dtype=_DTYPE,
    dim=_GEOMETRY,
    stride=_GEOMETRY,
    multiplier=st.integers(-2, 1 << 40),
)
_TENSOR = st.builds(
    TensorRecord,
    uid=_UID,
    dtype=_DTYPE,
    dim=_GEOMETRY,
    stride=_GEOMETRY,
    virtual=st.booleans(),
    pass_by_value=st.booleans(),
    value=st.none() | st.floats(),
    ragged_offset=st.none() | _RAGGED,
    reordering=st.sampled_from(("NONE", "F8_128x4", "")),
)
_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from(("TOP_LEFT", "BOTTOM_RIGHT", "UNIFIED", "HALF", "x")),
    st.just(OpaqueValue(type_name="float32", text="0.5")),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(("type_name", "text")), st.text(max_size=3)),
)


@st.composite
def _nodes(draw: st.DrawFn) -> NodeRecord:
    """A node of either op whose ports and parameters are mostly names that the op knows."""
    op = draw(st.sampled_from(("sdpa", "sdpa_fp8")))
    known = ARGUMENTS[op]
    dropout = [f"dropout_{i}" for i in range(3)]
    inputs = st.sampled_from(sorted(known.inputs) + dropout + ["zzz", "use_causal_mask"])
    outputs = st.sampled_from([*sorted(known.returned | known.passed), "zzz"])
    params = st.sampled_from(sorted(known.params) + dropout + ["zzz", "seq_len_q"])
    kept = draw(st.sampled_from(((), "qkv")))
    square = st.builds(TensorRecord, uid=_UID, dim=st.just((2, 4, 4, 64)), dtype=_DTYPE)
    return NodeRecord(
        op=op,
        inputs={
            **draw(st.dictionaries(inputs, _TENSOR, max_size=6)),
            **{port: draw(square | _TENSOR) for port in kept},
        },
        outputs={
            **draw(st.dictionaries(outputs, _TENSOR, max_size=3)),
            **({"O": draw(square | _TENSOR)} if kept else {}),
        },
        params=draw(st.dictionaries(params, _VALUE, max_size=8)),
        compute_dtype=draw(_DTYPE),
    )


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(node=_nodes(), io=_DTYPE)
def test_any_record_is_analyzed(node, io):
    analysis = analyze(GraphRecord(nodes=(node,), io_dtype=io))
    assert (analysis.facts is None) == bool(analysis.malformations)
    back = Analysis.model_validate_json(analysis.model_dump_json())
    assert back == analysis


def _paths(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [prefix] if prefix else []
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        found += _paths(value, (*prefix, key))
    return found


_JSON = st.sampled_from((None, True, -1, 0, 3, 1 << 70, 0.5, "", "x", "7F800000", [], [1], {}))


@pytest.mark.parametrize("source", ["dump", "declaration"])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_says_where(tmp_path, source, data):
    body = copy.deepcopy(data.draw(st.sampled_from(DUMPS)))
    if source == "declaration":
        path = tmp_path / "whole.json"
        path.write_text(json.dumps(body))
        body = json.loads(read_source(path)[0].model_dump_json())
    *parents, last = data.draw(st.sampled_from(_paths(body)))
    inner = body
    for key in parents:
        inner = inner[key]
    if data.draw(st.booleans()) and isinstance(inner, dict):
        del inner[last]
    else:
        inner[last] = data.draw(_JSON)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(body))
    try:
        records = read_source(path)
    except SourceError as error:
        assert error.path == str(path) and error.why
        assert "\n" not in str(error) and str(error).startswith(f"{path}: ")
    else:
        for record in records:
            analyze(record)

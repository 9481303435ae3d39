"""The rows there are: fixed identities, who is offered when, and what an accepting row proposes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import groupby

import cudnn
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudnn_frost.analyzer.band import visible_range
from cudnn_frost.analyzer.facts import Analysis, Band
from cudnn_frost.engines import ROWS, Row, Verdict, registry, row_by_id, verdicts
from cudnn_frost.engines.registry import ENABLE_VARIABLE, UNQUALIFIED_VARIABLE
from cudnn_frost.heuristics.propose import (
    FAMILIES,
    infeasible,
    judge_and_propose,
    knob_names,
    knobs_from_names,
)
from cudnn_frost.runtime.lower import lower
from cudnn_frost.vocab import DeclineCode, DType

from . import samples
from .samples import CPU, GENEROUS, HOPPER, facts, fp8_facts

UNPROVED = {UNQUALIFIED_VARIABLE: "1"}

# append-only: a serialized plan, a tuning record and a caller's pin hold these numbers
IDS = {
    "frost_sdpa_fwd_reference": 910000,
    "frost_sdpa_fwd_prefill_sm90": 910001,
    "frost_sdpa_fwd_prefill_sm90_fp8": 910002,
    "frost_sdpa_fwd_decode_sm90": 910003,
    "frost_sdpa_fwd_decode_sm90_fp8": 910004,
}


def _analysis(declared) -> Analysis:
    return Analysis(facts=declared, ops=(declared.op,))


def _codes(verdict: Verdict) -> set[DeclineCode]:
    return {decline.code for decline in verdict.declines}


# ---- identities


def test_ids_are_fixed():
    assert {row.name: row.engine_id for row in ROWS} == IDS
    assert len(ROWS) == len(IDS)


def test_an_id_finds_its_row_and_no_other_does():
    for row in ROWS:
        assert row_by_id(row.engine_id) is row
    assert row_by_id(0) is None and row_by_id(max(IDS.values()) + 1) is None


def test_the_reference_row_is_last_and_the_only_one():
    assert [row.is_reference for row in ROWS] == [False] * (len(ROWS) - 1) + [True]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_is_described_in_words_that_exist(row):
    assert all(hasattr(cudnn.behavior_note, note) for note in row.behavior_notes)
    assert all(hasattr(cudnn.numerical_note, note) for note in row.numerical_notes)
    assert all(hasattr(cudnn.knob_type, knob) for knob in knob_names(row))
    assert row.summary and row.kernel in {"", *FAMILIES}
    assert row.kernel or not row.qualified
    assert row.capabilities.op <= {"sdpa", "sdpa_fp8"}


# ---- who is offered


def test_the_switch_keeps_every_row_out():
    answers, plans = judge_and_propose(_analysis(facts()), HOPPER, {ENABLE_VARIABLE: "0"})
    assert plans == [] and len(answers) == len(ROWS)
    for verdict in answers:
        assert verdict.declines[0].code is DeclineCode.DISABLED
        assert verdict.declines[0].subject == ENABLE_VARIABLE


@pytest.mark.parametrize("value", ["1", "", "yes"])
def test_any_other_value_of_the_switch_changes_nothing(value):
    usual = verdicts(_analysis(facts()), HOPPER, UNPROVED)
    set_ = verdicts(_analysis(facts()), HOPPER, {**UNPROVED, ENABLE_VARIABLE: value})
    assert [v.declines for v in set_] == [v.declines for v in usual]


def _row(name: str, kernel: str, qualified: bool) -> Row:
    return Row(name, 919_000, GENEROUS, kernel, qualified)


@pytest.mark.parametrize(
    ("kernel", "qualified", "environment", "codes"),
    [
        ("prefill_sm90", True, {}, set()),
        ("prefill_sm90", True, UNPROVED, set()),
        ("prefill_sm90", False, {}, {DeclineCode.UNQUALIFIED}),
        ("prefill_sm90", False, {UNQUALIFIED_VARIABLE: "0"}, {DeclineCode.UNQUALIFIED}),
        ("prefill_sm90", False, UNPROVED, set()),
        ("", False, {}, {DeclineCode.NO_KERNEL}),
        ("", False, UNPROVED, {DeclineCode.NO_KERNEL}),
        ("", False, {ENABLE_VARIABLE: "0"}, {DeclineCode.DISABLED}),
    ],
)
def test_what_is_not_proved_is_offered_on_request(
    monkeypatch, kernel, qualified, environment, codes
):
    monkeypatch.setattr(registry, "ROWS", (_row("frost_sdpa_fwd_new", kernel, qualified),))
    (verdict,) = verdicts(_analysis(facts()), HOPPER, environment)
    assert _codes(verdict) == codes
    assert all(decline.render() for decline in verdict.declines)


def test_an_unqualified_row_gives_the_graphs_reasons_too(monkeypatch):
    row = replace(_row("frost_sdpa_fwd_new", "prefill_sm90", False))
    monkeypatch.setattr(registry, "ROWS", (row,))
    (verdict,) = verdicts(_analysis(facts()), CPU, {})
    assert _codes(verdict) == {DeclineCode.UNQUALIFIED, DeclineCode.TARGET}


def test_a_shipped_row_needs_the_variable_exactly_while_unqualified():
    quiet = verdicts(_analysis(facts()), HOPPER, {})
    for verdict in quiet:
        told = DeclineCode.UNQUALIFIED in _codes(verdict)
        assert told is (bool(verdict.row.kernel) and not verdict.row.qualified)


# ---- what is proposed


@pytest.mark.parametrize("analysis", [Analysis(), Analysis(ops=("sdpa", "sdpa"))])
def test_a_graph_without_facts_gets_no_plan(analysis):
    answers, plans = judge_and_propose(analysis, HOPPER, UNPROVED)
    assert plans == [] and not any(verdict.accepted for verdict in answers)
    with pytest.raises(ValueError, match="no attention facts"):
        _ = answers[0].facts


@pytest.mark.parametrize("declared", [facts(), fp8_facts()], ids=lambda f: f.op)
@pytest.mark.parametrize("target", samples.TARGETS, ids=lambda t: t.name)
def test_the_reference_row_takes_a_plain_graph_anywhere(declared, target):
    answers, plans = judge_and_propose(_analysis(declared), target, {})
    assert answers[-1].row.is_reference and answers[-1].accepted
    assert plans[-1].row is answers[-1].row and plans[-1].name == "frost_sdpa_fwd_reference"


def test_the_prefill_row_takes_a_plain_graph_on_its_machine_only():
    for target in samples.TARGETS:
        answers, _ = judge_and_propose(_analysis(facts()), target, UNPROVED)
        accepted = {v.row.name for v in answers if v.accepted}
        assert ("frost_sdpa_fwd_prefill_sm90" in accepted) is (target is HOPPER)


_FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
_TARGETS = st.sampled_from(samples.TARGETS)


@_FUZZ
@given(samples.any_facts() | samples.plain_facts(), _TARGETS)
def test_accepting_means_having_a_feasible_plan(declared, target):
    answers, plans = judge_and_propose(_analysis(declared), target, UNPROVED)
    assert [v.row for v in answers] == list(ROWS)
    for verdict in answers:
        own = [plan for plan in plans if plan.row is verdict.row]
        assert bool(own) is verdict.accepted
        for plan in own:
            assert infeasible(verdict.row, declared, plan.knobs) is None
            assert knobs_from_names(verdict.row, dict(plan.knobs)) == plan.knobs
    blocks = [row for row, _ in groupby(plan.row for plan in plans)]
    assert len(set(blocks)) == len(blocks)
    times = [FAMILIES[row.kernel].seconds(declared, target) for row in blocks[:-1]]
    assert times == sorted(times)
    assert not any(row.is_reference for row in blocks[:-1])
    assert len({plan.identity for plan in plans}) == len(plans)


def test_a_row_without_a_feasible_configuration_declines(monkeypatch):
    """Its capabilities promise a head dimension that its kernel cannot be built for."""
    wide = replace(GENEROUS, d_shapes=((512, 512),))
    row = replace(_row("frost_sdpa_fwd_new", "prefill_sm90", True), capabilities=wide)
    monkeypatch.setattr(registry, "ROWS", (row,))
    (verdict,), plans = judge_and_propose(_analysis(facts()), HOPPER, {})
    assert plans == [] and _codes(verdict) == {DeclineCode.KERNEL_CONFIG}


# ---- the kernel is told what the graph says


def _launches(declared):
    analysis = _analysis(declared)
    for plan in judge_and_propose(analysis, HOPPER, UNPROVED)[1]:
        if not plan.is_last:
            yield lower(plan.row, declared, plan.knobs, HOPPER)


def _as_lowered(declared, launch) -> None:
    operands = declared.operands()
    slots = {slot.name: slot for slot in launch.signature.operands}
    for name, path in launch.pointers.items():
        if not path or name not in slots:
            continue
        slot, operand = slots[name], operands[path]
        # NOT_SET: chosen at launch; lengths and offsets are read as 32-bit words
        whole = operand.dtype if operand.dtype is not DType.INT64 else DType.INT32
        assert slot.dtype in (whole, DType.NOT_SET), name
        for extent, stride in zip(operand.dim[:-1], operand.stride[:-1], strict=True):
            assert extent == 1 or stride * operand.dtype.bytes % slot.alignment == 0
    assert all(path in operands for path in launch.pointers.values() if path)
    for bundle in launch.constants:
        name = type(bundle).__name__
        if name.endswith(("Extents", "Band")):
            assert all(-(1 << 31) <= value < 1 << 31 for value in bundle), name


@pytest.mark.parametrize("o_dtype", [DType.HALF, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("dtype", [DType.HALF, DType.BFLOAT16], ids=str)
def test_a_launch_reads_and_writes_the_declared_types(dtype, o_dtype):
    declared = facts(dtype=dtype, o_dtype=o_dtype, stats=samples.stats(), generate_stats=True)
    for launch in _launches(declared):
        _as_lowered(declared, launch)


@_FUZZ
@given(samples.plain_facts())
def test_a_launch_agrees_with_the_declared_operands(declared):
    for launch in _launches(declared):
        _as_lowered(declared, launch)


@pytest.mark.parametrize(
    ("paged", "s_kv", "keys"),
    [
        ({}, 256, 256),
        ({}, 100, 100),
        ({}, 4096, 256),
        ({"page_size_v": 64, "v_pages": 3}, 256, 192),
        ({"page_size_v": 64, "v_pages": 4}, 4096, 256),
    ],
    ids=["table", "declared", "beyond", "v_shorter", "v_equal"],
)
def test_a_decode_kernel_reads_no_key_that_a_table_cannot_hold(paged, s_kv, keys):
    """Whatever maximum is declared, and whichever side's table is the shorter."""
    size_v, pages_v = paged.get("page_size_v", 16), paged.get("v_pages", 16)
    k = samples.operand("k", (64, 2, 16, 128), DType.BFLOAT16)
    v = samples.operand("v", (64, 2, size_v, 128), DType.BFLOAT16)
    v_table = samples.operand("v_table", (2, 1, pages_v, 1), DType.INT32)
    tables = samples.paging(page_size_v=size_v, v_table=v_table)
    declared = facts(s=(1, s_kv), k=k, v=v, paging=tables, seq_len_kv=samples.lengths("kv"))
    assert declared.kv_capacity == keys
    (decode,) = (row for row in ROWS if row.name == "frost_sdpa_fwd_decode_sm90")
    knobs = knobs_from_names(decode, {"STAGES": 3, "STREAM_K": 1, "TILE_M": 64, "TILE_N": 128})
    extents = lower(decode, declared, knobs, HOPPER).constants[0]
    assert extents.seqlen_k == keys


def test_the_agreement_is_checked_on_real_launches():
    launches = list(_launches(facts()))
    assert launches
    wrong = facts(o_dtype=DType.FLOAT)
    with pytest.raises(AssertionError):
        _as_lowered(wrong, launches[0])


_SIDE = st.none() | st.integers(0, 20) | st.integers(0, 1 << 70)
_ROWS = st.integers(1, 12)


def _bundle(launch, ending: str):
    found = (c for c in launch.constants if type(c).__name__.endswith(ending))
    return next(found, None)


def _shown(launch, row: int, s_q: int, s_kv: int) -> range:
    """The keys that a row sees by what the kernel is told."""
    band, forms = _bundle(launch, "Band"), _bundle(launch, "Forms")
    if band is not None:
        first = max(0, row + band.left + 1) if launch.config.left_bound else 0
        end = min(s_kv, row + band.right + 1) if launch.config.right_bound else s_kv
    else:
        shift = row + (s_kv - s_q if forms.bottom_right else 0)
        first, end = max(0, shift + forms.left), min(s_kv, shift + forms.right + 1)
    return range(first, end)


@_FUZZ
@given(_ROWS, _ROWS, st.sampled_from(("TOP_LEFT", "BOTTOM_RIGHT")), _SIDE, _SIDE)
def test_a_launch_shows_each_row_the_declared_keys(s_q, s_kv, alignment, left, right):
    declared = facts(s=(s_q, s_kv), band=Band(alignment=alignment, left=left, right=right))
    for launch in _launches(declared):
        for row in range(s_q):
            seen = range(*visible_range(declared.band, row, s_q, s_kv))
            assert list(_shown(launch, row, s_q, s_kv)) == list(seen)


@pytest.mark.parametrize(
    "band",
    [
        Band(left=(1 << 31) - 1),
        Band(left=1 << 40, right=0),
        Band(right=(1 << 31) - 1),
        Band(right=1 << 40, alignment="BOTTOM_RIGHT"),
    ],
    ids=lambda band: f"{band.kind}-{band.left}-{band.right}",
)
def test_a_bound_wider_than_the_graph_does_not_overflow(band):
    """Row or column plus a bound fits Int32: callers write the largest integer for no bound."""
    launches = list(_launches(facts(band=band)))
    assert launches
    for launch in launches:
        told = _bundle(launch, "Band") or _bundle(launch, "Forms")
        reach = max(abs(told.left), abs(told.right)) + 2 * (facts().s_q + facts().s_kv)
        assert reach < 1 << 31


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"TILE_M": 128, "TILE_N": 128}, "STAGES is missing"),
        ({"TILE_M": 128, "TILE_N": 128, "STAGES": True}, "must be an int"),
        ({"TILE_M": 128, "TILE_N": 128, "STAGES": 2, "TILE_K": 1}, "has no knob TILE_K"),
    ],
)
def test_wrong_knobs_are_named(named, message):
    row = row_by_id(IDS["frost_sdpa_fwd_prefill_sm90"])
    assert row is not None
    with pytest.raises(ValueError, match=message):
        knobs_from_names(row, named)


@pytest.mark.parametrize(("stream_k", "refused"), [(0, False), (1, False), (2, True)])
def test_a_launch_knob_outside_its_values_is_named(stream_k, refused):
    row = row_by_id(IDS["frost_sdpa_fwd_decode_sm90"])
    assert row is not None
    named = {"STAGES": 3, "STREAM_K": stream_k, "TILE_M": 64, "TILE_N": 128}
    decline = infeasible(row, facts(), knobs_from_names(row, named))
    assert (decline is not None) is refused
    if decline is not None:
        assert (decline.subject, decline.got, decline.want) == ("STREAM_K", "2", "0 or 1")


def test_judging_reads_no_environment_of_its_own():
    source = inspect.getsource(registry) + inspect.getsource(judge_and_propose)
    assert "environ[" not in source and "getenv" not in source

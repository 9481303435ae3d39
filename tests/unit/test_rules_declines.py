"""The rules: every reason is found, named and given at once; every capability decides a case."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudnn_frost.analyzer.facts import (
    Analysis,
    Band,
    Dropout,
    Lengths,
    Malformation,
    Scale,
    SdpaFacts,
    UnknownArgument,
)
from cudnn_frost.engines import ROWS, Capabilities, rules
from cudnn_frost.engines.rules import graph_declines, judge
from cudnn_frost.vocab import Decline, DeclineCode, DType, Target

from . import samples
from .samples import BLACKWELL, CPU, GENEROUS, HOPPER, facts, fp8_facts, operand

Code = DeclineCode
PLAIN = facts()


@dataclass(frozen=True)
class Case:
    """A reason to decline, told apart by facts and by the capability that answers them.

    code, subject: of the one decline that `declined` gives under the narrow capability.
    declined, accepted: facts; the second differs in what the narrow capability still takes.
    field, narrow: the capability and its narrow value, None when no capability can help.
    target: the machine; elsewhere: the machine that `accepted` is judged on.
    """

    code: DeclineCode
    subject: str
    declined: SdpaFacts
    accepted: SdpaFacts = PLAIN
    field: str | None = None
    narrow: Any = None
    target: Target = HOPPER
    elsewhere: Target = HOPPER

    @property
    def capabilities(self) -> Capabilities:
        return replace(GENEROUS, **{self.field: self.narrow}) if self.field else GENEROUS

    def __str__(self) -> str:
        return f"{self.code}-{self.field}-{self.subject}"


def _set(*values: Any) -> frozenset[Any]:
    return frozenset(values)


def feature(code: DeclineCode, name: str, value: Any = None, base: Any = facts) -> Case:
    """A feature is an operand or True, and a capability of the same name takes it or not."""
    given_ = operand(name) if value is None else value
    return Case(code, name, base(**{name: given_}), base(), name, False)


_LEFT = Band(left=64, right=0, spelling=("sliding_window_length", "use_causal_mask"))
_CAUSAL_BR = Band(right=0, alignment="BOTTOM_RIGHT")
_OLD = replace(HOPPER, versions={**samples.VERSIONS, "torch": "2.3.1"})
_WITHOUT = replace(HOPPER, versions={"apache-tvm-ffi": "0.1.15"})
_BAD = Malformation(subject="v.dim[1]", got="3", want="a divisor of q's 8 heads")
_MISSPELT = UnknownArgument(kind="param", name="use_casual_mask", nearest="use_causal_mask")
_STRIDE_Q = (8 * 256 * 136, 136, 8 * 136 + 4, 1)
_FLAT_O = (256 * 8 * 128, 256 * 128, 1, 256)
_SEQ = {"padding": True, "seq_len_q": samples.lengths("q"), "seq_len_kv": samples.lengths("kv")}
_CU = {**_SEQ, "seq_len_kv": samples.lengths("kv", "cu_seq_len")}
_PACKED_TABLE = operand("v_table", (2, 1, 16, 1), DType.INT32, ragged=samples.offsets("t"))
_UNKNOWN_SCALE = Scale(form="pass_by_value", operand=operand("attn_scale"))
_KNOWN_SCALE = Scale(form="pass_by_value", value=0.1, operand=operand("attn_scale"))
_DEVICE_SCALE = Scale(form="device", operand=operand("attn_scale"))
_NO_DEVICE = _set("absent", "host", "pass_by_value")

CASES = [
    Case(
        Code.TARGET,
        "target",
        facts(),
        facts(),
        "cc",
        _set((9, 0)),
        target=BLACKWELL,
    ),
    Case(Code.TARGET, "target", facts(), facts(), "cc", _set((9, 0)), target=CPU),
    Case(Code.DEPENDENCY, "torch", facts(), target=_OLD),
    Case(Code.DEPENDENCY, "torch", facts(), target=_WITHOUT),
    Case(
        Code.DEPENDENCY,
        "torch",
        facts(),
        facts(),
        "packages",
        (("torch", "2.5"),),
        elsewhere=replace(HOPPER, versions={"torch": "2.10.0+cpu"}),
    ),
    Case(Code.MALFORMED, "v.dim[1]", facts(malformations=(_BAD,))),
    Case(Code.UNKNOWN_ARGUMENT, "use_casual_mask", facts(unknown_arguments=(_MISSPELT,))),
    Case(Code.OP, "op", facts(), fp8_facts(), "op", _set("sdpa_fp8")),
    Case(
        Code.INPUT_DTYPE,
        "v.data_type",
        facts(v=operand("v", (2, 2, 512, 128), DType.HALF, samples.bshd((2, 2, 512, 128)))),
        field="input_dtype",
        narrow=_set(DType.BFLOAT16),
    ),
    Case(
        Code.OUTPUT_DTYPE,
        "o.data_type",
        facts(o_dtype=DType.HALF),
        field="output_dtype",
        narrow=_set(DType.BFLOAT16),
    ),
    Case(
        Code.OUTPUT_DTYPE,
        "o.data_type",
        facts(o_dtype=DType.HALF),
        facts(dtype=DType.HALF),
        "mixed_output",
        False,
    ),
    Case(Code.OUTPUT_DTYPE, "o", facts(o_virtual=True)),
    Case(Code.COMPUTE_DTYPE, "compute_data_type", facts(compute_dtype=DType.HALF)),
    Case(
        Code.PRECISION,
        "softmax_precision",
        facts(softmax_precision=DType.HALF),
        facts(softmax_precision=DType.FLOAT),
        "softmax_precision",
        _set(DType.FLOAT),
    ),
    Case(Code.HEAD_DIM, "(d_qk, d_v)", facts(), facts(d=(64, 48)), "d_shapes", ((64, 64),)),
    Case(Code.HEAD_DIM, "(d_qk, d_v)", facts(d=(72, 64)), field="d_multiple", narrow=16),
    Case(Code.HEAD_DIM, "(d_qk, d_v)", facts(d=(128, 64)), field="d_floor", narrow=64),
    Case(Code.HEAD_DIM, "(d_qk, d_v)", facts(d=(136, 128))),
    Case(Code.EXTENT, "k.dim[1]", facts(h=(8, 600, 2)), PLAIN, "extent_limit", 600),
    Case(
        Code.STRIDE,
        "q.stride[0]",
        samples.with_stride(facts(), "q", (1 << 20, 128, 1024, 1)),
        samples.with_stride(facts(), "q", (1 << 18, 128, 1024, 1)),
        "stride_limit",
        1 << 20,
    ),
    Case(
        Code.STRIDE,
        "k.stride[0]",
        samples.with_stride(facts(), "k", (-(1 << 17), 128, 256, 1)),
        samples.with_stride(facts(), "k", (0, 128, 256, 1)),
    ),
    Case(Code.HEAD_COUNT, "heads of k and v", facts(h=(8, 2, 4)), facts(), "split_kv_heads", False),
    Case(
        Code.STRIDE,
        "q.stride[2]",
        samples.with_stride(facts(), "q", _STRIDE_Q),
        samples.with_stride(facts(), "q", (8 * 256 * 136, 136, 8 * 136, 1)),
    ),
    Case(Code.STRIDE, "o.stride[3]", samples.with_stride(facts(), "o", _FLAT_O)),
    Case(
        Code.STRIDE,
        "o.stride[1]",
        samples.with_stride(facts(), "o", (8 * 256 * 136, 136, 8 * 136, 1)),
        field="stride_alignment",
        narrow=32,
    ),
    Case(
        Code.MASK,
        "mask",
        facts(band=_LEFT),
        facts(band=Band(right=0)),
        "mask",
        _set("none", "causal"),
    ),
    Case(
        Code.MASK,
        "mask",
        facts(band=_CAUSAL_BR),
        facts(band=Band(right=0)),
        "mask",
        _set("none", "causal"),
    ),
    Case(Code.LENGTHS, "use_padding_mask", facts(**_SEQ), facts(), "padding", False),
    Case(
        Code.LENGTHS,
        "length form of kv",
        facts(**_CU),
        facts(**_SEQ),
        "length_forms",
        _set("none", "seq_len"),
    ),
    Case(
        Code.RAGGED,
        "o.ragged_offset",
        facts(packed=("q", "o"), **_SEQ),
        facts(packed=("q",), **_SEQ),
        "ragged",
        _set("q"),
    ),
    Case(
        Code.PAGED_KV, "paged K/V", facts(paging=samples.paging(), **_SEQ), facts(), "paged_kv", 0
    ),
    Case(
        Code.PAGED_D_SHAPE,
        "(d_qk, d_v) of paged K/V",
        facts(paging=samples.paging()),
        facts(paging=samples.paging(), d=(64, 64)),
        "paged_d_shapes",
        ((64, 64),),
    ),
    Case(
        Code.PAGE_SIZE,
        "page size",
        facts(paging=samples.paging(64)),
        facts(paging=samples.paging(16)),
        "page_sizes",
        _set(16),
    ),
    Case(
        Code.PAGE_TABLE,
        "v_table",
        facts(paging=samples.paging(v_table=_PACKED_TABLE)),
        facts(paging=samples.paging()),
    ),
    Case(
        Code.SCALE,
        "attn_scale",
        facts(attn_scale=_DEVICE_SCALE),
        facts(attn_scale=_KNOWN_SCALE),
        "attn_scale",
        _NO_DEVICE,
    ),
    Case(
        Code.SCALE,
        "attn_scale",
        facts(attn_scale=_UNKNOWN_SCALE),
        facts(attn_scale=Scale(form="host", value=0.0)),
        "attn_scale",
        _NO_DEVICE,
    ),
    feature(Code.SCALE, "attn_scale_prefolded", True),
    feature(Code.SINK, "sink", operand("sink", (1, 8, 1, 1))),
    feature(Code.BIAS, "bias", operand("bias", (1, 8, 256, 512))),
    feature(Code.ALIBI, "alibi", True),
    feature(Code.BLOCK_MASK, "block_mask", operand("block_mask", (2, 8, 2, 1), DType.UINT8)),
    feature(Code.KV_MASK, "kv_mask", operand("kv_mask", (2, 1, 1, 512), DType.BOOLEAN)),
    feature(Code.SCORE_MOD, "score_mod", True),
    feature(Code.STATS, "stats", samples.stats()),
    Case(
        Code.STATS,
        "stats_use_log2",
        facts(stats=samples.stats(), stats_use_log2=True),
        facts(stats=samples.stats()),
        "stats_use_log2",
        False,
    ),
    feature(Code.EXTRA_OUTPUT, "score_max", samples.stats(name="score_max")),
    feature(Code.EXTRA_OUTPUT, "score_sum_exp", samples.stats(name="score_sum_exp")),
    feature(Code.EXTRA_OUTPUT, "rng_dump"),
    feature(Code.EXTRA_OUTPUT, "sf_o", base=fp8_facts),
    feature(Code.AMAX, "amax_s", base=fp8_facts),
    feature(Code.AMAX, "amax_o", base=fp8_facts),
    feature(Code.OVERRIDE_SHAPE, "override_shape_enabled", True),
    Case(
        Code.DROPOUT,
        "dropout",
        facts(dropout=Dropout(form="philox", probability=0.1)),
        facts(dropout=Dropout(form="mask", mask=operand("m"), scale=operand("s"))),
        "dropout",
        _set("mask"),
    ),
]

_EACH = pytest.mark.parametrize("case", CASES, ids=str)


@_EACH
def test_the_declined_facts_give_this_one_decline(case):
    declines = judge(case.declined, case.capabilities, case.target)
    assert [(d.code, d.subject) for d in declines] == [(case.code, case.subject)]


@_EACH
def test_the_accepted_facts_give_none(case):
    assert judge(case.accepted, case.capabilities, case.elsewhere) == ()


@pytest.mark.parametrize("case", [c for c in CASES if c.field], ids=str)
def test_that_capability_alone_decides(case):
    """Wider in that one field, the same facts on the same machine are taken."""
    wider = {"cc": None, "packages": (), "d_multiple": 1}
    wide = wider.get(case.field, getattr(GENEROUS, case.field))
    widened = replace(case.capabilities, **{case.field: wide})
    assert judge(case.declined, widened, case.target) == ()


def _codes_in(source: str) -> set[DeclineCode]:
    return {
        DeclineCode[node.attr]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "DeclineCode"
    }


def test_every_code_of_the_rules_has_a_case():
    judged = _codes_in("\n".join(inspect.getsource(rule) for rule in rules.RULES))
    judged |= {code for code, _ in rules._FEATURES.values()}
    assert {case.code for case in CASES} == judged
    assert _codes_in(inspect.getsource(rules)) == judged | {Code.GRAPH_SHAPE}


def test_every_rule_is_asked():
    defined = {f for name, f in vars(rules).items() if name.endswith("_rule")}
    assert defined == set(rules.RULES) and len(rules.RULES) == len(defined)


# ---- capabilities

# capability -> what it answers, where the fact has not its name (documented in `Capabilities`)
ANSWERS = {
    "packages": ("versions",),
    "input_dtype": ("q", "k", "v"),
    "d_shapes": ("d_shape",),
    "paged_d_shapes": ("d_shape", "paging"),
    "d_multiple": ("d_shape",),
    "d_floor": ("d_shape",),
    "stride_alignment": ("q", "k", "v", "o"),
    "stride_limit": ("q", "k", "v", "o"),
    "extent_limit": ("q", "k", "v", "o"),
    "split_kv_heads": ("h_k", "h_v"),
}


@pytest.mark.parametrize("name", [f.name for f in fields(Capabilities)])
def test_a_capability_has_the_name_of_what_it_answers(name):
    known = {*SdpaFacts.model_fields, *dir(SdpaFacts), *dir(Target)}
    own_name = {name} & known
    assert own_name or name in ANSWERS, f"no fact and no target field is called {name}"
    assert not own_name or name not in ANSWERS
    assert set(ANSWERS.get(name, ())) <= known


class Recording:
    """A row's capabilities that note which of their fields were read."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._capabilities, name)
        if not callable(value):
            self.read.add(name)
            return value
        return partial(getattr(Capabilities, name), self)


def test_every_capability_is_read_by_a_rule():
    noted = Recording(GENEROUS)
    for case in CASES:
        judge(case.declined, noted, case.target)  # type: ignore[arg-type]
    assert noted.read == {f.name for f in fields(Capabilities)}


def test_every_capability_decides_a_case():
    assert {case.field for case in CASES} - {None} == {f.name for f in fields(Capabilities)}


FLAVORS = ((64, 64), (128, 128), (192, 128))


@pytest.mark.parametrize(
    ("shape", "flavor"),
    [
        ((64, 64), (64, 64)),
        ((40, 8), (64, 64)),
        ((72, 64), (128, 128)),
        ((64, 96), (128, 128)),
        ((160, 128), (192, 128)),
        ((192, 136), None),
        ((200, 64), None),
    ],
)
def test_the_flavor_is_the_smallest_that_covers(shape, flavor):
    assert replace(GENEROUS, d_shapes=FLAVORS).flavor(shape) == flavor
    assert replace(GENEROUS, d_shapes=FLAVORS[::-1]).flavor(shape) == flavor
    assert replace(GENEROUS, d_shapes=None).flavor(shape) == shape


# ---- all reasons at once


def test_five_problems_give_five_declines():
    declared = facts(
        dtype=DType.HALF,
        o_dtype=DType.BFLOAT16,
        band=_LEFT,
        sink=operand("sink"),
        bias=operand("bias"),
        dropout=Dropout(form="philox", probability=0.5),
    )
    narrow = replace(
        GENEROUS,
        input_dtype=_set(DType.BFLOAT16),
        mask=_set("none"),
        sink=False,
        bias=False,
        dropout=frozenset(),
    )
    found = [(d.code, d.subject) for d in judge(declared, narrow, HOPPER)]
    assert found == [
        *((Code.INPUT_DTYPE, f"{name}.data_type") for name in "qkv"),
        (Code.MASK, "mask"),
        (Code.SINK, "sink"),
        (Code.BIAS, "bias"),
        (Code.DROPOUT, "dropout"),
    ]


def _nothing() -> Capabilities:
    """What a row without any capability states."""
    return Capabilities(
        op=frozenset(),
        cc=frozenset(),
        packages=(("torch", "99"),),
        input_dtype=frozenset(),
        output_dtype=frozenset(),
        d_shapes=(),
        stride_alignment=1 << 20,
        stride_limit=1,
        extent_limit=1,
        mask=frozenset(),
        length_forms=frozenset(),
        attn_scale=frozenset(),
        stats=False,
        softmax_precision=frozenset(),
    )


@_EACH
def test_a_reason_is_not_hidden_by_others(case):
    """Under capabilities that take nothing, the case's own reason is still among the answers."""
    broken = case.declined.model_copy(
        update={
            "malformations": (_BAD, *case.declined.malformations),
            "unknown_arguments": (_MISSPELT,),
            "compute_dtype": DType.HALF,
        }
    )
    hidden = {Code.PAGED_D_SHAPE, Code.PAGE_SIZE, Code.PAGE_TABLE}
    codes = {d.code for d in judge(broken, _nothing(), case.target)}
    expected = Code.PAGED_KV if case.code in hidden else case.code
    assert {expected, Code.MALFORMED, Code.UNKNOWN_ARGUMENT, Code.COMPUTE_DTYPE} <= codes
    assert {Code.TARGET, Code.DEPENDENCY, Code.OP, Code.MASK, Code.HEAD_DIM} <= codes


def test_a_row_without_paging_gives_that_reason_alone():
    """What its page sizes would be says nothing to somebody who cannot page at all."""
    none = replace(GENEROUS, paged_kv=False, paged_d_shapes=(), page_sizes=frozenset())
    declined = facts(paging=samples.paging(v_table=_PACKED_TABLE))
    assert [d.code for d in judge(declined, none, HOPPER)] == [Code.PAGED_KV]
    paged = replace(none, paged_kv=True)
    codes = [d.code for d in judge(declined, paged, HOPPER)]
    assert codes == [Code.PAGED_D_SHAPE, Code.PAGE_SIZE, Code.PAGE_TABLE]


def test_no_versions_known_declines_nothing():
    wanted = replace(GENEROUS, packages=(("torch", "99"), ("nowhere", "1")))
    assert judge(facts(), wanted, replace(HOPPER, versions={})) == ()
    assert len(judge(facts(), wanted, HOPPER)) == 2


@pytest.mark.parametrize(
    ("found", "minimum", "taken"),
    [
        ("4.8.1", "4.8", True),
        ("4.10", "4.8", True),
        ("4.7.9", "4.8", False),
        ("4.8.0rc1", "4.8", True),
        ("0.1.15.post2", "0.1.15", True),
        ("2.13.0+cpu", "2.4", True),
        ("10.0", "9.9.9", True),
    ],
)
def test_versions_compare_as_numbers(found, minimum, taken):
    wanted = replace(GENEROUS, packages=(("torch", minimum),))
    declines = judge(facts(), wanted, replace(HOPPER, versions={"torch": found}))
    assert (declines == ()) is taken


# ---- graphs without facts

GRAPHS = [
    (Analysis(ops=("matmul",)), Code.OP, "op"),
    (Analysis(ops=("sdpa_backward",)), Code.OP, "op"),
    (Analysis(ops=("sdpa", "pointwise")), Code.GRAPH_SHAPE, "graph"),
    (Analysis(ops=()), Code.GRAPH_SHAPE, "graph"),
    (Analysis(ops=("sdpa",), malformations=(_BAD,)), Code.MALFORMED, "v.dim[1]"),
]


@pytest.mark.parametrize(("analysis", "code", "subject"), GRAPHS)
def test_a_graph_without_facts_says_why(analysis, code, subject):
    (decline,) = graph_declines(analysis)
    assert (decline.code, decline.subject) == (code, subject)
    _check_text(decline)


# ---- what a decline says


def _check_text(decline: Decline) -> None:
    for part in (decline.subject, decline.got, decline.want):
        assert part.strip() and "\n" not in part
    text = decline.render()
    assert text.startswith(f"{decline.code}: {decline.subject} is {decline.got}; takes ")
    assert decline.want in text and decline.remedy in text
    assert not decline.remedy.endswith(".") and "\n" not in text
    assert text == str(decline)
    assert set(decline.as_dict()) == {"code", "subject", "got", "want", "remedy"}
    assert decline.as_dict()["code"] == decline.code.value


@_EACH
def test_a_decline_names_subject_got_and_want(case):
    for decline in judge(case.declined, case.capabilities, case.target):
        _check_text(decline)
    for decline in judge(case.declined, _nothing(), case.target):
        _check_text(decline)


def _remedy(declared: SdpaFacts, **narrow: Any) -> str:
    (decline,) = judge(declared, replace(GENEROUS, **narrow), HOPPER)
    return decline.remedy


def test_the_remedy_for_a_real_amax_s():
    remedy = _remedy(fp8_facts(amax_s=operand("amax_s")), amax_s=False)
    assert remedy.lower() == "leave amax_s virtual and set scale_s to 448 for e4m3"


def test_remedies_name_what_helps():
    assert "use_causal_mask" in _remedy(facts(unknown_arguments=(_MISSPELT,)))
    assert "8 elements" in _remedy(samples.with_stride(facts(), "q", _STRIDE_Q))
    assert "2.5" in _remedy(facts(), packages=(("torch", "2.5"),))


def test_a_stride_is_judged_at_its_operands_own_width():
    """FP8 O with a token stride of 136 bytes declines, with 144 not."""
    shape = {"b": 1, "h": (1, 1, 1)}
    for step, declined in ((136, True), (144, False)):
        moved = samples.with_stride(fp8_facts(**shape), "o", (256 * step, step, step, 1))
        codes = [d.code for d in judge(moved, GENEROUS, HOPPER)]
        assert codes == ([Code.STRIDE] if declined else [])
    moved = samples.with_stride(facts(**shape), "o", (256 * 136, 136, 136, 1))
    assert judge(moved, GENEROUS, HOPPER) == ()


# ---- the rules' source knows no row and no architecture


def _source_problems(source: str) -> list[str]:
    names = {row.name for row in ROWS}
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str):
            words = text.lower()
            if any(name in words for name in names) or "frost_" in words:
                found.append(f"{line}: names a row: {text!r}")
            if any(word in words for word in ("sm9", "sm1", "hopper", "blackwell", "h100", "h200")):
                found.append(f"{line}: names an architecture: {text!r}")
        if isinstance(text, int) and text in (90, 100, 103, 110, 120):
            found.append(f"{line}: compares an architecture: {text}")
        if isinstance(node, ast.Tuple):
            values = [getattr(item, "value", None) for item in node.elts]
            if (
                len(values) == 2
                and values[0] in (8, 9, 10, 11, 12)
                and values[1] in (0, 1, 3, 6, 9)
            ):
                found.append(f"{line}: a compute capability: {tuple(values)}")
        if isinstance(node, ast.Attribute) and node.attr in ("engine_id", "kernel", "qualified"):
            found.append(f"{line}: asks a row for its {node.attr}")
        if isinstance(node, ast.Attribute) and node.attr in ("cc", "arch"):
            owner = ast.unparse(node.value)
            if owner not in ("target", "caps"):
                found.append(f"{line}: {owner}.{node.attr}")
    return found


def test_the_rules_name_no_row_and_no_architecture():
    assert _source_problems(inspect.getsource(rules)) == []


@pytest.mark.parametrize(
    "source",
    [
        "if row == 'frost_sdpa_fwd_prefill_sm90': pass",
        "name.startswith('frost_')",
        "if target.arch == 'sm90': pass",
        "if target.cc == (9, 0): pass",
        "if target.cc[0] * 10 >= 90: pass",
        "row.engine_id",
        "device.cc",
    ],
)
def test_such_source_is_found(source):
    assert _source_problems(source)


# ---- any facts at all

_FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
_CAPABILITIES = st.sampled_from([GENEROUS, _nothing(), *(row.capabilities for row in ROWS)])


@_FUZZ
@given(samples.any_facts() | samples.plain_facts(), _CAPABILITIES, st.sampled_from(samples.TARGETS))
def test_judging_never_raises_and_repeats_itself(declared, capabilities, target):
    first = judge(declared, capabilities, target)
    assert judge(declared, capabilities, target) == first
    assert all(d.render() for d in first)
    for bad in declared.malformations:
        assert Decline(Code.MALFORMED, bad.subject, bad.got, bad.want) in first
    if not first:
        assert declared.op in capabilities.op and declared.mask in capabilities.mask


@_FUZZ
@given(samples.any_facts())
def test_nothing_is_taken_by_a_row_that_takes_nothing(declared):
    codes = {d.code for d in judge(declared, _nothing(), HOPPER)}
    assert {Code.TARGET, Code.OP, Code.MASK, Code.LENGTHS, Code.SCALE, Code.HEAD_DIM} <= codes


_CHANGES: dict[str, Callable[[], Any]] = {
    "sink": lambda: operand("sink"),
    "bias": lambda: operand("bias"),
    "alibi": lambda: True,
    "kv_mask": lambda: operand("kv_mask"),
    "score_max": lambda: samples.stats(name="score_max"),
    "override_shape_enabled": lambda: True,
}


@_FUZZ
@given(st.sets(st.sampled_from(sorted(_CHANGES))), st.sets(st.sampled_from(sorted(_CHANGES))))
def test_features_are_declined_independently(used, served):
    declared = facts(**{name: _CHANGES[name]() for name in used})
    caps = replace(GENEROUS, **{name: name in served for name in _CHANGES})
    assert {d.subject for d in judge(declared, caps, HOPPER)} == used - served


def test_lengths_without_padding_are_judged_too():
    """A form on one side only, no padding mask: each side answers for itself."""
    caps = replace(GENEROUS, length_forms=_set("none"))
    declared = facts(seq_len_q=Lengths(form="seq_len"), seq_len_kv=Lengths(form="cu_seq_len"))
    subjects = [d.subject for d in judge(declared, caps, HOPPER)]
    assert subjects == ["length form of q", "length form of kv"]

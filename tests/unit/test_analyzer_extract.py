"""Facts of live graphs: every spelling, every contradiction by name, nothing lost."""

from __future__ import annotations

import cudnn
import numpy as np
import pytest
import torch

from cudnn_frost.analyzer.extract import analyze
from cudnn_frost.analyzer.facts import Analysis, SdpaFacts
from cudnn_frost.analyzer.live import record_of
from cudnn_frost.analyzer.record import GraphRecord
from cudnn_frost.vocab import DType

BF16, FP32, INT32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT, cudnn.data_type.INT32
E4M3 = cudnn.data_type.FP8_E4M3
FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
B, H, HK, S, D = 2, 4, 2, 32, 64


class Declaration:
    """A small graph whose tensors and keywords a test changes before it is read."""

    def __init__(self, op: str = "sdpa") -> None:
        self.op = op
        self.graph = cudnn.pygraph(
            io_data_type=BF16 if op == "sdpa" else E4M3,
            intermediate_data_type=FP32,
            compute_data_type=FP32,
        )
        self.keywords: dict = {
            "q": self.tensor(B, H, S, D),
            "k": self.tensor(B, HK, S, D),
            "v": self.tensor(B, HK, S, D),
        }
        if op == "sdpa_fp8":
            self.keywords |= {n: self.tensor(1, 1, 1, 1, data_type=FP32) for n in FP8_SCALES}

    def tensor(self, *dim: int, **kwargs):
        return self.graph.tensor(dim=list(dim), **kwargs)

    def lengths(self, n: int = B):
        return self.tensor(n, 1, 1, 1, data_type=INT32)

    def facts(self, **keywords) -> SdpaFacts:
        """Facts with these keywords beside the declared ones; None removes one."""
        outputs = getattr(self.graph, self.op)(**{**self.keywords, **keywords})
        outputs[0].set_output(True)
        analysis = analyze(record_of(self.graph))
        assert analysis.facts is not None, analysis.malformations
        # nothing is lost on the way through JSON
        assert Analysis.model_validate_json(analysis.model_dump_json()) == analysis
        return analysis.facts

    def paged(self, page: int = 8, pages: int = 4) -> dict:
        return {
            "k": self.tensor(64, HK, page, D),
            "v": self.tensor(64, HK, page, D),
            "paged_attention_k_table": self.tensor(B, 1, pages, 1, data_type=INT32),
            "paged_attention_v_table": self.tensor(B, 1, pages, 1, data_type=INT32),
            "use_padding_mask": True,
            "seq_len_q": self.lengths(),
            "seq_len_kv": self.lengths(),
        }


def subjects(facts: SdpaFacts) -> list[str]:
    return [bad.subject for bad in facts.malformations]


def test_extents_types_and_defaults():
    facts = Declaration().facts(attn_scale=0.5)
    assert (facts.b, facts.h_q, facts.h_k, facts.h_v) == (B, H, HK, HK)
    assert (facts.s_q, facts.s_kv, facts.d_qk, facts.d_v, facts.group) == (S, S, D, D, 2)
    assert (facts.q.dtype, facts.o.dtype, facts.mask) == (DType.BFLOAT16, DType.BFLOAT16, "none")
    assert facts.stats is None and not facts.padding and facts.paging is None
    assert not facts.malformations and not facts.unknown_arguments


BR, TL = cudnn.diagonal_alignment.BOTTOM_RIGHT, cudnn.diagonal_alignment.TOP_LEFT


@pytest.mark.parametrize(
    ("keywords", "mask", "bounds"),
    [
        ({}, "none", (None, None)),
        ({"diagonal_alignment": BR}, "none", (None, None)),
        ({"use_causal_mask": True}, "causal", (None, 0)),
        ({"use_causal_mask": False}, "none", (None, None)),
        ({"use_causal_mask_bottom_right": True}, "causal_bottom_right", (None, 0)),
        # a causal flag fixes the alignment
        ({"use_causal_mask": True, "diagonal_alignment": BR}, "causal", (None, 0)),
        ({"diagonal_band_right_bound": 0}, "causal", (None, 0)),
        ({"diagonal_band_right_bound": 3}, "right_bound", (None, 3)),
        (
            {"diagonal_band_right_bound": 3, "diagonal_alignment": BR},
            "right_bound_bottom_right",
            (None, 3),
        ),
        ({"diagonal_band_left_bound": 5, "use_causal_mask": True}, "window", (5, 0)),
        ({"sliding_window_length": 5, "use_causal_mask": True}, "window", (5, 0)),
        (
            {"sliding_window_length": 5, "use_causal_mask_bottom_right": True},
            "window_bottom_right",
            (5, 0),
        ),
        # True is an int
        ({"diagonal_band_right_bound": True}, "right_bound", (None, 1)),
    ],
)
def test_every_mask_spelling_has_one_normal_form(keywords, mask, bounds):
    facts = Declaration().facts(**keywords)
    assert (facts.mask, (facts.band.left, facts.band.right)) == (mask, bounds)
    assert not facts.malformations


@pytest.mark.parametrize(
    ("keywords", "mask", "bounds"),
    [
        ({"left_bound": 4, "right_bound": 0}, "window", (4, 0)),
        ({"sliding_window": 4, "use_causal_mask": True}, "window", (4, 0)),
        ({"right_bound": 2, "diagonal_alignment": BR}, "right_bound_bottom_right", (None, 2)),
    ],
)
def test_fp8_has_its_own_spellings(keywords, mask, bounds):
    facts = Declaration("sdpa_fp8").facts(**keywords)
    assert (facts.mask, (facts.band.left, facts.band.right)) == (mask, bounds)
    assert not facts.malformations and not facts.unknown_arguments


@pytest.mark.parametrize(
    ("op", "keyword", "nearest"),
    [
        ("sdpa", {"use_casual_mask": True}, "use_causal_mask"),
        ("sdpa", {"right_bound": 0}, "diagonal_band_right_bound"),
        ("sdpa_fp8", {"diagonal_band_right_bound": 0}, "right_bound"),
        ("sdpa_fp8", {"sliding_window_length": 4}, "sliding_window"),
        ("sdpa", {"zzz": 1}, ""),
    ],
)
def test_an_unknown_parameter_is_named_with_the_nearest(op, keyword, nearest):
    (unknown,) = Declaration(op).facts(**keyword).unknown_arguments
    assert (unknown.kind, unknown.name, unknown.nearest) == ("param", next(iter(keyword)), nearest)


def test_an_unknown_tensor_is_named_with_the_nearest():
    d = Declaration()
    (unknown,) = d.facts(seq_len_qq=d.lengths()).unknown_arguments
    assert (unknown.kind, unknown.name, unknown.nearest) == ("input", "seq_len_qq", "seq_len_q")


@pytest.mark.parametrize(
    ("keywords", "subject"),
    [
        ({"use_causal_mask": 1}, "use_causal_mask"),
        ({"use_causal_mask": True, "use_causal_mask_bottom_right": True}, "use_causal_mask"),
        ({"use_causal_mask": True, "diagonal_band_right_bound": 0}, "diagonal_band_right_bound"),
        ({"diagonal_band_right_bound": -1}, "diagonal_band_right_bound"),
        ({"diagonal_band_right_bound": 1.0}, "diagonal_band_right_bound"),
        ({"diagonal_band_right_bound": np.int64(1)}, "diagonal_band_right_bound"),
        (
            {"diagonal_band_left_bound": 1, "sliding_window_length": 1},
            "sliding_window_length",
        ),
        ({"attn_scale": True}, "attn_scale"),
        ({"attn_scale": float("nan")}, "attn_scale"),
        ({"attn_scale": np.float32(0.5)}, "attn_scale"),
        ({"use_padding_mask": True}, "seq_len_q"),
        ({"paged_attention_max_seq_len_kv": 4}, "paged_attention_max_seq_len_kv"),
        ({"use_alibi_mask": True}, "use_alibi_mask"),
    ],
)
def test_a_contradicting_keyword_is_named(keywords, subject):
    assert subject in subjects(Declaration().facts(**keywords))


@pytest.mark.parametrize(
    ("port", "dim", "kwargs", "subject"),
    [
        ("k", (B, 3, S, D), {}, "k.dim[1]"),
        ("k", (B, HK, S, 32), {}, "k.dim[3]"),
        ("k", (B + 1, HK, S, D), {}, "k.dim[0]"),
        ("v", (B, HK, S + 1, D), {}, "v.dim[2]"),
        ("v", (B, HK, S, D), {"data_type": cudnn.data_type.HALF}, "v.data_type"),
        ("sink_token", (1, H, 1, 1), {}, "sink_token.data_type"),
        ("sink_token", (1, H + 1, 1, 1), {"data_type": FP32}, "sink_token.dim"),
        ("bias", (1, 1, S, S + 1), {}, "bias.dim"),
        ("kv_mask", (3, 1, 1, S), {}, "kv_mask.dim"),
        ("kv_mask", (1, 1, 1, S), {"data_type": INT32}, "kv_mask.data_type"),
    ],
)
def test_a_contradicting_tensor_is_named(port, dim, kwargs, subject):
    d = Declaration()
    assert subject in subjects(d.facts(**{port: d.tensor(*dim, **kwargs)}))


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"cu_seq_len_q": (B + 1, INT32)}, "cu_seq_len_q"),
        ({"seq_len_q": (B + 1, INT32)}, "seq_len_q.dim"),
        ({"seq_len_kv": (B, FP32)}, "seq_len_kv.data_type"),
        ({"seq_len_q": None, "cu_seq_len_q": (B, INT32)}, "cu_seq_len_q.dim"),
    ],
)
def test_contradicting_lengths_are_named(change, subject):
    d = Declaration()
    keywords = {"use_padding_mask": True, "seq_len_q": d.lengths(), "seq_len_kv": d.lengths()}
    for name, spec in change.items():
        keywords[name] = spec and d.tensor(spec[0], 1, 1, 1, data_type=spec[1])
    assert subjects(d.facts(**keywords)) == [subject]


def test_lengths_without_a_padding_mask_are_named():
    d = Declaration()
    assert subjects(d.facts(seq_len_q=d.lengths())) == ["seq_len_q"]


def test_lengths_may_be_vectors_and_mix_forms():
    d = Declaration()
    facts = d.facts(
        use_padding_mask=True,
        seq_len_q=d.tensor(B, data_type=INT32),
        cu_seq_len_kv=d.tensor(B + 1, data_type=cudnn.data_type.INT64),
    )
    assert facts.length_forms == ("seq_len", "cu_seq_len") and not facts.malformations


def test_paging():
    d = Declaration()
    facts = d.facts(**d.paged())
    assert facts.paging is not None and facts.page_sizes == (8, 8)
    assert (facts.paging.pages_per_seq, facts.s_kv) == (4, 32) and not facts.malformations
    d = Declaration()
    assert d.facts(**d.paged(), paged_attention_max_seq_len_kv=30).s_kv == 30


def test_tables_of_unequal_extent_are_named_unless_the_pages_differ():
    d = Declaration()
    wide = d.tensor(B, 1, 8, 1, data_type=INT32)
    keywords = {**d.paged(), "paged_attention_v_table": wide}
    assert subjects(d.facts(**keywords)) == ["paged_attention_v_table.dim[2]"]
    d = Declaration()
    wide = d.tensor(B, 1, 8, 1, data_type=INT32)
    keywords = {**d.paged(), "paged_attention_v_table": wide, "v": d.tensor(64, HK, 4, D)}
    assert not d.facts(**keywords).malformations


@pytest.mark.parametrize(
    ("dim", "dtype", "subject"),
    [
        ((B, 1, 4, 1), cudnn.data_type.INT64, "paged_attention_k_table.data_type"),
        ((B + 1, 1, 4, 1), INT32, "paged_attention_k_table.dim[0]"),
        ((B, 4, 1, 1), INT32, "paged_attention_k_table.dim"),
    ],
)
def test_a_contradicting_table_is_named(dim, dtype, subject):
    d = Declaration()
    keywords = {**d.paged(), "paged_attention_k_table": d.tensor(*dim, data_type=dtype)}
    assert subject in subjects(d.facts(**keywords))


@pytest.mark.parametrize("name", FP8_SCALES)
def test_a_missing_or_wrong_fp8_scale_is_named_never_one(name):
    assert subjects(Declaration("sdpa_fp8").facts(**{name: None})) == [name]
    assert subjects(Declaration("sdpa_fp8").facts(**{name: 1.0})) == [name]
    d = Declaration("sdpa_fp8")
    assert subjects(d.facts(**{name: d.tensor(1, H, 1, 1, data_type=FP32)})) == [f"{name}.dim"]
    d = Declaration("sdpa_fp8")
    assert subjects(d.facts(**{name: d.tensor(1, 1, 1, 1)})) == [f"{name}.data_type"]


def test_an_amax_without_a_type_of_its_own_is_named():
    d = Declaration("sdpa_fp8")
    o, _, amax_s, amax_o = d.graph.sdpa_fp8(**d.keywords)
    for output in (o, amax_s, amax_o):
        output.set_output(True)
    amax_o.set_data_type(FP32)
    d.graph.validate()
    facts = analyze(record_of(d.graph)).facts
    assert facts is not None and subjects(facts) == ["amax_s.data_type"]


def test_requested_means_real():
    d = Declaration()
    o, stats = d.graph.sdpa(**d.keywords, generate_stats=True)
    facts = analyze(record_of(d.graph)).facts
    assert facts is not None and facts.o_virtual and facts.generate_stats and facts.stats is None
    o.set_output(True)
    stats.set_output(True).set_data_type(FP32)
    facts = analyze(record_of(d.graph)).facts
    assert facts is not None and not facts.o_virtual and facts.stats is not None


@pytest.mark.parametrize(
    ("scale", "form", "value"),
    [(None, "absent", None), (0.5, "host", 0.5), (1, "host", 1.0), (np.float64(2), "host", 2.0)],
)
def test_a_scale_that_is_a_number(scale, form, value):
    found = Declaration().facts(attn_scale=scale).attn_scale
    assert (found.form, found.value) == (form, value)


def test_a_scale_that_is_a_tensor():
    d = Declaration()
    assert d.facts(attn_scale=d.tensor(1, 1, 1, 1, data_type=FP32)).attn_scale.form == "device"
    d = Declaration()
    scalar = d.tensor(1, 1, 1, 1, data_type=FP32, is_pass_by_value=True)
    assert d.facts(attn_scale=scalar).attn_scale.form == "pass_by_value"
    found = Declaration().facts(attn_scale=torch.tensor(0.25)).attn_scale
    assert found.form == "pass_by_value"


def test_score_mod_is_seen_under_both_names():
    assert Declaration().facts(score_mod=lambda g, t: t).score_mod
    assert Declaration("sdpa_fp8").facts(fn=lambda g, t: t).score_mod


def test_dropout_forms():
    d = Declaration()
    seed = [d.tensor(1, 1, 1, 1, data_type=INT32) for _ in range(2)]
    found = d.facts(dropout=(0.1, *seed)).dropout
    assert found is not None and (found.form, found.probability) == ("philox", 0.1)
    d = Declaration()
    seed = [d.tensor(1, 1, 1, 1, data_type=INT32) for _ in range(2)]
    assert d.facts(dropout=(0.0, *seed)).dropout is None
    d = Declaration()
    mask = d.tensor(B, H, S, S), d.tensor(1, 1, 1, 1, data_type=FP32)
    found = d.facts(dropout=mask).dropout
    assert found is not None and found.form == "mask"


def test_ragged_offsets_keep_type_and_multiplier():
    d = Declaration()
    offset = d.tensor(B + 1, 1, 1, 1, data_type=cudnn.data_type.INT64)
    q = d.tensor(B, H, S, D, ragged_offset=offset, ragged_offset_multiplier=H * D)
    facts = d.facts(q=q, use_padding_mask=True, seq_len_q=d.lengths(), seq_len_kv=d.lengths())
    assert facts.ragged == ("q",) and facts.q.ragged is not None
    assert (facts.q.ragged.multiplier, facts.q.ragged.dtype) == (H * D, DType.INT64)
    assert facts.operands()["q.ragged_offset"].uid == offset.uid and not facts.malformations


def test_ragged_without_padding_is_named():
    d = Declaration()
    q = d.tensor(B, H, S, D, ragged_offset=d.lengths(B + 1))
    assert subjects(d.facts(q=q)) == ["ragged_offset"]


@pytest.mark.parametrize("op", ["sdpa_backward", "sdpa_mxfp8"])
def test_other_ops_are_recognised_and_give_no_facts(op):
    record = GraphRecord.model_validate({"nodes": [{"op": op}]})
    assert analyze(record) == Analysis(ops=(op,))


def test_a_graph_of_two_nodes_gives_no_facts():
    d = Declaration()
    d.graph.sdpa(**d.keywords)
    d.graph.sdpa(**d.keywords)
    assert analyze(record_of(d.graph)) == Analysis(ops=("sdpa", "sdpa"))


def test_the_ops_of_the_frontend_are_read_by_their_builders_names():
    d = Declaration("sdpa_fp8")
    d.graph.sdpa_fp8(**d.keywords)
    assert analyze(record_of(d.graph)).ops == ("sdpa_fp8",)


def test_a_node_without_q_says_so():
    analysis = analyze(GraphRecord.model_validate({"nodes": [{"op": "sdpa"}]}))
    assert analysis.facts is None
    assert [bad.subject for bad in analysis.malformations] == ["q", "k", "v", "o"]


@pytest.mark.parametrize("name", ["O", "Stats"])
def test_an_output_that_overwrites_itself_is_named(name):
    d = Declaration()
    o, stats = d.graph.sdpa(**d.keywords, generate_stats=True)
    o.set_output(True)
    stats.set_output(True).set_data_type(FP32)
    wide = {"O": o, "Stats": stats}[name]
    wide.set_stride([H * S * D, 0, D, 1])
    facts = analyze(record_of(d.graph)).facts
    assert facts is not None and subjects(facts) == [f"{name.lower()}.stride[1]"]


def test_a_reordered_operand_is_named():
    d = Declaration()
    kind = cudnn.tensor_reordering.F8_128x4
    assert subjects(d.facts(q=d.tensor(B, H, S, D, reordering_type=kind))) == ["q.reordering_type"]

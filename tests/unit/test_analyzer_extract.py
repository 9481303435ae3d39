"""Facts of live graphs: every spelling, every contradiction by name, nothing lost."""

from __future__ import annotations

import cudnn
import numpy as np
import pytest
import torch

from cudnn_frost.analyzer.extract import analyze
from cudnn_frost.analyzer.facts import Analysis, SdpaFacts
from cudnn_frost.analyzer.live import record_of
from cudnn_frost.analyzer.record import GraphRecord, NodeRecord, OpaqueValue, TensorRecord
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
        return self.read()

    def read(self) -> SdpaFacts:
        """Facts of the graph as it is now."""
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
        ("sdpa", {"fn": len}, "score_mod"),
        ("sdpa", {"drop_out": 0.1}, "dropout"),
        ("sdpa", {"compute_dtype": 1}, "compute_data_type"),
        ("sdpa", {"descale_q": 1.0}, ""),
        ("sdpa", {"dropout_0": 0.5}, "dropout"),
        ("sdpa_fp8", {"diagonal_band_right_bound": 0}, "right_bound"),
        ("sdpa_fp8", {"sliding_window_length": 4}, "sliding_window"),
        ("sdpa_fp8", {"score_mod": len}, "fn"),
        ("sdpa", {"zzz": 1}, ""),
    ],
)
def test_an_unknown_parameter_is_named_with_the_nearest(op, keyword, nearest):
    facts = Declaration(op).facts(**keyword)
    (unknown,) = facts.unknown_arguments
    assert (unknown.kind, unknown.name, unknown.nearest) == ("param", next(iter(keyword)), nearest)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seq_len_q", [3, 4]), ("sink_token", 0.5), ("bias", 1.0), ("score_max", True)],
)
def test_a_plain_value_where_a_tensor_belongs_is_a_contradiction(name, value):
    """The builder sorts by type alone: the name is known, its place is wrong."""
    facts = Declaration().facts(**{name: value})
    assert subjects(facts) == [name] and not facts.unknown_arguments


@pytest.mark.parametrize("name", ["use_causal_mask", "diagonal_band_left_bound", "generate_stats"])
def test_a_tensor_where_a_plain_value_belongs_is_a_contradiction(name):
    facts = Declaration().facts(**{name: torch.tensor(1)})
    assert subjects(facts) == [name] and not facts.unknown_arguments


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
        ({"attn_scale": np.float32(0.5)}, "attn_scale"),
        ({"attn_scale": float("nan")}, "attn_scale"),
        ({"attn_scale": 10**400}, "attn_scale"),
        ({"attn_scale": "0.5"}, "attn_scale"),
        ({"attn_scale": 0.5, "attn_scale_prefolded": True}, "attn_scale_prefolded"),
        ({"is_inference": 1}, "is_inference"),
        ({"generate_stats": 1}, "generate_stats"),
        ({"use_causal_mask": np.bool_(True)}, "use_causal_mask"),
        ({"diagonal_alignment": "BOTTOM_RIGHT"}, "diagonal_alignment"),
        (
            {"diagonal_alignment": cudnn.attention_implementation.AUTO},
            "diagonal_alignment",
        ),
        ({"implementation": 2}, "implementation"),
        ({"softmax_precision": cudnn.data_type.INT8}, "softmax_precision"),
        ({"max_total_seq_len_q": 8}, "max_total_seq_len_q"),
        ({"score_mod": len, "use_causal_mask": True}, "score_mod"),
        ({"dropout": (0.5,)}, "dropout"),
        ({"dropout": (0.1, 7, 8)}, "dropout"),
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
        ("bias", (1, 1, S, S), {"data_type": cudnn.data_type.BOOLEAN}, "bias.data_type"),
        ("bias", (S, S), {}, "bias.dim"),
        ("kv_mask", (3, 1, 1, S), {}, "kv_mask.dim"),
        ("block_mask", (B, H, 1, 2), {"data_type": cudnn.data_type.UINT8}, "block_mask.dim"),
        ("block_mask", (B, H, 1, 1), {"data_type": INT32}, "block_mask.data_type"),
        ("attn_scale", (1, 1, 1, 1), {}, "attn_scale.data_type"),
        ("attn_scale", (2, 1, 1, 1), {"data_type": FP32}, "attn_scale.dim"),
        (
            "attn_scale",
            (1, 1, 1, 1),
            {"data_type": INT32, "is_pass_by_value": True},
            "attn_scale.data_type",
        ),
        ("score_max", (B, H, S, 1), {}, "score_max.data_type"),
        ("score_sum_exp", (B, H, S), {"data_type": FP32}, "score_sum_exp.dim"),
        ("rng_dump", (B, H, S, S), {}, "rng_dump.data_type"),
        ("rng_dump", (B, H, S, 1), {"data_type": FP32}, "rng_dump.dim"),
        ("q", (B, H, S, D), {"stride": [H * S * D, S * D, -D, 1]}, "q.stride[2]"),
        (
            "score_max",
            (B, H, S, 1),
            {"data_type": FP32, "stride": [S, 0, 1, 1]},
            "score_max.stride[1]",
        ),
        (
            "sink_token",
            (1, H, 1, 1),
            {"data_type": FP32, "stride": [H, 1, 1]},
            "sink_token.stride",
        ),
        (
            "k",
            (B, HK, S, D),
            {"reordering_type": cudnn.tensor_reordering.F8_128x4},
            "k.reordering_type",
        ),
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


def test_lengths_beside_a_score_mod_need_no_padding_mask():
    d = Declaration()
    facts = d.facts(score_mod=len, seq_len_q=d.lengths(), seq_len_kv=d.lengths())
    assert not facts.malformations
    d = Declaration()
    given = {"seq_len_q": d.lengths(), "seq_len_kv": d.lengths(), "use_padding_mask": True}
    assert subjects(d.facts(score_mod=len, **given)) == ["score_mod"]
    d = Declaration("sdpa_fp8")
    assert subjects(d.facts(fn=len, left_bound=3)) == ["fn"]


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


def test_one_side_alone_may_be_paged():
    d = Declaration()
    keywords = {**d.paged(), "v": d.keywords["v"], "paged_attention_v_table": None}
    facts = d.facts(**keywords)
    assert facts.page_sizes == (8,) and facts.s_kv == S and not facts.malformations
    d = Declaration()
    keywords = {**d.paged(), "k": d.keywords["k"], "paged_attention_k_table": None}
    facts = d.facts(**keywords)
    assert facts.paging is not None and facts.paging.pages_per_seq == 4
    assert facts.s_kv == S and not facts.malformations


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_dense_side_has_as_many_keys_as_the_paged_one(side):
    d = Declaration()
    keywords = {**d.paged(), side: d.keywords[side], f"paged_attention_{side}_table": None}
    keywords["paged_attention_max_seq_len_kv"] = S - 2
    assert subjects(d.facts(**keywords)) == [f"{side}.dim[2]"]


@pytest.mark.parametrize("value", [0, -3])
def test_a_maximum_without_a_key_is_named(value):
    d = Declaration()
    facts = d.facts(**d.paged(), paged_attention_max_seq_len_kv=value)
    assert subjects(facts) == ["paged_attention_max_seq_len_kv"]


def test_a_packed_table_is_a_fact():
    d = Declaration()
    table = d.tensor(B, 1, 4, 1, data_type=INT32, ragged_offset=d.lengths(B + 1))
    facts = d.facts(**{**d.paged(), "paged_attention_k_table": table})
    assert facts.paging is not None and facts.paging.k_table is not None
    assert facts.paging.k_table.ragged is not None and not facts.malformations


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


@pytest.mark.parametrize(
    ("dropout", "subject"),
    [
        (lambda d: (1.0, d.lengths(1), d.lengths(1)), "dropout[0]"),
        (lambda d: (-0.1, d.lengths(1), d.lengths(1)), "dropout[0]"),
        (lambda d: (np.float32(0.1), d.lengths(1), d.lengths(1)), "dropout[0]"),
        (lambda d: (0.1, d.lengths(2), d.lengths(1)), "dropout.seed.dim"),
        (lambda d: (0.1, d.lengths(1), d.tensor(1, 1, 1, 1)), "dropout.offset.data_type"),
        (lambda d: (d.tensor(B, H, S, 3), d.tensor(1, 1, 1, 1)), "dropout.mask.dim"),
        (lambda d: (d.tensor(B, H, S, S), d.lengths(1)), "dropout.scale.data_type"),
        (lambda d: (d.tensor(B, H, S, S), 2.0), "dropout"),
        (lambda d: tuple(d.lengths(1) for _ in range(3)), "dropout"),
    ],
)
def test_a_contradicting_dropout_is_named(dropout, subject):
    d = Declaration()
    assert subjects(d.facts(dropout=dropout(d))) == [subject]


def test_an_empty_dropout_is_none():
    facts = Declaration().facts(dropout=())
    assert facts.dropout is None and not facts.malformations


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"multiplier": 0}, "q.ragged_offset_multiplier"),
        ({"extent": B}, "q.ragged_offset.dim"),
        ({"dtype": FP32}, "q.ragged_offset.data_type"),
        ({"step": 2}, "q.ragged_offset.stride[0]"),
        ({"padding": False}, "ragged_offset"),
        ({"port": "bias"}, "bias.ragged_offset"),
        ({"total": 0}, "max_total_seq_len_kv"),
    ],
)
def test_a_contradicting_packed_operand_is_named(change, subject):
    d = Declaration()
    extent, step = change.get("extent", B + 1), change.get("step", 1)
    offset = d.tensor(extent, 1, 1, 1, stride=[step, 1, 1, 1], data_type=change.get("dtype", INT32))
    multiplier = change.get("multiplier", 1)
    q, bias = ((B, H, S, D), (1, 1, S, S))
    packed = {"ragged_offset": offset, "ragged_offset_multiplier": multiplier}
    keywords = {"q": d.tensor(*q, **packed), "max_total_seq_len_kv": change.get("total", 9)}
    if change.get("port") == "bias":
        keywords["bias"] = d.tensor(*bias, **packed)
    if change.get("padding", True):
        lengths = {"seq_len_q": d.lengths(), "seq_len_kv": d.lengths()}
        keywords |= {"use_padding_mask": True, **lengths}
    assert subjects(d.facts(**keywords)) == [subject]


def test_a_packed_pool_is_named():
    d = Declaration()
    pool = d.tensor(64, HK, 8, D, ragged_offset=d.lengths(B + 1))
    assert subjects(d.facts(**{**d.paged(), "v": pool})) == ["v.ragged_offset"]


def test_a_packed_output_may_have_any_batch_stride():
    d = Declaration()
    offset = d.lengths(B + 1)
    keywords = {"use_padding_mask": True, "seq_len_q": d.lengths(), "seq_len_kv": d.lengths()}
    o, _ = d.graph.sdpa(**d.keywords, **keywords)
    o.set_output(True).set_stride([0, D, H * D, 1])
    assert subjects(d.read()) == ["o.stride[0]"]
    o.set_ragged_offset(offset)
    assert not d.read().malformations


def test_a_virtual_output_may_lie_anywhere():
    d = Declaration()
    o, _ = d.graph.sdpa(**d.keywords)
    o.set_stride([0, 0, 0, 1])
    assert not d.read().malformations


def test_block_scaled_outputs():
    E2M1, E8M0 = cudnn.data_type.FP4_E2M1, cudnn.data_type.FP8_E8M0
    for o_type, factors, subject in (
        (E2M1, None, ["sf_o"]),
        (E2M1, E4M3, []),
        (E2M1, E8M0, ["sf_o.data_type"]),
        (E4M3, E8M0, []),
        (E4M3, E4M3, ["sf_o.data_type"]),
        (BF16, E8M0, ["sf_o"]),
    ):
        d = Declaration("sdpa_fp8")
        f8_128x4 = cudnn.tensor_reordering.F8_128x4
        if factors is not None:
            tensor = d.tensor(B, H, S, D // 32, data_type=factors, reordering_type=f8_128x4)
            d.keywords["sf_o"] = tensor
        o, *_ = d.graph.sdpa_fp8(**d.keywords)
        o.set_output(True).set_data_type(o_type)
        assert subjects(d.read()) == subject, (o_type, factors)


def test_types_not_declared_are_the_frontends():
    """Stats are FLOAT, a real output has the io type, a virtual one the intermediate type."""
    d = Declaration()
    o, stats = d.graph.sdpa(**d.keywords, generate_stats=True)
    stats.set_output(True)
    before = d.read()
    assert (before.o.dtype, before.stats and before.stats.dtype) == (DType.FLOAT, DType.FLOAT)
    o.set_output(True)
    assert d.read().o.dtype is DType.BFLOAT16 and not d.read().malformations
    read = d.read()
    d.graph.validate()
    assert d.read() == read


def test_framework_types_are_the_frontends():
    g = cudnn.pygraph(
        io_data_type=torch.bfloat16,
        intermediate_data_type=torch.float32,
        compute_data_type=torch.float32,
    )
    q, k, v = (g.tensor(dim=[B, H, S, D]) for _ in range(3))
    o, stats = g.sdpa(q=q, k=k, v=v, generate_stats=True)
    for output in (o, stats):
        output.set_output(True)
    facts = analyze(record_of(g)).facts
    assert facts is not None and facts.stats is not None and not facts.malformations
    assert (facts.q.dtype, facts.o.dtype) == (DType.BFLOAT16, DType.BFLOAT16)
    assert (facts.stats.dtype, facts.compute_dtype) == (DType.FLOAT, DType.FLOAT)
    q.set_data_type(torch.complex64)
    facts = analyze(record_of(g)).facts
    assert facts is not None and facts.q.dtype is DType.OTHER


def test_the_compute_type_defaults_as_the_frontends():
    g = cudnn.pygraph(io_data_type=BF16)
    q, k, v = (g.tensor(dim=[B, H, S, D]) for _ in range(3))
    g.sdpa(q=q, k=k, v=v)
    live = analyze(record_of(g)).facts
    node = NodeRecord(op="sdpa", **{s: record_of(g).nodes[0].model_dump()[s] for s in PORTS})
    read = analyze(GraphRecord(io_dtype=DType.BFLOAT16, nodes=(node,))).facts
    assert live is not None and read is not None
    assert live.compute_dtype is read.compute_dtype is DType.BFLOAT16


PORTS = ("inputs", "outputs")


def test_a_tensor_of_another_graph_that_takes_a_uid_is_named():
    other = Declaration().graph.tensor(dim=[B, HK, S, D], data_type=BF16, uid=1)
    d = Declaration()
    assert d.keywords["q"].uid == 1
    assert subjects(d.facts(v=other)) == ["v.uid"]


def test_one_tensor_may_stand_in_several_places():
    d = Declaration()
    d.keywords["v"] = d.keywords["k"]
    assert not d.facts().malformations
    d = Declaration()
    prefix = d.tensor(B + 1, 1, 1, 1, data_type=INT32)
    q = d.tensor(B, H, S, D, ragged_offset=prefix, ragged_offset_multiplier=H * D)
    lengths = {"use_padding_mask": True, "cu_seq_len_q": prefix, "seq_len_kv": d.lengths()}
    assert not d.facts(q=q, **lengths).malformations


def test_a_constant_is_a_scale_and_nothing_else():
    d = Declaration()
    constant = cudnn.scalar_type.COMPILE_TIME_CONST
    found = d.facts(attn_scale=d.graph.tensor_scalar(0.5, constant)).attn_scale
    assert (found.form, found.value) == ("pass_by_value", 0.5)
    d = Declaration("sdpa_fp8")
    scale = d.graph.tensor_scalar(1.0, constant).set_data_type(FP32)
    assert subjects(d.facts(descale_q=scale)) == ["descale_q"]


@pytest.mark.parametrize(
    ("port", "tensor", "subject"),
    [
        ("q", None, "q"),
        ("v", TensorRecord(uid=9, dim=(2, 2, 2)), "v.dim"),
        ("k", TensorRecord(uid=9, dim=(B, HK, S, D), stride=(1, 1)), "k.stride"),
        ("O", None, "o"),
    ],
)
def test_a_node_without_readable_tensors_gives_no_facts(port, tensor, subject):
    d = Declaration()
    d.graph.sdpa(**d.keywords)
    record = record_of(d.graph)
    sides = {side: dict(getattr(record.nodes[0], side)) for side in PORTS}
    for held in sides.values():
        if port in held and tensor is None:
            del held[port]
        elif port in held:
            held[port] = tensor
    node = record.nodes[0].model_copy(update=sides)
    analysis = analyze(record.model_copy(update={"nodes": (node,)}))
    assert analysis.facts is None and analysis.ops == ("sdpa",)
    assert subject in [bad.subject for bad in analysis.malformations]


def test_stats_nobody_generates_are_named():
    d = Declaration()
    d.graph.sdpa(**d.keywords)
    record = record_of(d.graph)
    stats = TensorRecord(uid=77, dim=(B, H, S, 1))
    outputs = {**record.nodes[0].outputs, "Stats": stats}
    node = record.nodes[0].model_copy(update={"outputs": outputs})
    facts = analyze(record.model_copy(update={"nodes": (node,)})).facts
    assert facts is not None and subjects(facts) == ["stats"]


def test_a_record_is_the_same_out_of_json():
    d = Declaration()
    d.graph.sdpa(**d.keywords, score_mod=len, attn_scale=np.float32(1), dropout=())
    record = record_of(d.graph)
    assert isinstance(record.nodes[0].params["score_mod"], OpaqueValue)
    assert GraphRecord.model_validate_json(record.model_dump_json()) == record


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

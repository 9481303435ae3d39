"""What each op's builder defines: the ports and parameters outside of which nothing is known."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .band import ALIGNMENT, CAUSAL, CAUSAL_BOTTOM_RIGHT, SPELLINGS, shown
from .facts import Malformation, UnknownArgument
from .record import NodeRecord

Kind = Literal["input", "output", "param"]

FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
DROPOUT_COUNT = "_dropout_n"
"""The parameter under which the builder keeps the length of the dropout tuple."""

_WORDS = {"input": "an input tensor", "output": "an output tensor", "param": "a plain value"}
# written by callers, never captured: nearest names only
_BUILDER_WORDS = frozenset({"dropout", "name", "compute_data_type", "out_dims"})


@dataclass(frozen=True)
class Arguments:
    """The names one op's builder captures.

    inputs: tensors read. returned: outputs the builder makes. passed: outputs the caller hands in.
    params: everything that is not a tensor.
    """

    inputs: frozenset[str]
    returned: frozenset[str]
    passed: frozenset[str]
    params: frozenset[str]

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """As what the builder takes a name; empty for one it does not define."""
        found: list[Kind] = []
        if name in self.inputs:
            found.append("input")
        if name in self.returned or name in self.passed:
            found.append("output")
        if name in self.params:
            found.append("param")
        return tuple(found)

    @property
    def keywords(self) -> frozenset[str]:
        """What a caller can write."""
        return (self.inputs | self.passed | self.params | _BUILDER_WORDS) - {DROPOUT_COUNT}


_INPUTS = frozenset(
    {
        "q",
        "k",
        "v",
        "attn_scale",
        "seq_len_q",
        "seq_len_kv",
        "cu_seq_len_q",
        "cu_seq_len_kv",
        "paged_attention_k_table",
        "paged_attention_v_table",
        "sink_token",
    }
)
_PASSED = frozenset({"score_max", "score_sum_exp", "rng_dump"})
_PARAMS = frozenset(
    {
        "attn_scale",
        "use_alibi_mask",
        "use_padding_mask",
        CAUSAL,
        CAUSAL_BOTTOM_RIGHT,
        ALIGNMENT,
        "paged_attention_max_seq_len_kv",
        "max_total_seq_len_q",
        "max_total_seq_len_kv",
        "generate_stats",
        "is_inference",
        "implementation",
        "unfuse_fma",
        "stats_use_log2",
        "softmax_precision",
        "attn_scale_prefolded",
        DROPOUT_COUNT,
    }
)


def _bounds(op: str) -> frozenset[str]:
    names = SPELLINGS[op]
    return frozenset({names.left, names.right, names.window})


ARGUMENTS = {
    "sdpa": Arguments(
        inputs=_INPUTS | {"bias", "block_mask", "kv_mask"},
        returned=frozenset({"O", "Stats"}),
        passed=_PASSED,
        params=_PARAMS | _bounds("sdpa") | {"score_mod"},
    ),
    "sdpa_fp8": Arguments(
        inputs=_INPUTS | set(FP8_SCALES),
        returned=frozenset({"O", "Stats", "Amax_S", "Amax_O"}),
        passed=_PASSED | {"sf_o"},
        params=_PARAMS | _bounds("sdpa_fp8") | {"fn"},
    ),
}


def _synonyms() -> dict[str, str]:
    """Each op's own spellings, to the other op's for the same thing."""
    plain, fp8 = SPELLINGS["sdpa"], SPELLINGS["sdpa_fp8"]
    pairs = [
        (plain.left, fp8.left),
        (plain.right, fp8.right),
        (plain.window, fp8.window),
        ("score_mod", "fn"),
    ]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}


_SYNONYMS = _synonyms()


def dropout_count(node: NodeRecord) -> int:
    """Elements of the dropout tuple; 0 without one or with a count that is none."""
    count = node.params.get(DROPOUT_COUNT)
    return count if type(count) is int and 0 < count <= 8 else 0


def _captured(node: NodeRecord) -> Iterator[tuple[Kind, str]]:
    """Every captured name and where it was put, the dropout tuple's elements aside."""
    elements = {f"dropout_{i}" for i in range(dropout_count(node))}
    yield from (("input", name) for name in node.inputs if name not in elements)
    yield from (("output", name) for name in node.outputs)
    yield from (("param", name) for name in node.params if name not in elements)


def unknown_arguments(node: NodeRecord) -> tuple[UnknownArgument, ...]:
    """Captured names that the op does not define, each with the nearest name it does."""
    known = ARGUMENTS[node.op]
    found = []
    for kind, name in _captured(node):
        if not known.kinds(name):
            near = difflib.get_close_matches(name, sorted(known.keywords), 1, 0.6)
            nearest = _SYNONYMS.get(name) or (near[0] if near else "")
            found.append(UnknownArgument(kind=kind, name=name, nearest=nearest))
    return tuple(found)


def misplaced(node: NodeRecord) -> Iterator[Malformation]:
    """Known names that hold the wrong kind of thing: a number for a tensor, or the reverse.

    The builder sorts arguments by their value's type alone, so both are captured silently.
    """
    known = ARGUMENTS[node.op]
    for kind, name in _captured(node):
        kinds = known.kinds(name)
        if kinds and kind not in kinds:
            got = shown(node.params[name]) if kind == "param" else _WORDS[kind]
            want = " or ".join(_WORDS[k] for k in kinds)
            yield Malformation(subject=name, got=got, want=want)

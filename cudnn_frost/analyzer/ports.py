"""What each op's builder defines: the ports and parameters outside of which nothing is known."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from .band import ALIGNMENT, CAUSAL, CAUSAL_BOTTOM_RIGHT, SPELLINGS
from .facts import UnknownArgument
from .record import NodeRecord

FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


@dataclass(frozen=True)
class Arguments:
    """The names one op's builder captures."""

    inputs: frozenset[str]
    outputs: frozenset[str]
    params: frozenset[str]

    @property
    def keywords(self) -> frozenset[str]:
        """What a caller can write: a name is an input or a parameter by its value's type."""
        return self.inputs | self.params | self.outputs


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
        "dropout_0",
        "dropout_1",
        "dropout_2",
    }
)
_OUTPUTS = frozenset({"O", "Stats", "score_max", "score_sum_exp", "rng_dump"})
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
        "_dropout_n",
        "dropout_0",
        "dropout_1",
        "dropout_2",
    }
)


def _bounds(op: str) -> frozenset[str]:
    names = SPELLINGS[op]
    return frozenset({names.left, names.right, names.window})


ARGUMENTS = {
    "sdpa": Arguments(
        inputs=_INPUTS | {"bias", "block_mask", "kv_mask"},
        outputs=_OUTPUTS,
        params=_PARAMS | _bounds("sdpa") | {"score_mod"},
    ),
    "sdpa_fp8": Arguments(
        inputs=_INPUTS | set(FP8_SCALES),
        outputs=_OUTPUTS | {"Amax_S", "Amax_O", "sf_o"},
        params=_PARAMS | _bounds("sdpa_fp8") | {"fn"},
    ),
}


def unknown_arguments(node: NodeRecord) -> tuple[UnknownArgument, ...]:
    """Captured names that the op does not define, each with the nearest name it does."""
    known = ARGUMENTS[node.op]
    # a number where a scale tensor belongs is a malformation, not an unknown name
    params = known.params | set(FP8_SCALES if node.op == "sdpa_fp8" else ())
    found = []
    for kind, names, defined in (
        ("input", node.inputs, known.inputs),
        ("output", node.outputs, known.outputs),
        ("param", node.params, params),
    ):
        for name in names:
            if name not in defined:
                near = difflib.get_close_matches(name, sorted(known.keywords), 1, 0.6)
                nearest = near[0] if near else ""
                found.append(UnknownArgument(kind=kind, name=name, nearest=nearest))  # type: ignore
    return tuple(found)

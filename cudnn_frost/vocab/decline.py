"""Why a row, a kernel configuration or a plan says no: one record, rendered in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class DeclineCode(str, Enum):
    """The closed list of reasons. Append-only: callers match on the value."""

    # the declaration itself
    MALFORMED = "malformed"
    UNKNOWN_ARGUMENT = "unknown_argument"
    OP = "op"
    GRAPH_SHAPE = "graph_shape"
    # the machine
    TARGET = "target"
    DEPENDENCY = "dependency"
    NO_KERNEL = "no_kernel"
    UNQUALIFIED = "unqualified"
    DISABLED = "disabled"
    # types and extents
    INPUT_DTYPE = "input_dtype"
    OUTPUT_DTYPE = "output_dtype"
    COMPUTE_DTYPE = "compute_dtype"
    HEAD_DIM = "head_dim"
    HEAD_COUNT = "head_count"
    EXTENT = "extent"
    # layout
    STRIDE = "stride"
    RAGGED = "ragged"
    PAGED_KV = "paged_kv"
    PAGED_D_SHAPE = "paged_d_shape"
    PAGE_SIZE = "page_size"
    PAGE_TABLE = "page_table"
    # lengths and masks
    LENGTHS = "lengths"
    MASK = "mask"
    # features
    SCALE = "scale"
    SINK = "sink"
    BIAS = "bias"
    ALIBI = "alibi"
    BLOCK_MASK = "block_mask"
    KV_MASK = "kv_mask"
    DROPOUT = "dropout"
    SCORE_MOD = "score_mod"
    PRECISION = "precision"
    OVERRIDE_SHAPE = "override_shape"
    # outputs
    STATS = "stats"
    AMAX = "amax"
    EXTRA_OUTPUT = "extra_output"
    # the plan
    KERNEL_CONFIG = "kernel_config"
    BUILD = "build"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Decline:
    """One named reason.

    code: what kind of reason.
    subject: the operand or parameter, dotted (`k.stride[1]`, `diagonal_band_left_bound`).
    got: the declared value, as text.
    want: what would be taken, as text.
    remedy: what the caller can change, one imperative sentence; empty when there is nothing.
    """

    code: DeclineCode
    subject: str
    got: str
    want: str
    remedy: str = ""

    def render(self) -> str:
        """The one text form: `code: subject is GOT; takes WANT. Remedy.`"""
        text = f"{self.code}: {self.subject} is {self.got}; takes {self.want}"
        return f"{text}. {self.remedy}" if self.remedy else text

    def as_dict(self) -> dict[str, str]:
        """JSON form; keys as the field names."""
        return {key: str(value) for key, value in asdict(self).items()}

    def __str__(self) -> str:
        return self.render()

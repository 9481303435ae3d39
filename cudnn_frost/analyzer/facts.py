"""What an attention declaration says, in one normal form. Facts describe; rows judge.

Every field is a statement about the declaration. Spellings are resolved (a causal flag, a bound
and a window become one `Band`), outputs count as requested only when the caller made them real,
and nothing is rejected here: what contradicts itself is listed in `malformations`, what no builder
knows in `unknown_arguments`, and a row turns both into declines.
"""

from __future__ import annotations

from typing import Literal

from ..vocab import DType
from .record import Frozen

Alignment = Literal["TOP_LEFT", "BOTTOM_RIGHT"]


class Ragged(Frozen):
    """Sequence b starts at element `offsets[b] * multiplier` of the operand's base pointer."""

    uid: int
    dtype: DType
    dim: tuple[int, ...]
    multiplier: int = 1


class Operand(Frozen):
    """A bound tensor; dim and stride are elements, in (B, H, S, D) order unless said otherwise."""

    uid: int
    name: str
    dtype: DType
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    ragged: Ragged | None = None


class Lengths(Frozen):
    """How one side states its per-batch lengths.

    form: `none` (every batch has the declared extent), `seq_len` ([B] lengths) or `cu_seq_len`
        ([B+1] prefix sums with leading zero).
    """

    form: Literal["none", "seq_len", "cu_seq_len"] = "none"
    operand: Operand | None = None


class Paging(Frozen):
    """Paged K/V. A side without a table is dense. Pools are [num_pages, H, page_size, D].

    Tables are [B, 1, pages, 1] page indices. pages_per_seq is the K table's extent, V's without
    one; max_seq_len_kv the declared logical maximum, None when not declared.
    """

    k_table: Operand | None = None
    v_table: Operand | None = None
    page_size_k: int | None = None
    page_size_v: int | None = None
    pages_per_seq: int = 0
    max_seq_len_kv: int | None = None


class Band(Frozen):
    """The mask in normal form: key j is visible to query i when

    `j <= i + off + right` (right given) and `j > i + off - left` (left given), with `off` = 0 for
    TOP_LEFT and `len_kv - len_q` for BOTTOM_RIGHT. An unbounded band is always TOP_LEFT.
    spelling: the keyword arguments it was written with.
    """

    alignment: Alignment = "TOP_LEFT"
    left: int | None = None
    right: int | None = None
    spelling: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """`none`, `causal` (right = 0 only), `window` (left given) or `right_bound` (right > 0)."""
        if self.left is None and self.right is None:
            return "none"
        if self.left is not None:
            return "window"
        return "causal" if self.right == 0 else "right_bound"


class Scale(Frozen):
    """attn_scale: `absent` (1.0), `host`, `pass_by_value` (host scalar tensor) or `device`.

    value: known numbers only. operand: the tensor of the last two forms.
    """

    form: Literal["absent", "host", "pass_by_value", "device"] = "absent"
    value: float | None = None
    operand: Operand | None = None


class Dropout(Frozen):
    """`philox` (probability, seed, offset) or `mask` (caller's mask and its scale)."""

    form: Literal["philox", "mask"]
    probability: float | None = None
    seed: Operand | None = None
    offset: Operand | None = None
    mask: Operand | None = None
    scale: Operand | None = None


class Malformation(Frozen):
    """A contradiction in the declaration: the operand or parameter, what it is, what is legal."""

    subject: str
    got: str
    want: str


class UnknownArgument(Frozen):
    """A captured port or parameter that the builder does not define.

    kind: `input`, `output` or `param`. nearest: the closest known name, empty when none is close.
    """

    kind: Literal["input", "output", "param"]
    name: str
    nearest: str = ""


class SdpaFacts(Frozen):
    """One forward attention node; extents are logical: s_kv when paged is the declared maximum."""

    op: Literal["sdpa", "sdpa_fp8"]
    name: str = ""

    b: int
    h_q: int
    h_k: int
    h_v: int
    s_q: int
    s_kv: int
    d_qk: int
    d_v: int

    # k and v are the pools when paged
    q: Operand
    k: Operand
    v: Operand
    o: Operand
    o_virtual: bool = False

    band: Band = Band()
    padding: bool = False
    seq_len_q: Lengths = Lengths()
    seq_len_kv: Lengths = Lengths()
    paging: Paging | None = None
    max_total_seq_len_q: int | None = None
    max_total_seq_len_kv: int | None = None

    attn_scale: Scale = Scale()
    attn_scale_prefolded: bool = False
    # [1, 1, 1, 1] float tensors; None = not declared
    descale_q: Operand | None = None
    descale_k: Operand | None = None
    descale_v: Operand | None = None
    descale_s: Operand | None = None
    scale_s: Operand | None = None
    scale_o: Operand | None = None

    sink: Operand | None = None
    bias: Operand | None = None
    alibi: bool = False
    block_mask: Operand | None = None
    kv_mask: Operand | None = None
    dropout: Dropout | None = None
    score_mod: bool = False

    # outputs the caller made real; a virtual or undeclared one is None
    generate_stats: bool = False
    stats: Operand | None = None
    stats_use_log2: bool = False
    score_max: Operand | None = None
    score_sum_exp: Operand | None = None
    rng_dump: Operand | None = None
    sf_o: Operand | None = None
    amax_s: Operand | None = None
    amax_o: Operand | None = None

    compute_dtype: DType = DType.NOT_SET
    softmax_precision: DType | None = None
    unfuse_fma: bool = False
    implementation: str = "AUTO"
    override_shape_enabled: bool = False
    replay_expected: bool = False

    malformations: tuple[Malformation, ...] = ()
    unknown_arguments: tuple[UnknownArgument, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per K head (0 when they do not divide)."""
        return self.h_q // self.h_k if self.h_k and self.h_q % self.h_k == 0 else 0

    @property
    def is_ragged(self) -> bool:
        """Any of Q, K, V, O is packed (THD)."""
        return any(x.ragged is not None for x in (self.q, self.k, self.v, self.o))

    @property
    def ragged(self) -> tuple[str, ...]:
        """The fields whose operand is packed."""
        names = ("q", "k", "v", "o", "stats", "score_max", "score_sum_exp")
        return tuple(n for n in names if (x := getattr(self, n)) is not None and x.ragged)

    def operands(self) -> dict[str, Operand]:
        """Every bound tensor by where it stands (`q`, `seq_len_kv`, `paging.k_table`,
        `dropout.mask`, `q.ragged_offset`); an operand named twice appears under both."""
        found: dict[str, Operand] = {}

        def visit(path: str, value: object) -> None:
            if isinstance(value, Operand):
                found[path] = value
                if value.ragged is not None:
                    ragged = value.ragged
                    stride = (1,) * len(ragged.dim)
                    found[f"{path}.ragged_offset"] = Operand(
                        uid=ragged.uid,
                        name=f"{value.name or path}.ragged_offset",
                        dtype=ragged.dtype,
                        dim=ragged.dim,
                        stride=stride,
                    )
            elif isinstance(value, (Lengths, Scale)):
                visit(path, value.operand)
            elif isinstance(value, (Paging, Dropout)):
                for name in type(value).model_fields:
                    visit(f"{path}.{name}", getattr(value, name))

        for name in _BEARING:
            visit(name, getattr(self, name))
        return found

    @property
    def output_dtype(self) -> DType:
        """O's dtype."""
        return self.o.dtype

    @property
    def mixed_output(self) -> bool:
        """O has another type than Q."""
        return self.o.dtype is not self.q.dtype

    @property
    def d_shape(self) -> tuple[int, int]:
        """(d_qk, d_v)."""
        return self.d_qk, self.d_v

    @property
    def mask(self) -> str:
        """The band's kind, `_bottom_right` appended where the alignment matters."""
        kind = self.band.kind
        return kind if self.band.alignment == "TOP_LEFT" else f"{kind}_bottom_right"

    @property
    def length_forms(self) -> tuple[str, str]:
        """(Q side, KV side), each `none`, `seq_len` or `cu_seq_len`."""
        return self.seq_len_q.form, self.seq_len_kv.form

    @property
    def paged_kv(self) -> bool:
        """K or V is a pool behind a page table."""
        return self.paging is not None

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Declared page sizes, K's first; empty when not paged."""
        paging = self.paging
        sizes = (paging.page_size_k, paging.page_size_v) if paging else ()
        return tuple(x for x in sizes if x is not None)

    @property
    def kv_capacity(self) -> int:
        """Keys of a sequence there is memory for: the declared maximum, and each side's extent or
        its table's pages, whichever is least."""
        paging, room = self.paging, [self.s_kv]
        tables = (paging.k_table, paging.v_table) if paging else (None, None)
        for operand, table in zip((self.k, self.v), tables, strict=True):
            room.append(operand.dim[2] * (table.dim[2] if table is not None else 1))
        return min(room)


_HOLDERS = ("Operand", "Lengths", "Scale", "Paging", "Dropout")
# the fields that can hold a tensor, in order
_BEARING = tuple(
    name
    for name, field in SdpaFacts.model_fields.items()
    if any(holder in str(field.annotation) for holder in _HOLDERS)
)


class Analysis(Frozen):
    """The analyzer's answer for a whole graph.

    facts: the forward attention node's facts, None when there is none to give.
    ops: every node's op, in order.
    malformations: what kept facts from being made (a missing Q, a rank that cannot be read).
    """

    facts: SdpaFacts | None = None
    ops: tuple[str, ...] = ()
    malformations: tuple[Malformation, ...] = ()

"""What a row can do, stated as data. A field carries the name of the fact it answers."""

from __future__ import annotations

from dataclasses import dataclass

from ..vocab import DType

Flavor = tuple[int, int]

ALL_MASKS = frozenset(
    {
        "none",
        "causal",
        "causal_bottom_right",
        "window",
        "window_bottom_right",
        "right_bound",
        "right_bound_bottom_right",
    }
)
"""Every name `SdpaFacts.mask` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Everything a row accepts; a declared value outside is declined by the rule of that field.

    op: builder names.
    cc: compute capabilities; None = any machine, CPU included.
    packages: (distribution, minimum version) the row needs installed.
    input_dtype: of Q, K and V, which must agree.
    output_dtype: of O.
    mixed_output: O may have another type than Q.
    d_shapes: (d_qk, d_v) flavors; the smallest that covers serves. None = any.
    paged_d_shapes: the flavors that serve paged K/V. None = any.
    d_multiple: head dims must be a multiple.
    d_floor: head dims up to it belong to a smaller flavor, which the row does not have.
    stride_alignment: bytes that every stride of Q, K, V and O must be a multiple of (1 = free).
    stride_limit: bytes that every stride must stay below, from 0 on (0 = free).
    extent_limit: what every extent must stay below, from 1 on (0 = free).
    mask: names as `SdpaFacts.mask`.
    padding, length_forms: per-batch lengths, and the forms either side may take.
    ragged: fields that may be packed.
    page_sizes: accepted page sizes; None = any.
    split_kv_heads: K and V may have different head counts.
    attn_scale: accepted forms, as `Scale.form`.
    dropout: accepted forms, as `Dropout.form`.
    softmax_precision: accepted requests; an undeclared precision is always accepted.
    The rest are features, True when served.
    """

    op: frozenset[str]
    cc: frozenset[tuple[int, int]] | None
    packages: tuple[tuple[str, str], ...] = ()
    input_dtype: frozenset[DType]
    output_dtype: frozenset[DType]
    mixed_output: bool = False
    d_shapes: tuple[Flavor, ...] | None
    d_multiple: int = 1
    d_floor: int = 0
    stride_alignment: int = 1
    stride_limit: int = 0
    extent_limit: int = 0
    mask: frozenset[str]
    padding: bool = False
    length_forms: frozenset[str] = frozenset({"none"})
    ragged: frozenset[str] = frozenset()
    paged_kv: bool = False
    paged_d_shapes: tuple[Flavor, ...] | None = ()
    page_sizes: frozenset[int] | None = frozenset()
    split_kv_heads: bool = False
    attn_scale: frozenset[str] = frozenset({"absent", "host", "pass_by_value"})
    attn_scale_prefolded: bool = False
    sink: bool = False
    bias: bool = False
    alibi: bool = False
    block_mask: bool = False
    kv_mask: bool = False
    dropout: frozenset[str] = frozenset()
    score_mod: bool = False
    stats: bool = True
    stats_use_log2: bool = False
    score_max: bool = False
    score_sum_exp: bool = False
    rng_dump: bool = False
    sf_o: bool = False
    amax_s: bool = False
    amax_o: bool = False
    softmax_precision: frozenset[DType] = frozenset({DType.FLOAT})
    override_shape_enabled: bool = False

    def flavor(self, d_shape: Flavor, paged: bool = False) -> Flavor | None:
        """The smallest flavor covering (d_qk, d_v), the shape itself when any is taken, or None."""
        flavors = self.paged_d_shapes if paged else self.d_shapes
        if flavors is None:
            return d_shape
        covering = [f for f in flavors if f[0] >= d_shape[0] and f[1] >= d_shape[1]]
        return min(covering, key=sum, default=None)

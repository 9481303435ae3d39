"""Random legal graphs of the whole sdpa / sdpa_fp8 contract.

`draw_case(rng, scope)` decides everything about one graph as plain data (a `Case`), `Case.build`
declares it and makes its buffers. A `Scope` says what may be drawn, so one generator serves small
CPU checks and kernel fuzzing on a GPU. `cases(scope)` is the hypothesis strategy; the first choice
of every decision is the plainest, which is where shrinking ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .declaration import Band

FEATURES = (
    "padding",  # lengths on both sides; needed by the next ten
    "zero_length",  # batches of length 0 on either side
    "cu_seq_len",  # prefix sums instead of lengths, per side
    "rank1_lengths",  # [B] instead of [B,1,1,1]
    "overlong",  # len_kv past the declared maximum or the table's capacity
    "ragged_q",  # Q, O (and mostly Stats) packed
    "ragged_kv",  # K and V packed
    "ragged_gaps",  # origins with gaps, out of order, a capacity tail
    "ragged_stats_dense",  # Stats and score_* padded per batch under a packed Q
    "max_total",  # max_total_seq_len_q / _kv
    "paging",  # K and V in pages
    "one_table",  # only one of K and V in pages
    "unequal_pages",  # other page size for V
    "shared_table",  # one table tensor for both
    "wide_table",  # columns past the last live page, non-unit strides
    "prefix_pages",  # one page in two batches
    "bias",
    "alibi",
    "sink",
    "extreme_sink",  # -1000 and +100
    "dropout",  # the caller's mask
    "kv_mask",
    "prefolded",  # attn_scale_prefolded
    "softmax_precision",
    "stats",
    "virtual_stats",  # asked for, left virtual
    "log2",
    "score_outputs",
    "amax",  # real Amax_S and Amax_O
    "tensor_scale",  # attn_scale as a device, host or embedded scalar
    "plain_scale",  # no attn_scale at all
    "zero_scale",
    "negative_scale",
    "uneven_heads",  # Hk != Hv
    "unpaired_fp8_scales",  # scale_s * descale_s != 1
    "half_scale_o",  # scale_o != 1 with a 16-bit O
    "low_scores",  # every score near -100
    "v_mean",  # V of mean 1
    "inert_words",  # alignment without a bound, flags set to False, hints
    "shared_offsets",  # one ragged offset tensor for several ports
    "flat_buffers",  # 1-D buffers read as the declaration
    "is_inference",  # the deprecated spelling
    "int_scale",  # attn_scale as a Python int; the backend refuses it
    "nonpositive_left",  # left bound 0 or below: legal to validate, a rule of its own
)
# what a feature cannot be without, besides padding
NEEDS = {
    "one_table": ("paging",),
    "unequal_pages": ("paging",),
    "shared_table": ("paging",),
    "wide_table": ("paging",),
    "prefix_pages": ("paging",),
    "ragged_gaps": ("ragged_q",),
    "ragged_stats_dense": ("ragged_q",),
    "max_total": ("ragged_q",),
    "shared_offsets": ("ragged_q",),
}
DEFAULT_FEATURES = frozenset(FEATURES) - {"int_scale", "nonpositive_left"}
_NEED_PADDING = frozenset(FEATURES[1:16])
# how often against Scope.rate: what other features build on, and what few engines serve
_WEIGHTS = {"padding": 2.6, "stats": 2.8, "paging": 1.6, "ragged_q": 1.4, "ragged_kv": 1.4}
_WEIGHTS |= dict.fromkeys(("prefolded", "softmax_precision", "kv_mask", "dropout"), 0.5)
MASKS = (
    "none",
    "causal",
    "causal_br",
    "window",
    "window_br",
    "band",
    "band_br",
    "left",
    "left_br",
)
LAYOUTS = ("bhsd", "bshd", "sbhd", "hbsd", "padded", "odd", "qkv", "kv", "bcast_b", "bcast_h")
OUT_LAYOUTS = ("bhsd", "bshd", "sbhd", "padded", "odd")
RAGGED_LAYOUTS = ("thd", "padded", "htd", "qkv", "kv")
POOL_LAYOUTS = ("hnd", "nhd", "padded", "kv")


@dataclass(frozen=True)
class Scope:
    """What may be drawn. Ranges are (least, most). `always` names features that are on wherever the
    other draws allow it. `odd` layouts have strides that are not multiples of 16 bytes."""

    ops: tuple[str, ...] = ("sdpa", "sdpa_fp8")
    io_dtypes: tuple[str, ...] = ("BFLOAT16", "HALF")
    fp8_dtypes: tuple[str, ...] = ("FP8_E4M3", "FP8_E5M2")
    fp8_o_dtypes: tuple[str, ...] = ("FP8_E4M3", "FP8_E5M2", "HALF", "BFLOAT16")
    head_dims: tuple[tuple[int, int], ...] = ((16, 16), (8, 8), (64, 64), (32, 16), (24, 40))
    batch: tuple[int, int] = (1, 4)
    s_q: tuple[int, int] = (1, 24)
    s_kv: tuple[int, int] = (1, 48)
    kv_heads: tuple[int, int] = (1, 3)
    groups: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 12, 16)
    max_heads: int = 24
    page_sizes: tuple[int, ...] = (16, 8, 1, 4, 32)
    masks: tuple[str, ...] = MASKS
    layouts: tuple[str, ...] = LAYOUTS
    out_layouts: tuple[str, ...] = OUT_LAYOUTS
    ragged_layouts: tuple[str, ...] = RAGGED_LAYOUTS
    pool_layouts: tuple[str, ...] = POOL_LAYOUTS
    features: frozenset[str] = DEFAULT_FEATURES
    always: frozenset[str] = frozenset()
    rate: float = 0.25

    def __post_init__(self) -> None:
        unknown = (self.features | self.always) - set(FEATURES)
        if unknown:
            raise ValueError(f"unknown features {sorted(unknown)}")

    def without(self, *names: str) -> Scope:
        return replace(self, features=self.features - set(names), always=self.always - set(names))

    def only(self, *names: str) -> Scope:
        return replace(self, features=frozenset(names), always=self.always & set(names))

    def with_always(self, *names: str) -> Scope:
        """With these features and what they cannot be without."""
        wanted = {*names, *(need for name in names for need in NEEDS.get(name, ()))}
        if wanted & _NEED_PADDING:
            wanted.add("padding")
        return replace(self, features=self.features | wanted, always=self.always | wanted)


@dataclass(frozen=True)
class Ragged:
    """Origins of a packed tensor: tokens from the base, one per batch; capacity in tokens; offsets
    count tokens (multiplier = token stride) or elements (multiplier 1)."""

    origins: tuple[int, ...]
    capacity: int
    in_tokens: bool
    dtype: str


@dataclass(frozen=True)
class Paging:
    """Page size per paged side (None: that side is dense), table columns per side, pool layout."""

    k: int | None
    v: int | None
    columns_k: int
    columns_v: int
    maximum: bool
    shared: bool
    pool: str
    table: str
    spare: int


@dataclass(frozen=True)
class Lengths:
    """Lengths per batch as bound (kv may exceed the extent); form 'seq' or 'cu'; rank 4 or 1."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    q_form: str
    kv_form: str
    rank1: bool
    cu_dtype: str


@dataclass(frozen=True)
class Case:
    """One drawn graph. skv is the logical number of keys. layouts per port; words are the mask
    keywords as spelled (alignments by name) and band their meaning; fp8 the six scales."""

    op: str
    dtype: str
    o_dtype: str
    b: int
    hq: int
    hk: int
    hv: int
    sq: int
    skv: int
    dqk: int
    dv: int
    layouts: dict[str, str]
    band: Band
    words: dict[str, Any]
    lengths: Lengths | None
    ragged: dict[str, Ragged]
    paging: Paging | None
    scale: tuple[str, float]
    bias: tuple[bool, bool, str, int] | None
    kv_mask: tuple[str, bool] | None
    fp8: dict[str, float]
    on: frozenset[str]
    first_uid: int
    seed: int
    stats_layout: str = "row"

    @property
    def len_q(self) -> tuple[int, ...]:
        return self.lengths.q if self.lengths else (self.sq,) * self.b

    @property
    def len_kv(self) -> tuple[int, ...]:
        """Live keys per batch."""
        if not self.lengths:
            return (self.skv,) * self.b
        return tuple(min(n, self.skv) for n in self.lengths.kv)

    def build(self, graph_factory=None, device: str = "cpu"):
        """Declare the graph with `graph_factory(io_data_type=, intermediate_data_type=,
        compute_data_type=)` (default `cudnn.pygraph`) and make its buffers; a `build.Built`."""
        from .build import build

        return build(self, graph_factory, device)


def draw_case(rng: random.Random, scope: Scope | None = None) -> Case:
    """One legal case inside the scope."""
    return _Draw(rng.randrange, scope or Scope()).case()


def cases(scope: Scope | None = None):
    """Hypothesis strategy of the same cases; every decision is one drawn integer."""
    from hypothesis import strategies as st

    @st.composite
    def strategy(draw) -> Case:
        return _Draw(lambda n: draw(st.integers(0, n - 1)), scope or Scope()).case()

    return strategy()


class _Draw:
    """The decisions of one case, in an order in which each only depends on earlier ones.

    `below(n)` is the only source of chance: an integer in [0, n), 0 being the plainest.
    """

    def __init__(self, below: Callable[[int], int], scope: Scope) -> None:
        self.below, self.scope = below, scope

    def pick(self, options):
        options = list(options)
        return options[self.below(len(options))]

    def chance(self, p: float) -> bool:
        """True with probability p, to a hundredth."""
        return self.below(100) >= round(100 * (1.0 - p))

    def between(self, low: int, high: int) -> int:
        """An integer of [low, high], `low` if that is empty."""
        return low + self.below(max(1, high - low + 1))

    def shuffled(self, items: list[int]) -> list[int]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]

    # -- what is on -------------------------------------------------------------------------------

    def features(self, op: str, mask: str) -> set[str]:
        scope = self.scope
        on = {f for f in FEATURES if f in scope.features and self.chance(self._rate(f))}
        if scope.always & _NEED_PADDING:
            on |= {"padding"} & scope.features
        if "padding" not in on:
            on -= _NEED_PADDING
        if op == "sdpa_fp8":
            on -= {"bias", "kv_mask"}
        else:
            on -= {"amax", "unpaired_fp8_scales", "half_scale_o"}
        if mask.endswith("_br"):
            on -= {"bias", "alibi", "dropout", "overlong"}
        if mask not in ("causal", "window"):
            on -= {"alibi"}
        if "paging" in on:
            on -= {"ragged_kv", "kv_mask"}
        else:
            on -= {"one_table", "unequal_pages", "shared_table", "wide_table", "prefix_pages"}
        if "ragged_kv" in on:
            on -= {"overlong", "kv_mask"}
        if "prefolded" in on:
            on -= {"tensor_scale", "plain_scale", "zero_scale", "negative_scale", "int_scale"}
            on -= {"low_scores"}
        if on & {"zero_scale", "negative_scale", "plain_scale"}:
            on -= {"low_scores"}
        if "ragged_q" not in on:
            on -= {"ragged_stats_dense"}
        if not on & {"ragged_q", "ragged_kv"}:
            on -= {"ragged_gaps", "max_total", "shared_offsets"}
        if "stats" in on:
            on -= {"virtual_stats"}
        if "shared_table" in on:
            on -= {"one_table", "unequal_pages"}
        if "one_table" in on:
            on -= {"unequal_pages"}
        return on

    def _rate(self, feature: str) -> float:
        if feature in self.scope.always:
            return 1.0
        return min(1.0, self.scope.rate * _WEIGHTS.get(feature, 1.0))

    def mask(self) -> str:
        """A kind of mask that the required features allow."""
        always, masks = self.scope.always, self.scope.masks
        if always & {"bias", "dropout", "overlong"}:
            masks = tuple(m for m in masks if not m.endswith("_br")) or masks
        if "alibi" in always:
            masks = tuple(m for m in masks if m in ("causal", "window")) or masks
        return self.pick(masks)

    # -- the case ---------------------------------------------------------------------------------

    def case(self) -> Case:
        scope = self.scope
        op, mask = self.pick(scope.ops), self.mask()
        fp8 = op == "sdpa_fp8"
        dtype = self.pick(scope.fp8_dtypes if fp8 else scope.io_dtypes)
        o_dtype = self.pick(scope.fp8_o_dtypes) if fp8 else dtype
        on = self.features(op, mask)
        if fp8 and "dropout" in on:
            on.discard("amax")
        b = self.between(*scope.batch)
        hq, hk, hv = self.heads("uneven_heads" in on)
        step = 16 if fp8 else 8
        dqk, dv = self.pick([d for d in scope.head_dims if not (d[0] % step or d[1] % step)])
        sq, skv = self.extents(mask, on)
        paging, skv = self.paging(skv, on)
        layouts = self.layouts(on, dqk == dv and paging is None)
        if layouts["q"] == "qkv":
            sq, skv = (skv, skv) if skv <= scope.s_q[1] else (sq, sq)
        lengths = self.lengths(b, sq, skv, on, layouts["q"] == "qkv")
        band = self.band(mask, sq, skv)
        return Case(
            op=op,
            dtype=dtype,
            o_dtype=o_dtype,
            b=b,
            hq=hq,
            hk=hk,
            hv=hv,
            sq=sq,
            skv=skv,
            dqk=dqk,
            dv=dv,
            layouts=layouts,
            band=band,
            words=self.words(op, band, on),
            lengths=lengths,
            ragged=self.ragged(lengths, on, layouts),
            paging=paging,
            scale=self.scale(dqk, on),
            bias=self.bias(dtype) if "bias" in on else None,
            kv_mask=self.kv_mask(skv) if "kv_mask" in on else None,
            fp8=self.fp8_scales(o_dtype, on) if fp8 else {},
            on=frozenset(on),
            first_uid=self.pick((1, 1, 100, 0)),
            seed=self.below(2**31),
            stats_layout=self.pick(("row", "nh", "padded")),
        )

    def heads(self, uneven: bool) -> tuple[int, int, int]:
        """(Hq, Hk, Hv); Hk and Hv both divide Hq."""
        scope = self.scope
        group = self.pick(scope.groups)
        kv = self.between(*scope.kv_heads)
        while kv > 1 and kv * group > scope.max_heads:
            kv -= 1
        hq = kv * group
        if not uneven:
            return hq, kv, kv
        hv = self.pick([h for h in range(1, hq + 1) if hq % h == 0])
        return (hq, kv, hv) if self.chance(0.5) else (hq, hv, kv)

    def extents(self, mask: str, on: set[str]) -> tuple[int, int]:
        """(Sq, Skv). Without padding a bottom-right bound and a left bound need Sq <= Skv."""
        scope = self.scope
        sq = 1 if self.chance(0.2) and scope.s_q[0] <= 1 else self.between(*scope.s_q)
        low, high = scope.s_kv
        if "padding" not in on and mask not in ("none", "causal"):
            sq = min(sq, high)
            low = max(low, sq)
        skv = self.between(low, high)
        if "kv_mask" in on and self.chance(0.5):
            skv = -(-skv // 8) * 8
        return sq, skv

    def paging(self, skv: int, on: set[str]) -> tuple[Paging | None, int]:
        """Pages, and the logical number of keys: the table's capacity unless a maximum is set."""
        if "paging" not in on:
            return None, skv
        scope = self.scope
        k = v = self.pick(scope.page_sizes)
        maximum = self.chance(0.5) or "unequal_pages" in on
        if "unequal_pages" in on:
            v = self.pick(scope.page_sizes)
        extra = self.between(1, 3) if "wide_table" in on else 0
        columns_k, columns_v = -(-skv // k) + extra, -(-skv // v) + extra
        if not maximum:
            skv = columns_k * k
        one = "one_table" in on
        keep_k = not one or self.chance(0.5)
        return Paging(
            k=k if keep_k else None,
            v=v if not (one and keep_k) else None,
            columns_k=columns_k,
            columns_v=columns_v,
            maximum=maximum,
            shared="shared_table" in on,
            pool=self.pick([p for p in scope.pool_layouts if p != "kv" or k == v]),
            table=self.pick(("row", "wide", "strided")) if "wide_table" in on else "row",
            spare=self.between(1, 4),
        ), skv

    def layouts(self, on: set[str], joint: bool) -> dict[str, str]:
        """Layout of q, k, v, o. 'qkv' and 'kv' are joint: one allocation, heads side by side."""
        scope = self.scope
        ragged_q, ragged_kv = "ragged_q" in on, "ragged_kv" in on
        names = {True: scope.ragged_layouts, False: scope.layouts}
        single = {
            r: [n for n in names[r] if n not in ("qkv", "kv", "bcast_b", "bcast_h")] for r in names
        }
        keys = single[ragged_kv] + [n for n in names[ragged_kv] if n.startswith("bcast")]
        out = {
            "q": self.pick(single[ragged_q]),
            "k": self.pick(keys),
            "v": self.pick(keys),
            "o": self.pick(single[True] if ragged_q else scope.out_layouts),
        }
        if "paging" in on:
            keep = single[False]
            return {**out, "k": self.pick(keep), "v": self.pick(keep)}
        shared = self.pick(names[ragged_kv])
        if shared == "qkv" and joint and ragged_q == ragged_kv:
            return {**out, "q": "qkv", "k": "qkv", "v": "qkv"}
        if shared in ("qkv", "kv") and joint:
            return {**out, "k": "kv", "v": "kv"}
        return out

    def lengths(self, b: int, sq: int, skv: int, on: set[str], packed: bool) -> Lengths | None:
        if "padding" not in on:
            return None
        least = 0 if "zero_length" in on else 1
        q = tuple(self.length(least, sq) for _ in range(b))
        kv = tuple(self.length(least, skv) for _ in range(b))
        if packed and on & {"ragged_q", "ragged_kv"}:
            kv = q
        elif "overlong" in on:
            over = self.between(0, b - 1)
            more = self.between(1, 40)
            kv = tuple(skv + more if i == over else n for i, n in enumerate(kv))
        forms = ("seq", "cu") if "cu_seq_len" in on else ("seq",)
        return Lengths(
            q=q,
            kv=kv,
            q_form=self.pick(forms),
            kv_form=self.pick(forms),
            rank1="rank1_lengths" in on,
            cu_dtype=self.pick(("INT32", "INT64")),
        )

    def length(self, least: int, most: int) -> int:
        kind = self.pick(("full", "any", "any", "one", "least"))
        if kind == "full":
            return most
        return self.between(least, most) if kind == "any" else {"one": 1, "least": least}[kind]

    # -- masks ------------------------------------------------------------------------------------

    def band(self, mask: str, sq: int, skv: int) -> Band:
        kind, bottom_right = mask.removesuffix("_br"), mask.endswith("_br")
        if kind == "none":
            return Band(False, None, None)
        if kind == "causal":
            return Band(bottom_right, None, 0)
        low = -2 if "nonpositive_left" in self.scope.features else 1
        left = self.pick((1, self.between(low, max(sq, skv)), skv + sq + 3))
        right = self.pick((0, self.between(1, max(1, skv // 2)), skv + sq))
        if kind == "window":
            return Band(bottom_right, left, 0)
        if kind == "left":
            return Band(bottom_right, left, None)
        return Band(bottom_right, left if self.chance(0.5) else None, right)

    def words(self, op: str, band: Band, on: set[str]) -> dict[str, Any]:
        """One of the spellings of a band (contract 1.2, 1.3, 1.5)."""
        fp8 = op == "sdpa_fp8"
        right_word = "right_bound" if fp8 else "diagonal_band_right_bound"
        old = "sliding_window" if fp8 else "sliding_window_length"
        left_word = self.pick(("left_bound" if fp8 else "diagonal_band_left_bound", old))
        words: dict[str, Any] = {}
        if band.left is not None:
            words[left_word] = band.left
        name = "BOTTOM_RIGHT" if band.bottom_right else "TOP_LEFT"
        inert = "inert_words" in on
        # sdpa_fp8 with ALiBi: validate() reads a right bound of 0 off the flag only
        if band.right == 0 and (self.chance(0.5) or (fp8 and "alibi" in on)):
            flag = "use_causal_mask_bottom_right" if band.bottom_right else "use_causal_mask"
            words[flag] = True
            if inert:  # the flag's alignment wins
                words["diagonal_alignment"] = self.pick(("TOP_LEFT", "BOTTOM_RIGHT"))
            return words
        if band.right is not None:
            words[right_word] = band.right
        if band.bottom_right or (inert and band != Band(False, None, None)):
            words["diagonal_alignment"] = name
        if inert:
            words["use_causal_mask"] = False
            if band == Band(False, None, None):
                words["diagonal_alignment"] = self.pick(("TOP_LEFT", "BOTTOM_RIGHT"))
        return words

    # -- operands ---------------------------------------------------------------------------------

    def ragged(self, lengths: Lengths | None, on: set[str], layouts) -> dict[str, Ragged]:
        """Packed ports. Q's origins serve O and Stats or they have their own; so K's and V."""
        if lengths is None:
            return {}
        out: dict[str, Ragged] = {}
        if "ragged_q" in on:
            out["q"] = self.origins(lengths.q, on)
            for port in ("o", "stats"):
                if port == "o" or "ragged_stats_dense" not in on:
                    out[port] = self.again(out["q"], lengths.q, on)
        if "ragged_kv" in on:
            joint = layouts["q"] == "qkv"
            out["k"] = self.units(out["q"]) if joint else self.origins(lengths.kv, on)
            shared = layouts["v"] in ("qkv", "kv")
            out["v"] = self.units(out["k"]) if shared else self.again(out["k"], lengths.kv, on)
        return out

    def again(self, like: Ragged, lengths: tuple[int, ...], on: set[str]) -> Ragged:
        return self.origins(lengths, on) if self.chance(0.3) else self.units(like)

    def units(self, like: Ragged) -> Ragged:
        return replace(like, in_tokens=self.chance(0.5))

    def origins(self, lengths: tuple[int, ...], on: set[str]) -> Ragged:
        gaps = "ragged_gaps" in on
        order = list(range(len(lengths)))
        if gaps and self.chance(0.5):
            order = self.shuffled(order)
        origins, at = [0] * len(lengths), 0
        for b in order:
            at += self.between(0, 5) if gaps else 0
            origins[b] = at
            at += lengths[b]
        tail = self.between(0, 9) if gaps else 0
        dtype = self.pick(("INT32", "INT64"))
        return Ragged(tuple(origins), max(1, at + tail), self.chance(0.5), dtype)

    def scale(self, dqk: int, on: set[str]) -> tuple[str, float]:
        """(form, value): 'none', 'float', 'int', 'device', 'host' or 'embedded'."""
        if "prefolded" in on:
            return "prefolded", dqk**-0.5
        if "plain_scale" in on:
            return "none", 1.0
        value = dqk**-0.5
        if "zero_scale" in on:
            value = 0.0
        elif "negative_scale" in on:
            value = -value
        elif self.chance(0.3):
            value *= self.between(1, 8) / 4
        if "int_scale" in on:
            return "int", 1.0
        forms = ("device", "host", "embedded") if "tensor_scale" in on else ("float",)
        return self.pick(forms), value

    def bias(self, dtype: str) -> tuple[bool, bool, str, int]:
        """(one batch, one head, dtype, elements between rows past Skv)."""
        return self.chance(0.5), self.chance(0.5), self.pick((dtype, "FLOAT")), self.pick((0, 8))

    def kv_mask(self, skv: int) -> tuple[str, bool]:
        """(dtype, one batch). The additive form needs a multiple of 8 keys."""
        kinds = ("BOOLEAN",) if skv % 8 else ("BOOLEAN", "FLOAT", "IO")
        return self.pick(kinds), self.chance(0.5)

    def fp8_scales(self, o_dtype: str, on: set[str]) -> dict[str, float]:
        power = {p: 2.0 ** self.pick((0, -1, 1)) for p in ("descale_q", "descale_k", "descale_v")}
        scale_s = self.pick((1.0, 256.0, 0.5))
        descale_s = 1.0 / scale_s
        if "unpaired_fp8_scales" in on:
            descale_s *= self.pick((2.0, 0.5, 3.0))
        scale_o = self.pick((1.0, 2.0, 0.25, 48.0))
        if not o_dtype.startswith("FP8") and "half_scale_o" not in on:
            scale_o = 1.0
        return {**power, "scale_s": scale_s, "descale_s": descale_s, "scale_o": scale_o}

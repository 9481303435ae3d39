"""What a graph with one sdpa node declares, and where its bound buffers hold it.

Only the public IR is read (`graph.nodes`, ports, params, tensor attributes; contract 2.1), so a
graph needs neither libcudnn nor a GPU. A bound buffer lends its storage from its data pointer on;
what is in it is decided by the declaration alone: dim, stride, dtype, ragged offset (contract 1.4).
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass

import torch

DTYPES = {
    "HALF": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "FLOAT": torch.float32,
    "DOUBLE": torch.float64,
    "FP8_E4M3": torch.float8_e4m3fn,
    "FP8_E5M2": torch.float8_e5m2,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOLEAN": torch.bool,
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_LENGTHS = ("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv")
_TABLES = ("paged_attention_k_table", "paged_attention_v_table")
_DROPOUT = ("dropout_0", "dropout_1", "dropout_2")
_COMMON_INPUTS = {"q", "k", "v", "attn_scale", "sink_token", *_LENGTHS, *_TABLES, *_DROPOUT}
_FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
INPUTS = {
    "sdpa": _COMMON_INPUTS | {"bias", "block_mask", "kv_mask"},
    "sdpa_fp8": _COMMON_INPUTS | set(_FP8_SCALES),
}
_COMMON_PARAMS = {
    "attn_scale",
    "use_alibi_mask",
    "use_padding_mask",
    "use_causal_mask",
    "use_causal_mask_bottom_right",
    "diagonal_alignment",
    "_dropout_n",
    "dropout_0",
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
}
# (left bound, its deprecated spelling, right bound, score modifier), contract 1.2 and 1.3
_WORDS = {
    "sdpa": (
        "diagonal_band_left_bound",
        "sliding_window_length",
        "diagonal_band_right_bound",
        "score_mod",
    ),
    "sdpa_fp8": ("left_bound", "sliding_window", "right_bound", "fn"),
}
PARAMS = {op: _COMMON_PARAMS | set(words) for op, words in _WORDS.items()}
OUTPUTS = {
    "sdpa": {"O", "Stats", "score_max", "score_sum_exp", "rng_dump"},
    "sdpa_fp8": {
        "O",
        "Stats",
        "score_max",
        "score_sum_exp",
        "rng_dump",
        "Amax_S",
        "Amax_O",
        "sf_o",
    },
}


@dataclass(frozen=True)
class Band:
    """Which keys a row sees besides padding (contract 1.5); None is an absent bound."""

    bottom_right: bool
    left: int | None
    right: int | None


def resolve_band(op: str, params: Mapping) -> Band:
    """The one meaning of every spelling of the mask words (contract 1.5)."""
    left_word, old_left_word, right_word, _ = _WORDS[op]
    top_left = _flag(params, "use_causal_mask")
    bottom_right = _flag(params, "use_causal_mask_bottom_right")
    left, old_left = _bound(params, left_word), _bound(params, old_left_word)
    right = _bound(params, right_word)
    if top_left and bottom_right:
        raise ValueError("both causal flags are set")
    if (top_left or bottom_right) and right is not None:
        raise ValueError(f"a causal flag and {right_word} are both set")
    if left is not None and old_left is not None:
        raise ValueError(f"{left_word} and {old_left_word} are both set")
    if right is not None and right < 0:
        raise ValueError(f"{right_word} is negative")
    if top_left or bottom_right:
        return Band(bottom_right, old_left if left is None else left, 0)
    alignment = getattr(params.get("diagonal_alignment"), "name", "TOP_LEFT")
    return Band(alignment == "BOTTOM_RIGHT", old_left if left is None else left, right)


def _flag(params: Mapping, name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not a bool")
    return value


def _bound(params: Mapping, name: str) -> int | None:
    value = params.get(name)
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, not an int")
    return value


def alibi_slopes(heads: int) -> list[float]:
    """Slope of each query head (contract 1.5): powers of 2^(-8/n), n the greatest power of two
    up to `heads`, then every other one of the finer sequence for the heads that are left."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
    return slopes + [2.0 ** (-8.0 * 0.5 * (2 * e + 1) / n) for e in range(heads - n)]


class Reader:
    """The tensors of one sdpa node, read out of the bound buffers as declared."""

    def __init__(self, graph, buffers: Mapping[int, torch.Tensor]) -> None:
        nodes = list(graph.nodes)
        if len(nodes) != 1:
            raise ValueError(f"one sdpa node expected, the graph has {len(nodes)}")
        self.node = nodes[0]
        self.op = self.node.node_type.name.lower()
        if self.op not in INPUTS:
            raise NotImplementedError(f"node type {self.node.node_type.name}")
        self.buffers = buffers
        self.io_type = graph.context.io_data_type
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        """Builders take any keyword silently (contract 1.0): an unknown one has no meaning here."""
        node, op = self.node, self.op
        for kind, known in (("inputs", INPUTS), ("params", PARAMS), ("outputs", OUTPUTS)):
            unknown = sorted(set(getattr(node, kind)) - known[op])
            if unknown:
                raise ValueError(f"{op} has no {kind} {unknown}")
        for port in ("block_mask",):
            if port in node.inputs:
                raise NotImplementedError(port)
        for port in ("rng_dump", "sf_o"):
            if port in node.outputs:
                raise NotImplementedError(port)
        for word in ("score_mod", "fn"):
            if word in node.params:
                raise NotImplementedError(word)
        missing = [p for p in _FP8_SCALES if op == "sdpa_fp8" and p not in node.inputs]
        if missing:
            raise ValueError(f"sdpa_fp8 without {missing}")

    # -- attributes -------------------------------------------------------------------------------

    def input(self, port: str):
        return self.node.inputs.get(port)

    def output(self, port: str):
        return self.node.outputs.get(port)

    def requested(self) -> list[str]:
        """Output ports the caller wants written: present and not virtual (contract 2.2)."""
        return [p for p, t in self.node.outputs.items() if t is not None and not t.is_virtual]

    def dtype(self, tensor) -> torch.dtype:
        declared = tensor.get_data_type()
        if declared is None:
            if tensor is self.output("Stats"):
                return torch.float32
            declared = self.io_type
        name = getattr(declared, "name", None)
        if name not in DTYPES:
            raise NotImplementedError(f"tensor {tensor.get_name()!r} of type {declared}")
        return DTYPES[name]

    # -- memory -----------------------------------------------------------------------------------

    def strided(self, tensor, size, stride, offset: int) -> torch.Tensor:
        """A view of the declared dtype, `offset` elements past the bound buffer's data pointer."""
        uid = tensor.get_uid()
        if uid not in self.buffers:
            raise ValueError(f"no buffer for uid {uid} ({tensor.get_name()!r})")
        buffer = self.buffers[uid]
        dtype = self.dtype(tensor)
        storage = buffer.untyped_storage()
        skipped = buffer.data_ptr() - storage.data_ptr()
        if skipped % dtype.itemsize:
            raise ValueError(f"{tensor.get_name()!r} starts at {skipped} bytes of its storage")
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        room = (storage.nbytes() - skipped) // dtype.itemsize
        out = torch.empty(0, dtype=dtype, device=buffer.device)
        if 0 in size:
            return out.reshape(tuple(size))
        if offset < 0 or last >= room:
            raise IndexError(f"{tensor.get_name()!r} reaches element {last} of {room} bound")
        return out.set_(storage, skipped // dtype.itemsize + offset, tuple(size), tuple(stride))

    def origin(self, tensor, b: int) -> int:
        """Element offset of batch `b`: its ragged offset, else b times the batch stride."""
        ragged = tensor.ragged_offset
        if ragged is None:
            return b * tensor.get_stride()[0] if tensor.get_dim()[0] > 1 else 0
        units = int(self.strided(ragged, (1,), (1,), b * ragged.get_stride()[0]).item())
        return units * tensor.get_ragged_offset_multiplier()

    def rows(self, tensor, b: int, count: int) -> torch.Tensor:
        """(H, count, D): the first `count` rows of batch `b` of a (B,H,S,D) tensor. Batch 0 stands
        for every batch of a tensor with one batch."""
        _, h, _, d = tensor.get_dim()
        stride = tensor.get_stride()[1:]
        return self.strided(tensor, (h, count, d), stride, self.origin(tensor, b))

    def whole(self, tensor) -> torch.Tensor:
        return self.strided(tensor, tensor.get_dim(), tensor.get_stride(), 0)

    def scalar(self, tensor) -> float:
        """A one-element tensor: embedded, host pass-by-value or device (contract 2.3)."""
        if tensor.pass_by_value is not None:
            return float(tensor.pass_by_value)
        bound = self.buffers.get(tensor.get_uid())
        if isinstance(bound, numbers.Real):
            return float(bound)
        return float(self.strided(tensor, (1,), (1,), 0).to(torch.float64).item())

    def lengths(self, side: str) -> list[int] | None:
        """Lengths of side 'q' or 'kv' as bound: seq_len, or differences of cu_seq_len."""
        direct, prefix = self.input(f"seq_len_{side}"), self.input(f"cu_seq_len_{side}")
        if direct is not None and prefix is not None:
            raise ValueError(f"seq_len_{side} and cu_seq_len_{side} are both set")
        if direct is not None:
            return self._vector(direct)
        if prefix is None:
            return None
        sums = self._vector(prefix)
        return [after - before for before, after in itertools.pairwise(sums)]

    def _vector(self, tensor) -> list[int]:
        """[N] or [N,1,1,1] integers."""
        size, step = tensor.get_dim()[:1], tensor.get_stride()[:1]
        return [int(x) for x in self.strided(tensor, size, step, 0).tolist()]

    def attn_scale(self) -> float:
        """Factor from q.k to natural logits. None is 1.0; a prefolded Q holds scale * log2(e), so
        its products are base-2 logits and ln 2 brings them back (contract 1.2)."""
        number, tensor = self.node.params.get("attn_scale"), self.input("attn_scale")
        if self.node.params.get("attn_scale_prefolded"):
            if number is not None or tensor is not None:
                raise ValueError("attn_scale_prefolded with an attn_scale")
            return math.log(2.0)
        if tensor is not None:
            return self.scalar(tensor)
        if number is None:
            return 1.0
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError(f"attn_scale is {number!r}")
        return float(number)

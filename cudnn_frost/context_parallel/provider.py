"""Attention forward of packed sequences on one rank, by the rows of `cudnn_frost.Graph`."""

from __future__ import annotations

import math
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import cudnn
import torch

from ..engines import Row
from ..graph import Graph
from ..runtime.prepared import PreparedLaunch

MODE_VARIABLE = "CUDNN_FROST_CONTEXT_PARALLEL"

_TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
_UIDS = {name: uid for uid, name in enumerate(("q", "k", "v", "o", "stats", "cu_q", "cu_kv"), 1)}
_ALIGNMENT = 16
# kept by a provider; the oldest goes first
_MOST_PLANS = 256


class Mode(str, Enum):
    """off: the caller's own attention runs. fallback: a row, else the backend or the reference.
    strict: a kernel row, else an error that says why each row declined."""

    OFF = "off"
    FALLBACK = "fallback"
    STRICT = "strict"

    @classmethod
    def of(cls, given: Mode | str | None) -> Mode:
        """A mode by name, None = what `CUDNN_FROST_CONTEXT_PARALLEL` says, off without it."""
        name = (os.environ.get(MODE_VARIABLE) or "off") if given is None else given
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(mode.value for mode in cls)
            raise ValueError(f"mode: must be one of {known}, got {name!r}") from None


class PackedSequences(NamedTuple):
    """Where the sequences of packed tensors are.

    cu_seqlens_q, cu_seqlens_kv: (B + 1,) int32 prefix sums with a leading 0, on the tensors'
    device. max_seqlen_q, max_seqlen_kv: no sequence is longer.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_q: int
    max_seqlen_kv: int


@dataclass(frozen=True)
class Declaration:
    """What one plan is made for; lengths and totals are no part of it, `max_*` bounds are."""

    dtype: torch.dtype
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: int
    max_q: int
    max_kv: int
    causal: bool
    scale: float
    device: torch.device


@dataclass(frozen=True)
class _Plan:
    """graph: planned and built. prepared: its launch by address; None runs through the graph."""

    graph: Graph
    prepared: PreparedLaunch | None
    workspace_bytes: int


class ForwardProvider:
    """Attention forward for training: O, and Stats as the backward pass reads them.

    mode: as `Mode`; None asks the environment. Plans are cached for each declaration; an object may
    be shared between threads.
    """

    def __init__(self, mode: Mode | str | None = None) -> None:
        self.mode = Mode.of(mode)
        self._plans: dict[Declaration, _Plan] = {}
        self._lock = threading.Lock()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sequences: PackedSequences,
        *,
        scale: float | None = None,
        causal: bool = True,
        origins: dict[str, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        **other: Any,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """O (T_q, H_q, D_v) and Stats (T_q, H_q), fp32, natural log; None when the mode is off.
        Neither carries a gradient.

        q (T_q, H_q, D_qk), k (T_kv, H_kv, D_qk), v (T_kv, H_kv, D_v): f16 or bf16, compact: the
        tokens of sequence b are rows cu_seqlens[b] to cu_seqlens[b + 1]. scale: default
        D_qk ** -0.5. causal: row i of a sequence sees keys j <= i; otherwise all.
        origins: for callers whose layout states where each operand's sequences begin, name among
        q, k, v, o, stats -> (B + 1,) int32 rows; they must equal cu_seqlens. out, stats: written
        instead of new tensors.

        Compactness is checked on the device in every call, replayed graphs included: where the
        lengths are no prefix sums within bounds, origins differ, or a live query sequence has no
        key, the launch fails (an assertion on the device; RuntimeError on the CPU).
        ValueError names an operand that cannot be used; cudnnGraphNotSupportedError a feature that
        this path does not take and, in strict mode, why every row declined.
        """
        if self.mode is Mode.OFF:
            return None
        refuse_other(other)
        declared = _declare(q, k, v, sequences)
        scale = q.shape[2] ** -0.5 if scale is None else float(scale)
        if not math.isfinite(scale) or not isinstance(causal, bool):
            raise ValueError(f"scale, causal: must be finite and a bool, got {scale}, {causal!r}")
        declaration = Declaration(**declared, causal=causal, scale=scale)
        out = _output("out", out, (*q.shape[:2], v.shape[2]), q.dtype, q.device, (q, k, v))
        used = (q, k, v, out)
        stats = _output("stats", stats, tuple(q.shape[:2]), torch.float32, q.device, used)
        _assert_compact(q, k, sequences, origins or {})
        buffers = dict(zip(_UIDS, (q, k, v, out, stats, *sequences[:2]), strict=True))
        if q.shape[0]:
            with _current(q.device):
                self._run(self._plan(declaration), buffers)
        return out, stats

    def _plan(self, declaration: Declaration) -> _Plan:
        found = self._plans.get(declaration)
        if found is None:
            # planning and compiling hold no lock: the first to finish is kept
            made = _make_plan(declaration, self.mode)
            with self._lock:
                found = self._plans.setdefault(declaration, made)
                while len(self._plans) > _MOST_PLANS:
                    del self._plans[next(iter(self._plans))]
        return found

    @staticmethod
    def _run(plan: _Plan, buffers: dict[str, torch.Tensor]) -> None:
        device = buffers["q"].device
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if plan.prepared is not None:
            of_uid = {_UIDS[name]: tensor.data_ptr() for name, tensor in buffers.items()}
            pointers = [of_uid[slot.uid] for slot in plan.prepared.slots]
            plan.prepared.launch(pointers, workspace.data_ptr(), stream)
            return
        handle = _handle(device)
        if handle is not None:
            cudnn.set_stream(handle, stream)
        plan.graph.execute({_UIDS[n]: x for n, x in buffers.items()}, workspace, handle)


def refuse_other(other: dict[str, Any]) -> None:
    """cudnnGraphNotSupportedError for a feature that is asked for; TypeError for an unknown one."""
    for name, value in other.items():
        if name not in ("dropout", "bias", "sink", "page_table", "window"):
            raise TypeError(f"{name}: no argument of context-parallel attention")
        if value is not None and not (name == "dropout" and value == 0):
            raise cudnn.cudnnGraphNotSupportedError(
                f"{name}: context-parallel attention does not take it; leave it out"
            )


def _declare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
) -> dict[str, Any]:
    cu_q, cu_kv, max_q, max_kv = sequences
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, got {type(x).__name__}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or 0 in x.shape[1:]:
            raise ValueError(f"{name}: must be (tokens, heads, head_dim), got {list(x.shape)}")
        if x.dtype not in _TYPES or x.dtype is not q.dtype:
            want = "float16 or bfloat16" if name == "q" else f"{q.dtype} as q"
            raise ValueError(f"{name}: must be {want}, got {x.dtype}")
        _check_memory(name, x, q.device)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"v: must have k's tokens and heads {list(k.shape[:2])}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: must have q's head_dim {q.shape[2]}, got {k.shape[2]}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} heads do not divide q's {q.shape[1]}")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        if cu.dtype is not torch.int32 or cu.dim() != 1 or len(cu) < 2:
            shown = f"{cu.dtype} {list(cu.shape)}"
            raise ValueError(f"{name}: must be (batch + 1,) int32, got {shown}")
        _check_memory(name, cu, q.device)
    if len(cu_q) != len(cu_kv):
        raise ValueError(f"cu_seqlens_kv: has {len(cu_kv)} entries, cu_seqlens_q {len(cu_q)}")
    for name, most in (("max_seqlen_q", max_q), ("max_seqlen_kv", max_kv)):
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"{name}: must be an int of 1 or more, got {most!r}")
    return {
        "dtype": q.dtype,
        "heads": (q.shape[1], k.shape[1]),
        "head_dims": (q.shape[2], v.shape[2]),
        "batch": len(cu_q) - 1,
        "max_q": max_q,
        "max_kv": max_kv,
        "device": q.device,
    }


def _check_memory(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: is on {x.device}, q on {device}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: must be compact, got strides {list(x.stride())}")
    alignment = 4 if x.dtype in (torch.int32, torch.float32) else _ALIGNMENT
    if x.data_ptr() % alignment:
        raise ValueError(f"{name}: address {x.data_ptr():#x} is not {alignment}-byte aligned")


def _output(
    name: str,
    given: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    used: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """A new tensor, or a given one that is of this kind and overlaps none in use."""
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype is not dtype:
        got = f"{given.dtype} {list(given.shape)}"
        raise ValueError(f"{name}: must be {dtype} {list(shape)}, got {got}")
    _check_memory(name, given, device)
    start, end = _range(given)
    for other in used:
        first, last = _range(other)
        if start < last and first < end:
            raise ValueError(f"{name}: overlaps an operand of the same call")
    return given


def _range(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


def _assert_compact(
    q: torch.Tensor,
    k: torch.Tensor,
    sequences: PackedSequences,
    origins: dict[str, torch.Tensor],
) -> None:
    """On the device, without waiting for it; part of a graph that captures it."""
    cu_q, cu_kv, max_q, max_kv = sequences
    sides = {
        "cu_seqlens_q": (cu_q, q.shape[0], max_q),
        "cu_seqlens_kv": (cu_kv, k.shape[0], max_kv),
    }
    lengths = []
    for name, (cu, tokens, most) in sides.items():
        length = cu[1:].long() - cu[:-1]
        bounded = (length >= 0).all() & (length <= most).all()
        ends = (cu[0] == 0) & (cu[-1] == tokens)
        torch._assert_async(bounded & ends, f"{name}: no zero-based prefix sums within bounds")
        lengths.append(length)
    has_keys = ((lengths[0] == 0) | (lengths[1] > 0)).all()
    torch._assert_async(has_keys, "cu_seqlens_kv: a live query sequence has no key")
    for name, origin in origins.items():
        if name not in ("q", "k", "v", "o", "stats"):
            raise ValueError(f"origins: {name!r} is no operand")
        cu = cu_kv if name in ("k", "v") else cu_q
        if (
            not isinstance(origin, torch.Tensor)
            or origin.shape != cu.shape
            or origin.device != cu.device
        ):
            raise ValueError(f"origins: {name} must be {list(cu.shape)} on {cu.device}")
        torch._assert_async((origin == cu).all(), f"origins: {name} is not compact")


_handles = threading.local()


def _handle(device: torch.device) -> Any:
    """This thread's handle for the current device; none for the CPU.

    A handle carries a stream, so threads cannot share one.
    """
    if device.type != "cuda":
        return None
    kept = _handles.__dict__.setdefault("of_device", {})
    if device not in kept:
        kept[device] = cudnn.create_handle()
    return kept[device]


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """While it is entered, the device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _make_plan(declaration: Declaration, mode: Mode) -> _Plan:
    handle = _handle(declaration.device)
    graph = _graph(declaration, handle)
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.build_plans()
    row = graph.selected_engine
    if mode is Mode.STRICT and not (isinstance(row, Row) and not row.is_reference):
        raise cudnn.cudnnGraphNotSupportedError(
            f"strict mode: no kernel row serves this attention\n{graph.explain()}"
        )
    try:
        prepared = graph.prepare()
    except (cudnn.cudnnGraphNotSupportedError, NotImplementedError):
        prepared = None
    return _Plan(graph, prepared, graph.get_workspace_size())


def _graph(declaration: Declaration, handle: Any) -> Graph:
    options = {} if handle is None else {"handle": handle}
    graph = Graph(
        io_data_type=_TYPES[declaration.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **options,
    )
    b, (h_q, h_kv), (d_qk, d_v) = declaration.batch, declaration.heads, declaration.head_dims
    cu = {
        name: graph.tensor(
            name=name,
            dim=[b + 1, 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=cudnn.data_type.INT32,
            uid=_UIDS[name],
        )
        for name in ("cu_q", "cu_kv")
    }

    def packed(tensor: Any, side: str, heads: int, width: int) -> None:
        """Offsets in tokens."""
        tensor.set_ragged_offset(cu[side])
        tensor.set_ragged_offset_multiplier(heads * width)

    def operand(name: str, side: str, heads: int, most: int, width: int) -> Any:
        tensor = graph.tensor(
            name=name,
            dim=[b, heads, most, width],
            stride=[most * heads * width, width, heads * width, 1],
            uid=_UIDS[name],
        )
        packed(tensor, side, heads, width)
        return tensor

    max_q, max_kv = declaration.max_q, declaration.max_kv
    o, stats = graph.sdpa(
        q=operand("q", "cu_q", h_q, max_q, d_qk),
        k=operand("k", "cu_kv", h_kv, max_kv, d_qk),
        v=operand("v", "cu_kv", h_kv, max_kv, d_v),
        attn_scale=declaration.scale,
        use_padding_mask=True,
        cu_seq_len_q=cu["cu_q"],
        cu_seq_len_kv=cu["cu_kv"],
        use_causal_mask=declaration.causal,
        generate_stats=True,
    )
    o.set_output(True).set_uid(_UIDS["o"]).set_dim([b, h_q, max_q, d_v])
    o.set_stride([max_q * h_q * d_v, d_v, h_q * d_v, 1])
    packed(o, "cu_q", h_q, d_v)
    stats.set_output(True).set_uid(_UIDS["stats"]).set_data_type(cudnn.data_type.FLOAT)
    stats.set_dim([b, h_q, max_q, 1]).set_stride([max_q * h_q, 1, h_q, 1])
    packed(stats, "cu_q", h_q, 1)
    return graph

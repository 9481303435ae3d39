"""Prepared launches: a built plan as a function that C++ calls without Python.

A *frame* is the argument list of that function. Its layout is fixed by a schema version and the
same for every plan, so that a caller in C++ fills one struct:

    version, known features, an address per slot of `SLOTS`, workspace, workspace bytes, stream

A slot that a plan does not use must be null. `known features` are the bits of `FEATURES` that the
caller can serve; a plan with others refuses, so that no caller overlooks an operand it has never
heard of. `include/cudnn_frost/launch.h` says the same to C++ and is written by `header()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..vocab import DType
from .buffers import Slot
from .launcher import launcher
from .plan import WORKSPACE_ALIGNMENT, KernelPlan

SCHEMA_VERSION = 1
"""Rises whenever a frame's layout or the meaning of a slot changes; never reused."""

SLOTS = (
    "q",
    "k",
    "v",
    "o",
    "stats",
    "score_max",
    "score_sum_exp",
    "amax_s",
    "amax_o",
    "seq_len_q",
    "seq_len_kv",
    "q.ragged_offset",
    "k.ragged_offset",
    "v.ragged_offset",
    "o.ragged_offset",
    "stats.ragged_offset",
    "score_max.ragged_offset",
    "score_sum_exp.ragged_offset",
    "paging.k_table",
    "paging.v_table",
    "descale_q",
    "descale_k",
    "descale_v",
    "descale_s",
    "scale_s",
    "scale_o",
    "attn_scale",
    "sink",
    "bias",
)
"""The slots of a frame of this version, in order, by where the operand stands in the facts."""

_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
FEATURES: dict[str, tuple[int, tuple[str, ...]]] = {
    "lengths": (1 << 0, ("seq_len_q", "seq_len_kv")),
    "ragged": (1 << 1, tuple(slot for slot in SLOTS if slot.endswith(".ragged_offset"))),
    "paged_kv": (1 << 2, ("paging.k_table", "paging.v_table")),
    "fp8_scales": (1 << 3, _SCALES),
    "amax": (1 << 4, ("amax_s", "amax_o")),
    "softmax_sums": (1 << 5, ("score_max", "score_sum_exp")),
    "device_scale": (1 << 6, ("attn_scale",)),
    "sink": (1 << 7, ("sink",)),
    "bias": (1 << 8, ("bias",)),
}
"""Feature -> its bit, and the slots of which a plan with the feature uses some."""


class CannotPrepare(Exception):
    """A plan that has no launch without Python, and why."""


@dataclass(frozen=True, slots=True)
class LaunchSlot:
    """One operand of a prepared launch.

    name: its slot, one of `SLOTS`. uid, label: the tensor's, as declared.
    dtype: element type. alignment: of its address, bytes.
    nbytes: what the declaration spans; 0 for a packed operand, whose offsets alone know.
    """

    name: str
    uid: int
    label: str
    dtype: DType
    alignment: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A plan that launches from bare addresses; immutable, shareable between threads.

    slots: the plan's operands, in the order of `launch`'s pointers.
    workspace_bytes, workspace_alignment: of the scratch every launch needs.
    device: the ordinal it was built for; a launch refuses when another one is current.
    version, features: what a frame must state; features is a sum of bits of `FEATURES`.
    key: the compile key. frame: the function that takes a frame, a `tvm_ffi.Function`.
    """

    slots: tuple[LaunchSlot, ...]
    workspace_bytes: int
    workspace_alignment: int
    device: int
    version: int
    features: int
    key: str
    frame: Any = field(repr=False)
    _ordered: Any = field(repr=False)

    def launch(self, pointers: Sequence[int], workspace: int = 0, stream: int = 0) -> None:
        """Enqueue on `stream` (a CUDA stream address, 0 = the default stream).

        pointers: device addresses in the order of `slots`. workspace: address of at least
        `workspace_bytes` bytes that no other launch in flight uses. Only alignment, presence and
        the current device are checked: sizes are the caller's to keep, as `slots` states them.
        Raises ValueError or TypeError naming the slot.
        """
        self._ordered(pointers, workspace, stream)

    def publish(self, name: str, override: bool = False) -> None:
        """Make `frame` the global tvm-ffi function `name`, for `Function::GetGlobal` in C++.

        Raises ValueError when the name is taken, unless `override`.
        """
        import tvm_ffi

        if not override and tvm_ffi.get_global_func(name, allow_missing=True) is not None:
            raise ValueError(f"{name}: is a global function already; pass override=True")
        tvm_ffi.register_global_func(name, self.frame, override=True)


def prepare(plan: Any) -> PreparedLaunch:
    """The prepared launch of a built plan.

    Raises CannotPrepare for a plan that runs in Python or binds what no frame of this version
    holds, NotImplementedError where the launcher is neither kept nor can be made.
    """
    if not isinstance(plan, KernelPlan):
        raise CannotPrepare(f"a {type(plan).__name__} runs in Python")
    used = {slot.path: slot for slot in plan.pointers if slot is not None}
    foreign = [path for path in used if path not in SLOTS]
    if foreign:
        raise CannotPrepare(f"version {SCHEMA_VERSION} has no slot for {', '.join(foreign)}")
    features = features_of(used)
    # a plan that runs anywhere is for no device in particular
    device = next((s.device for s in used.values() if s.device is not None), -1)
    place = plan.workspace_index
    numbers = (
        -1 if place is None else place,
        plan.workspace_bytes,
        WORKSPACE_ALIGNMENT,
        SCHEMA_VERSION,
        features,
        device,
    )
    frame, ordered = launcher().get_function("prepare")(
        plan.entry,
        plan.constants,
        [used[path].label if path in used else f"slot {path}" for path in SLOTS],
        [used[path].align if path in used else 0 for path in SLOTS],
        [SLOTS.index(slot.path) if slot is not None else -1 for slot in plan.pointers],
        numbers,
    )
    return PreparedLaunch(
        slots=tuple(_described(used[path]) for path in SLOTS if path in used),
        workspace_bytes=plan.workspace_bytes,
        workspace_alignment=WORKSPACE_ALIGNMENT,
        device=device,
        version=SCHEMA_VERSION,
        features=features,
        key=plan.key,
        frame=frame,
        _ordered=ordered,
    )


def features_of(slots: Iterable[str]) -> int:
    """The sum of the bits of the features that these slots belong to."""
    used = set(slots)
    return sum(bit for bit, names in FEATURES.values() if used.intersection(names))


def _described(slot: Slot) -> LaunchSlot:
    operand = slot.operand
    return LaunchSlot(
        slot.path, operand.uid, operand.name, operand.dtype, slot.align, slot.required_bytes
    )


def header() -> str:
    """The text of `cudnn_frost/launch.h`."""
    lines = [
        "// Frames of prepared launches, for callers in C++. Written from the tables",
        "// of cudnn_frost.runtime.prepared, which says what a frame is.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
        "namespace cudnn_frost {",
        "",
        f"constexpr int64_t kSchemaVersion = {SCHEMA_VERSION};",
        "",
        "enum Feature : int64_t {",
        *(f"  k{_camel(name)} = {bit}," for name, (bit, _) in FEATURES.items()),
        "};",
        "",
        "// Places in a frame. Slots a plan does not use are null.",
        "enum Argument : int {",
        "  kVersion,",
        "  kKnownFeatures,",
        *(f"  k{_camel(name.removeprefix('paging.'))}Slot," for name in SLOTS),
        "  kWorkspace,",
        "  kWorkspaceBytes,",
        "  kStream,",
        "  kNumArguments,",
        "};",
        "",
        "}  // namespace cudnn_frost",
    ]
    return "\n".join(lines) + "\n"


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.replace(".", "_").split("_"))

"""The mask's normal form: every spelling of both ops becomes one `Band`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .facts import Alignment, Band, Malformation
from .record import OpaqueValue


@dataclass(frozen=True)
class BandSpelling:
    """One op's keywords for the bounds; the causal flags and the alignment are common."""

    left: str
    right: str
    window: str


SPELLINGS = {
    "sdpa": BandSpelling(
        "diagonal_band_left_bound", "diagonal_band_right_bound", "sliding_window_length"
    ),
    "sdpa_fp8": BandSpelling("left_bound", "right_bound", "sliding_window"),
}

CAUSAL = "use_causal_mask"
CAUSAL_BOTTOM_RIGHT = "use_causal_mask_bottom_right"
ALIGNMENT = "diagonal_alignment"


def shown(value: Any) -> str:
    """A captured value as text."""
    if isinstance(value, OpaqueValue):
        return f"{value.text} ({value.type_name})"
    return repr(value)


def flag(params: Mapping[str, Any], name: str, bad: list[Malformation]) -> bool:
    """A boolean keyword; the frontend refuses anything that is not a bool."""
    value = params.get(name, False)
    if not isinstance(value, bool):
        bad.append(Malformation(subject=name, got=shown(value), want="True or False"))
        return False
    return value


def integer(params: Mapping[str, Any], name: str, bad: list[Malformation]) -> int | None:
    """An integer keyword, None when absent; only a real int is taken (True counts as 1)."""
    value = params.get(name)
    if value is None or isinstance(value, int):
        return None if value is None else int(value)
    bad.append(Malformation(subject=name, got=shown(value), want="an int"))
    return None


def resolve(op: str, params: Mapping[str, Any], bad: list[Malformation]) -> Band:
    """The band that these keywords mean; contradictions are appended to `bad`.

    A causal flag fixes alignment and right bound, whatever `diagonal_alignment` says; the explicit
    left bound and the window are two names of one bound.
    """
    names = SPELLINGS[op]
    top_left = flag(params, CAUSAL, bad)
    bottom_right = flag(params, CAUSAL_BOTTOM_RIGHT, bad)
    left, window = integer(params, names.left, bad), integer(params, names.window, bad)
    right = integer(params, names.right, bad)
    alignment: Alignment = "TOP_LEFT"
    declared = params.get(ALIGNMENT, "TOP_LEFT")
    if declared in ("TOP_LEFT", "BOTTOM_RIGHT"):
        alignment = declared
    else:
        want = "TOP_LEFT or BOTTOM_RIGHT"
        bad.append(Malformation(subject=ALIGNMENT, got=shown(declared), want=want))
    if top_left and bottom_right:
        got = f"set beside {CAUSAL_BOTTOM_RIGHT}"
        bad.append(Malformation(subject=CAUSAL, got=got, want="one causal flag"))
    if (top_left or bottom_right) and right is not None:
        got = f"{right}, set beside a causal flag"
        want = "a causal flag or a right bound"
        bad.append(Malformation(subject=names.right, got=got, want=want))
    if left is not None and window is not None:
        got = f"{window}, set beside {names.left}"
        bad.append(Malformation(subject=names.window, got=got, want="one left bound"))
    if right is not None and right < 0:
        bad.append(Malformation(subject=names.right, got=str(right), want="0 or more"))
    if top_left or bottom_right:
        right, alignment = 0, "BOTTOM_RIGHT" if bottom_right else "TOP_LEFT"
    left = window if left is None else left
    if left is None and right is None:
        alignment = "TOP_LEFT"
    words = (CAUSAL, CAUSAL_BOTTOM_RIGHT, names.left, names.window, names.right, ALIGNMENT)
    used = tuple(word for word in words if params.get(word) not in (None, False))
    return Band(alignment=alignment, left=left, right=right, spelling=used)


def visible_range(band: Band, row: int, len_q: int, len_kv: int) -> tuple[int, int]:
    """Keys [lo, hi) that query `row` of a sequence sees; lo >= hi for a keyless row."""
    offset = len_kv - len_q if band.alignment == "BOTTOM_RIGHT" else 0
    lo = 0 if band.left is None else max(0, row + offset - band.left + 1)
    hi = len_kv if band.right is None else min(len_kv, row + offset + band.right + 1)
    return (lo, hi) if row < len_q else (0, 0)


def visible_hull(band: Band, rows: range, len_q: int, len_kv: int) -> tuple[int, int]:
    """Keys [lo, hi) outside of which no query of `rows` (a tile) sees any; lo >= hi for none.

    Both ends of the band only move forward with the row, so the hull is the first live row's
    start to the last one's end; a row inside may see less of it, or nothing.
    """
    live = range(max(rows.start, 0), min(rows.stop, len_q))
    if not live:
        return 0, 0
    lo, _ = visible_range(band, live[0], len_q, len_kv)
    _, hi = visible_range(band, live[-1], len_q, len_kv)
    return lo, hi

"""Which plans the accepting rows put forward, best first."""

from __future__ import annotations

from collections.abc import Sequence

from ..engines.row import Row, Verdict
from ..vocab import Target
from .assemble import PlanEntry


def knob_names(row: Row) -> tuple[str, ...]:
    """The cuDNN knob names a row's plans carry."""
    return ()


def recommend(answers: Sequence[Verdict], target: Target) -> list[PlanEntry]:
    """Plans of every accepting row, rows in table order, a row's own plans best first."""
    return [PlanEntry(v.row.engine_id, (), v.row) for v in answers if v.accepted]

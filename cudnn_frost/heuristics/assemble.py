"""One ranked list out of two: the pure merge that every family shares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engines.row import Row

Knobs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One line of the ranked list.

    engine_id, knobs: the replayable identity; knobs as sorted (cuDNN knob name, value) pairs for
        a row's plan, the backend's own object for one of its plans.
    row: the row behind it, None for a backend plan.
    backend_index: the position in the backend's own list, None for a row's plan.
    mode: the heuristic mode that produced it, None when it came without one.
    """

    engine_id: int
    knobs: Any
    row: Row | None = None
    backend_index: int | None = None
    mode: Any = None

    @property
    def is_last(self) -> bool:
        """The reference row goes behind everything."""
        return self.row is not None and self.row.is_reference

    @property
    def identity(self) -> Hashable:
        """(engine, knobs): equal identities are the same plan."""
        knobs = self.knobs
        if isinstance(knobs, dict):
            knobs = tuple(sorted((str(k), v) for k, v in knobs.items()))
        return self.engine_id, knobs if isinstance(knobs, tuple) else repr(knobs)

    @property
    def name(self) -> str:
        """A row plan's name, `row[KNOB=value, ...]`; empty for the backend, which names its own."""
        if self.row is None:
            return ""
        knobs = ", ".join(f"{k}={v}" for k, v in sorted(self.knobs))
        return f"{self.row.name}[{knobs}]" if knobs else self.row.name


Placement = Callable[[Any, Sequence[PlanEntry], Sequence[PlanEntry]], Sequence[PlanEntry]]


def frost_first(
    mode: Any, frost: Sequence[PlanEntry], backend: Sequence[PlanEntry]
) -> Sequence[PlanEntry]:
    """The default placement of a mode's block: ours, then the backend's."""
    return [*frost, *backend]


def _blocks(modes: Sequence[Any], plans: Iterable[PlanEntry]) -> dict[Any, list[PlanEntry]]:
    """Backend plans by mode; one without a known mode stays behind the plan before it."""
    blocks: dict[Any, list[PlanEntry]] = {mode: [] for mode in modes}
    current = modes[0] if modes else None
    for plan in plans:
        current = plan.mode if plan.mode in blocks else current
        blocks.setdefault(current, []).append(plan)
    return blocks


def _assemble(
    modes: Sequence[Any],
    recommend: Callable[[Any], Sequence[PlanEntry]],
    backend_plans: Sequence[PlanEntry],
    placement: Placement = frost_first,
) -> list[PlanEntry]:
    """Merge both sides into one ranked list.

    modes: heuristic modes in the order asked. recommend(mode): row plans, best first.
    backend_plans: the backend's list in its order. placement: orders one mode's block; it may
    only permute. Returns every distinct plan once, mode block by mode block, the reference row's
    plans last. Raises ValueError when the placement drops or invents a plan.
    """
    modes = list(dict.fromkeys(modes)) or [None]
    blocks = _blocks(modes, backend_plans)
    ranked: dict[Hashable, PlanEntry] = {}
    last: list[PlanEntry] = []
    for mode in modes:
        recommended = list(recommend(mode))
        last += [plan for plan in recommended if plan.is_last]
        frost = [plan for plan in recommended if not plan.is_last]
        block = list(placement(mode, frost, blocks[mode]))
        if sorted(map(id, block)) != sorted(map(id, [*frost, *blocks[mode]])):
            raise ValueError(f"placement of mode {mode} must permute its plans, not change them")
        for plan in block:
            ranked.setdefault(plan.identity, plan)
    for plan in last:
        ranked.setdefault(plan.identity, plan)
    return list(ranked.values())

"""Which plans the accepting rows put forward, best first: knobs, and what they configure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..analyzer.facts import Analysis, SdpaFacts
from ..engines import Row, Verdict, verdicts
from ..kernels.configs.prefill_sm90 import PrefillSm90Config
from ..vocab import Decline, Target
from .assemble import Knobs, PlanEntry


@dataclass(frozen=True, slots=True)
class Family:
    """How a kernel family is tuned.

    knobs: the cuDNN knob names its plans carry.
    candidates: knob values worth proposing, best first.
    config: facts and knobs as the family's configuration.
    """

    knobs: tuple[str, ...]
    candidates: tuple[tuple[int, ...], ...]
    config: Callable[[Row, SdpaFacts, Mapping[str, int]], Any]


def _prefill_config(row: Row, facts: SdpaFacts, knobs: Mapping[str, int]) -> PrefillSm90Config:
    flavor = row.capabilities.flavor(facts.d_shape)
    assert flavor is not None
    return PrefillSm90Config(
        dtype=facts.q.dtype,
        head_dim_qk=flavor[0],
        head_dim_v=flavor[1],
        tile_m=knobs["TILE_M"],
        tile_n=knobs["TILE_N"],
        num_stages=knobs["STAGES"],
        left_bound=facts.band.left is not None,
        right_bound=facts.band.right is not None,
        stats=facts.stats is not None,
    )


FAMILIES: dict[str, Family] = {
    "reference": Family((), ((),), lambda row, facts, knobs: None),
    "prefill_sm90": Family(("STAGES", "TILE_M", "TILE_N"), ((2, 128, 128),), _prefill_config),
}


def knob_names(row: Row) -> tuple[str, ...]:
    """The cuDNN knob names a row's plans carry."""
    return FAMILIES[row.kernel].knobs if row.kernel else ()


def config_of(row: Row, facts: SdpaFacts, knobs: Knobs) -> Any:
    """The configuration a plan compiles; None for the reference row."""
    return FAMILIES[row.kernel].config(row, facts, dict(knobs))


def infeasible(row: Row, facts: SdpaFacts, knobs: Knobs) -> Decline | None:
    """Why the row's kernel cannot be built with these knobs, None when it can."""
    config = config_of(row, facts, knobs)
    return config.infeasible() if config is not None else None


def _propose(verdict: Verdict) -> tuple[Verdict, list[PlanEntry]]:
    """A row's feasible plans; a verdict without any becomes a decline that says why."""
    if not verdict.accepted:
        return verdict, []
    row, facts = verdict.row, verdict.facts
    family = FAMILIES[row.kernel]
    plans, refusals = [], []
    for values in family.candidates:
        knobs = tuple(sorted(zip(family.knobs, values, strict=True)))
        refusal = infeasible(row, facts, knobs)
        if refusal is None:
            plans.append(PlanEntry(row.engine_id, knobs, row))
        else:
            refusals.append(refusal)
    return (verdict if plans else replace(verdict, declines=tuple(refusals))), plans


def judge_and_propose(
    analysis: Analysis, target: Target, environment: Mapping[str, str]
) -> tuple[tuple[Verdict, ...], list[PlanEntry]]:
    """Every row's verdict on a graph, and the plans of those that accept.

    Plans come in row-table order, a row's own best first. An accepting row has at least one plan:
    one whose kernel has no feasible configuration declines with the configuration's reason.
    """
    answers = [_propose(verdict) for verdict in verdicts(analysis, target, environment)]
    return tuple(v for v, _ in answers), [plan for _, plans in answers for plan in plans]


def knobs_from_names(row: Row, named: Mapping[str, Any]) -> Knobs:
    """Checked knobs; ValueError names a knob that the row does not have, or one it misses."""
    known = knob_names(row)
    for name, value in named.items():
        if name not in known:
            shown = ", ".join(known) or "none"
            raise ValueError(f"{row.name} has no knob {name}; its knobs: {shown}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{row.name}: knob {name} must be an int, got {value!r}")
    for name in known:
        if name not in named:
            raise ValueError(f"{row.name}: knob {name} is missing")
    return tuple(sorted(named.items()))

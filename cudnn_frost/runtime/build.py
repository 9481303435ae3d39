"""From a plan entry to something that runs."""

from __future__ import annotations

from ..analyzer.facts import SdpaFacts
from ..heuristics.assemble import PlanEntry
from ..vocab import Target
from .plan import CompiledPlan, ReferencePlan


def build_plan(entry: PlanEntry, facts: SdpaFacts, target: Target, device: int) -> CompiledPlan:
    """Build a row's plan for a device ordinal.

    Raises NotImplementedError with the reason when this machine cannot build it.
    """
    assert entry.row is not None
    if entry.row.is_reference:
        return ReferencePlan.build(facts)
    raise NotImplementedError(f"{entry.row.name}: no kernel")

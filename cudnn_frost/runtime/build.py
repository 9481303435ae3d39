"""From a plan entry to something that runs."""

from __future__ import annotations

from typing import Any

from ..analyzer.facts import SdpaFacts
from ..heuristics.assemble import PlanEntry
from ..vocab import Target
from . import cache
from .lower import lower
from .plan import CompiledPlan, KernelPlan, ReferencePlan, slots_of


def build_plan(entry: PlanEntry, facts: SdpaFacts, target: Target, device: int) -> CompiledPlan:
    """Build a row's plan for a device ordinal.

    Raises NotImplementedError or ImportError with the reason when this machine cannot build it.
    """
    row = entry.row
    if row is None:
        raise ValueError("a backend plan is built by the backend")
    if row.is_reference:
        return ReferencePlan.build(facts)
    launch = lower(row, facts, entry.knobs, target)
    entry_point = cache.entry_of(row.kernel, launch.config, launch.signature)
    operands = {operand.name: operand for operand in launch.signature.operands}
    aligned = {p: operands[name].alignment for name, p in launch.pointers.items() if p}
    slots = slots_of(facts, device, aligned)
    needs_workspace = launch.workspace_bytes > 0
    return KernelPlan(
        entry=entry_point,
        key=str(cache.compile_key(row.kernel, launch.config, launch.signature)),
        pointers=tuple(slots[path] if path else None for path in launch.pointers.values()),
        constants=tuple(_converted(value) for value in launch.constants),
        workspace_index=list(launch.pointers).index("workspace") if needs_workspace else None,
        workspace_bytes=launch.workspace_bytes,
    )


def _converted(value: Any) -> Any:
    """A bundle in the form the entry takes it, so that no call converts it again."""
    import tvm_ffi

    return tvm_ffi.convert(tuple(value)) if isinstance(value, tuple) else value

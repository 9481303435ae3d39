"""Every row's verdict on one graph and the ranked list, in one text and one JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..analyzer.facts import Analysis, SdpaFacts
from ..engines.row import Verdict
from ..vocab import Target
from .assemble import PlanEntry


@dataclass(frozen=True, slots=True)
class Report:
    """What the analyzer saw, what every row answered, how the plans rank.

    ranked: (plan name, is it a row's plan), best first. backend: why the backend has no plan in
    the list; empty when it has one or was not asked.
    """

    analysis: Analysis
    target: Target
    verdicts: tuple[Verdict, ...]
    proposals: tuple[PlanEntry, ...]
    ranked: tuple[tuple[str, bool], ...]
    backend: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: facts, target, rows (each accepted or every decline), ranked plan names."""
        facts = self.analysis.facts
        return {
            "ops": list(self.analysis.ops),
            "facts": facts.model_dump(mode="json") if facts else None,
            "target": self.target.as_dict(),
            "rows": [
                {
                    "name": verdict.row.name,
                    "engine_id": verdict.row.engine_id,
                    "accepted": verdict.accepted,
                    "qualified": verdict.row.qualified,
                    "plans": self._plans_of(verdict),
                    "declines": [decline.as_dict() for decline in verdict.declines],
                }
                for verdict in self.verdicts
            ],
            "ranked": [name for name, _ in self.ranked],
            "backend": self.backend,
        }

    def text(self) -> str:
        """For people: the graph in short, a block per row, the ranked list."""
        lines = [describe(self.analysis), f"target: {self.target.arch} ({self.target.name})", ""]
        for verdict in self.verdicts:
            lines.append(f"{verdict.row.name}: {'accepted' if verdict.accepted else 'declined'}")
            lines += [f"    {name}" for name in self._plans_of(verdict)]
            lines += [f"    {decline.render()}" for decline in verdict.declines]
        lines.append("")
        lines.append("ranked plans:" if self.ranked else "ranked plans: none")
        for index, (name, ours) in enumerate(self.ranked):
            lines.append(f"    [{index}] {name}{'' if ours else '  (backend)'}")
        if self.backend:
            lines.append(f"backend: {self.backend}")
        return "\n".join(lines)

    def _plans_of(self, verdict: Verdict) -> list[str]:
        return [plan.name for plan in self.proposals if plan.row is verdict.row]

    def __str__(self) -> str:
        return self.text()


def describe(analysis: Analysis) -> str:
    """The facts on a few lines."""
    facts = analysis.facts
    if facts is None:
        return f"graph: {', '.join(analysis.ops) or 'no nodes'}"
    heads = f"{facts.h_q}/{facts.h_k}" + (f"/{facts.h_v}" if facts.h_v != facts.h_k else "")
    extents = (
        f"B={facts.b} H={heads} S_q={facts.s_q} S_kv={facts.s_kv} d=({facts.d_qk}, {facts.d_v})"
    )
    head = f"graph: {facts.op} {extents} {facts.q.dtype} -> {facts.o.dtype}"
    return "\n".join([head, *(f"    {line}" for line in _details(facts))])


def _details(facts: SdpaFacts) -> list[str]:
    bounds = [f"{side} {n}" for side in ("left", "right") if (n := getattr(facts.band, side))]
    lines = [f"mask: {facts.mask}" + (f" ({', '.join(bounds)})" if bounds else "")]
    if facts.padding or facts.length_forms != ("none", "none"):
        lines.append(f"lengths: q {facts.length_forms[0]}, kv {facts.length_forms[1]}")
    if facts.paging:
        sizes = "/".join(map(str, dict.fromkeys(facts.page_sizes)))
        lines.append(f"paged: page size {sizes}, {facts.paging.pages_per_seq} pages a sequence")
    if facts.ragged:
        lines.append(f"ragged: {', '.join(facts.ragged)}")
    outputs = ("stats", "score_max", "score_sum_exp", "rng_dump", "sf_o", "amax_s", "amax_o")
    real = ["o", *(name for name in outputs if getattr(facts, name) is not None)]
    lines.append(f"outputs: {', '.join(real)}" + (" (log2 stats)" if facts.stats_use_log2 else ""))
    extras = ("sink", "bias", "alibi", "block_mask", "kv_mask", "dropout", "score_mod")
    used = [name for name in extras if getattr(facts, name)]
    if used:
        lines.append(f"with: {', '.join(used)}")
    return lines

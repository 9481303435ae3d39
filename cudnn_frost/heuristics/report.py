"""Every row's verdict on one graph and the ranked list, in one text and one JSON form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..analyzer.facts import Analysis, Scale, SdpaFacts
from ..engines.row import Verdict
from ..vocab import Target
from .assemble import PlanEntry

_OUTPUTS = ("stats", "score_max", "score_sum_exp", "rng_dump", "sf_o", "amax_s", "amax_o")
_EXTRAS = (
    "sink",
    "bias",
    "alibi",
    "block_mask",
    "kv_mask",
    "dropout",
    "score_mod",
    "attn_scale_prefolded",
    "override_shape_enabled",
)


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

    @property
    def served_by(self) -> tuple[str, ...]:
        """The accepting rows, the reference row left out."""
        accepting = (v.row for v in self.verdicts if v.accepted)
        return tuple(row.name for row in accepting if not row.is_reference)

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

    def rows_text(self) -> str:
        """A block per row: its plans, or every reason it declined."""
        return "\n\n".join("\n".join(self._block(verdict)) for verdict in self.verdicts)

    def text(self) -> str:
        """For people: the graph in short, a block per row, the ranked list."""
        lines = [describe(self.analysis), f"target: {_target(self.target)}", "", self.rows_text()]
        lines += ["", "ranked plans:" if self.ranked else "ranked plans: none"]
        for index, (name, ours) in enumerate(self.ranked):
            lines.append(f"    [{index}] {name}{'' if ours else '  (backend)'}")
        if self.backend:
            lines.append(f"backend: {self.backend}")
        return "\n".join(lines)

    def _block(self, verdict: Verdict) -> Iterator[str]:
        row = verdict.row
        if verdict.accepted:
            unproved = "" if row.qualified else ", not qualified on hardware"
            yield f"{row.name}: accepted{unproved}"
            yield from (f"    plan {name}" for name in self._plans_of(verdict))
            return
        count = len(verdict.declines)
        yield f"{row.name}: declined, {count} reason{'' if count == 1 else 's'}"
        yield from (f"    {decline.render()}" for decline in verdict.declines)

    def _plans_of(self, verdict: Verdict) -> list[str]:
        return [plan.name for plan in self.proposals if plan.row is verdict.row]

    def __str__(self) -> str:
        return self.text()


def _target(target: Target) -> str:
    return target.arch if target.name == target.arch else f"{target.arch} ({target.name})"


def describe(analysis: Analysis) -> str:
    """The facts on a few lines."""
    facts = analysis.facts
    if facts is None:
        return f"graph: {', '.join(analysis.ops) or 'no nodes'}"
    heads = f"{facts.h_q}/{facts.h_k}" + (f"/{facts.h_v}" if facts.h_v != facts.h_k else "")
    extents = (
        f"B={facts.b} H={heads} S_q={facts.s_q} S_kv={facts.s_kv} d=({facts.d_qk}, {facts.d_v})"
    )
    inputs = "/".join(dict.fromkeys(str(x.dtype) for x in (facts.q, facts.k, facts.v)))
    head = f"graph: {facts.op} {extents} {inputs} -> {facts.o.dtype}"
    return "\n".join([head, *(f"    {line}" for line in _details(facts))])


def _scale(scale: Scale) -> str:
    if scale.form == "absent":
        return "1 (not declared)"
    return f"{scale.value:.6g}" if scale.value is not None else f"bound at execute ({scale.form})"


def _details(facts: SdpaFacts) -> Iterator[str]:
    sides = {"left": facts.band.left, "right": facts.band.right}
    bounds = ", ".join(f"{side} {n}" for side, n in sides.items() if n is not None)
    yield f"mask: {facts.mask}" + (f" ({bounds})" if bounds else "")
    if facts.padding or facts.length_forms != ("none", "none"):
        yield f"lengths: q {facts.length_forms[0]}, kv {facts.length_forms[1]}"
    if facts.paging:
        sizes = "/".join(map(str, dict.fromkeys(facts.page_sizes)))
        yield f"paged: page size {sizes}, {facts.paging.pages_per_seq} pages a sequence"
    if facts.ragged:
        yield f"ragged: {', '.join(facts.ragged)}"
    yield f"attn_scale: {_scale(facts.attn_scale)}"
    real = [name for name in _OUTPUTS if getattr(facts, name) is not None]
    real = [*([] if facts.o_virtual else ["o"]), *real]
    yield f"outputs: {', '.join(real) or 'none'}" + (
        " (log2 stats)" if facts.stats_use_log2 else ""
    )
    used = [name for name in _EXTRAS if getattr(facts, name)]
    if used:
        yield f"with: {', '.join(used)}"

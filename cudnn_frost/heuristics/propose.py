"""Which plans the accepting rows put forward, best first: knobs, and what they configure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..analyzer.facts import Analysis, SdpaFacts
from ..engines import Row, Verdict, verdicts
from ..kernels.configs.decode_sm90 import DecodeSm90Config, config_for, page_box
from ..kernels.configs.prefill_sm90 import PrefillSm90Config
from ..vocab import Decline, DeclineCode, Target
from .assemble import Knobs, PlanEntry
from .cost import decode_seconds, prefill_seconds


@dataclass(frozen=True, slots=True)
class Family:
    """How a kernel family is tuned.

    knobs: the cuDNN knob names its plans carry.
    candidates: knob values worth proposing, best first.
    config: facts and knobs as the family's configuration.
    launch_knobs: those that the configuration does not hold -> their values.
    seconds: what a plan is expected to take; orders the rows that serve one graph.
    """

    knobs: tuple[str, ...]
    candidates: Callable[[Row, SdpaFacts], list[tuple[int, ...]]]
    config: Callable[[Row, SdpaFacts, Mapping[str, int]], Any]
    launch_knobs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seconds: Callable[[SdpaFacts, Target], float] = lambda facts, target: 0.0


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


def _decode_config(row: Row, facts: SdpaFacts, knobs: Mapping[str, int]) -> DecodeSm90Config:
    preset = _decode_preset(row, facts, 64)
    return replace(
        preset,
        tile_m=knobs["TILE_M"],
        tile_n=knobs["TILE_N"],
        num_stages=knobs["STAGES"],
    )


def _decode_preset(row: Row, facts: SdpaFacts, tile_m: int) -> DecodeSm90Config:
    flavor = row.capabilities.flavor(facts.d_shape, facts.paged_kv)
    assert flavor is not None
    return config_for(facts.q.dtype, flavor, tile_m, page_box(facts.page_sizes))


def _decode_candidates(row: Row, facts: SdpaFacts) -> list[tuple[int, ...]]:
    """Tiles that hold all packed rows first; whole sequences first where one block holds them."""
    tiles = (64, 128) if facts.s_q * facts.group <= 64 else (128, 64)
    found: list[tuple[int, ...]] = []
    for preset in (_decode_preset(row, facts, tile_m) for tile_m in tiles):
        stream_k = (0, 1) if facts.s_kv <= preset.tile_n else (1, 0)
        found += [(preset.num_stages, s, preset.tile_m, preset.tile_n) for s in stream_k]
    return found


FAMILIES: dict[str, Family] = {
    "reference": Family((), lambda row, facts: [()], lambda row, facts, knobs: None),
    "prefill_sm90": Family(
        ("STAGES", "TILE_M", "TILE_N"),
        lambda row, facts: [(2, 128, 128)],
        _prefill_config,
        seconds=prefill_seconds,
    ),
    "decode_sm90": Family(
        ("STAGES", "STREAM_K", "TILE_M", "TILE_N"),
        _decode_candidates,
        _decode_config,
        {"STREAM_K": (0, 1)},
        decode_seconds,
    ),
}


def knob_names(row: Row) -> tuple[str, ...]:
    """The cuDNN knob names a row's plans carry."""
    return FAMILIES[row.kernel].knobs if row.kernel else ()


def config_of(row: Row, facts: SdpaFacts, knobs: Knobs) -> Any:
    """The configuration a plan compiles; None for the reference row."""
    return FAMILIES[row.kernel].config(row, facts, dict(knobs))


def infeasible(row: Row, facts: SdpaFacts, knobs: Knobs) -> Decline | None:
    """Why the row's kernel cannot be built with these knobs, None when it can."""
    for name, values in FAMILIES[row.kernel].launch_knobs.items():
        if dict(knobs)[name] not in values:
            want = " or ".join(map(str, values))
            return Decline(DeclineCode.KERNEL_CONFIG, name, str(dict(knobs)[name]), want)
    config = config_of(row, facts, knobs)
    return config.infeasible() if config is not None else None


def _propose(verdict: Verdict) -> tuple[Verdict, list[PlanEntry]]:
    """A row's feasible plans; a verdict without any becomes a decline that says why."""
    if not verdict.accepted:
        return verdict, []
    row, facts = verdict.row, verdict.facts
    family = FAMILIES[row.kernel]
    plans, refusals = [], []
    for values in family.candidates(row, facts):
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

    The row that should take least comes first, a row's own best plan first, the reference row last.
    An accepting row has at least one plan: one whose kernel has no feasible configuration declines
    with the configuration's reason.
    """
    answers = [_propose(verdict) for verdict in verdicts(analysis, target, environment)]
    accepted = [(verdict, plans) for verdict, plans in answers if plans]
    accepted.sort(key=lambda answer: _rank(answer[0], target))
    return tuple(v for v, _ in answers), [plan for _, plans in accepted for plan in plans]


def _rank(verdict: Verdict, target: Target) -> tuple[bool, float]:
    row = verdict.row
    return row.is_reference, FAMILIES[row.kernel].seconds(verdict.facts, target)


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

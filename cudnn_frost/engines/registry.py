"""Every row there is, and one question to all of them."""

from __future__ import annotations

from collections.abc import Mapping

from ..analyzer.facts import Analysis
from ..vocab import Decline, DeclineCode, Target
from . import rows_any, rows_sm90
from .row import Row, Verdict
from .rules import graph_declines, judge

ENABLE_VARIABLE = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
UNQUALIFIED_VARIABLE = "CUDNN_FROST_UNQUALIFIED"

ROWS: tuple[Row, ...] = (*rows_sm90.ROWS, *rows_any.ROWS)
"""In the order that plans of different rows take when nothing else orders them."""

_BY_ID = {row.engine_id: row for row in ROWS}


def row_by_id(engine_id: int) -> Row | None:
    """The row that owns an engine id, None when no row does."""
    return _BY_ID.get(engine_id)


def offer_declines(row: Row, environment: Mapping[str, str]) -> tuple[Decline, ...]:
    """Reasons that do not depend on the graph; a row without a kernel gives that one alone."""
    if environment.get(ENABLE_VARIABLE, "1") == "0":
        remedy = f"Unset {ENABLE_VARIABLE}"
        return (Decline(DeclineCode.DISABLED, ENABLE_VARIABLE, "0", "any other value", remedy),)
    if not row.kernel:
        got = "not part of this version"
        return (Decline(DeclineCode.NO_KERNEL, "kernel", got, "no graph before it ships"),)
    if not row.qualified and environment.get(UNQUALIFIED_VARIABLE) != "1":
        remedy = f"Set {UNQUALIFIED_VARIABLE}=1 to be offered it all the same"
        got = "not proved on hardware with these sources"
        return (Decline(DeclineCode.UNQUALIFIED, "kernel", got, "graphs once it is", remedy),)
    return ()


def verdicts(
    analysis: Analysis, target: Target, environment: Mapping[str, str]
) -> tuple[Verdict, ...]:
    """Every row's verdict on a graph, in `ROWS` order.

    target: the machine the plan is for. environment: variables as `os.environ`.
    """
    answers = []
    for row in ROWS:
        declines = offer_declines(row, environment)
        if row.kernel:
            facts = analysis.facts
            graph = judge(facts, row.capabilities, target) if facts else graph_declines(analysis)
            declines = (*declines, *graph)
        answers.append(Verdict(row, declines, analysis))
    return tuple(answers)

"""Properties of the merge: one list out of the rows' plans and the backend's."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_frost.engines.rows_any import REFERENCE
from cudnn_frost.engines.rows_sm90 import DECODE, PREFILL
from cudnn_frost.heuristics.assemble import PlanEntry, _assemble, frost_first

MODES = "ABC"
_KNOBS = st.dictionaries(st.sampled_from(("TILE_M", "TILE_N")), st.integers(0, 2), max_size=2)
_SETTINGS = settings(max_examples=120, deadline=None)


def ours(row: Any = PREFILL, **knobs: int) -> PlanEntry:
    return PlanEntry(row.engine_id, tuple(sorted(knobs.items())), row)


def theirs(engine: int, mode: Any = None, index: int = 0, **knobs: int) -> PlanEntry:
    return PlanEntry(engine, dict(knobs), backend_index=index, mode=mode)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[str], dict[str, list[PlanEntry]], list[PlanEntry]]:
    """(modes, each mode's row plans, backend plans), with repetitions on every side."""
    modes = draw(st.lists(st.sampled_from(MODES), min_size=1, max_size=4))
    rows = st.sampled_from((PREFILL, DECODE, REFERENCE))
    plan = st.builds(lambda row, knobs: ours(row, **knobs), rows, _KNOBS)
    recommended = {mode: draw(st.lists(plan, max_size=4)) for mode in MODES}
    mode = st.sampled_from((*MODES, "elsewhere", None))
    drawn = draw(st.lists(st.tuples(st.integers(0, 4), mode, _KNOBS), max_size=8))
    backend = [theirs(e, m, i, **k) for i, (e, m, k) in enumerate(drawn)]
    return modes, recommended, backend


def run(problem: Any, placement: Any = frost_first) -> list[PlanEntry]:
    modes, recommended, backend = problem
    return _assemble(modes, recommended.__getitem__, backend, placement)


def effective_modes(modes: list[str], backend: list[PlanEntry]) -> list[str]:
    """The block of each backend plan: its mode's, else its predecessor's, else the first."""
    found, current = [], modes[0]
    for plan in backend:
        current = plan.mode if plan.mode in modes else current
        found.append(current)
    return found


def places(problem: Any) -> dict[Any, tuple[int, int, int]]:
    """Identity -> (block, side, position) of its best occurrence, by the rules as stated."""
    modes, recommended, backend = problem
    modes = list(dict.fromkeys(modes))
    every = [
        (plan, (len(modes) if plan.is_last else block, 0, block * 100 + position))
        for block, mode in enumerate(modes)
        for position, plan in enumerate(recommended[mode])
    ]
    blocks = effective_modes(modes, backend)
    every += [
        (plan, (modes.index(mode), 1, position))
        for position, (plan, mode) in enumerate(zip(backend, blocks, strict=True))
    ]
    best: dict[Any, tuple[int, int, int]] = {}
    for plan, place in every:
        best[plan.identity] = min(place, best.get(plan.identity, place))
    return best


def taken(problem: Any) -> list[PlanEntry]:
    """Every plan that goes in."""
    modes, recommended, backend = problem
    return [*(p for mode in set(modes) for p in recommended[mode]), *backend]


# ---- over arbitrary problems


@_SETTINGS
@given(problems())
def test_the_order_is_block_then_side_then_position(problem):
    best = places(problem)
    assert [plan.identity for plan in run(problem)] == sorted(best, key=best.__getitem__)


@_SETTINGS
@given(problems())
def test_nothing_is_lost_doubled_or_invented(problem):
    identities = [plan.identity for plan in run(problem)]
    assert len(set(identities)) == len(identities)
    assert set(identities) == {plan.identity for plan in taken(problem)}
    assert all(any(plan is given_ for given_ in taken(problem)) for plan in run(problem))


@_SETTINGS
@given(problems())
def test_within_a_block_no_row_plan_stands_behind_a_backend_plan(problem):
    best = places(problem)
    for before, after in pairwise(run(problem)):
        same = best[before.identity][0] == best[after.identity][0]
        assert not (same and before.row is None and after.row is not None)


@_SETTINGS
@given(problems())
def test_the_reference_row_is_behind_everything(problem):
    last = [plan.is_last for plan in run(problem)]
    assert last == sorted(last)


@_SETTINGS
@given(problems())
def test_the_backends_order_is_kept_when_it_came_mode_by_mode(problem):
    modes, recommended, backend = problem
    blocks = effective_modes(modes, backend)
    ordered = sorted(range(len(backend)), key=lambda i: modes.index(blocks[i]))
    in_order = [PlanEntry(b.engine_id, b.knobs, None, i, blocks[b.backend_index])
                for i, b in enumerate(backend[j] for j in ordered)]  # fmt: skip
    ranked = run((modes, recommended, in_order))
    indices = [plan.backend_index for plan in ranked if plan.row is None]
    assert indices == sorted(indices)


@_SETTINGS
@given(problems())
def test_the_recommended_order_is_kept(problem):
    modes, recommended, backend = problem
    one = modes[0]
    ranked = run(([one], recommended, backend))
    wanted = list({p.identity: p for p in recommended[one][::-1] if not p.is_last})[::-1]
    found = [p.identity for p in ranked if p.row is not None and not p.is_last]
    assert found == sorted(set(wanted), key=[p.identity for p in recommended[one]].index)


@_SETTINGS
@given(problems())
def test_it_is_pure(problem):
    modes, recommended, backend = problem
    before = (list(modes), {m: list(p) for m, p in recommended.items()}, list(backend))
    first, second = run(problem), run(problem)
    assert len(first) == len(second)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert (modes, recommended, backend) == before


@_SETTINGS
@given(problems(), st.integers())
def test_a_placement_may_permute(problem, seed):
    """Whatever order it chooses, nothing is lost and the reference row stays last."""

    def shuffled(mode, frost, backend):
        block = [*frost, *backend]
        random.Random(seed).shuffle(block)
        return block

    ranked = run(problem, shuffled)
    assert {plan.identity for plan in ranked} == set(places(problem))
    assert [plan.is_last for plan in ranked] == sorted(plan.is_last for plan in ranked)


# ---- by example


def test_mode_blocks_come_in_the_order_asked():
    backend = [theirs(1, "A", 0), theirs(2, "B", 1)]
    ranked = _assemble(["B", "A"], lambda mode: [], backend)
    assert [plan.engine_id for plan in ranked] == [2, 1]


def test_each_mode_is_asked_once_in_order():
    asked: list[str] = []
    _assemble(["B", "A", "B"], lambda mode: asked.append(mode) or [], [])
    assert asked == ["B", "A"]


def test_the_later_modes_row_plans_precede_only_its_own_block():
    by_mode = {"A": [ours(PREFILL, TILE_M=1)], "B": [ours(PREFILL, TILE_M=2)]}
    backend = [theirs(1, "A", 0), theirs(2, "B", 1)]
    ranked = _assemble(["A", "B"], by_mode.__getitem__, backend)
    assert ranked == [by_mode["A"][0], backend[0], by_mode["B"][0], backend[1]]


def test_a_plan_without_a_mode_stays_behind_its_predecessor():
    backend = [theirs(1, "A", 0), theirs(2, None, 1), theirs(3, "B", 2), theirs(4, None, 3)]
    ranked = _assemble(["B", "A"], lambda mode: [], backend)
    assert [plan.engine_id for plan in ranked] == [3, 4, 1, 2]


def test_a_first_plan_without_a_mode_opens_the_first_block():
    backend = [theirs(1, None, 0), theirs(2, "B", 1)]
    ranked = _assemble(["A", "B"], lambda mode: [], backend)
    assert [plan.engine_id for plan in ranked] == [1, 2]


def test_a_mode_that_was_not_asked_counts_as_none():
    backend = [theirs(1, "A", 0), theirs(2, "C", 1), theirs(3, "B", 2)]
    ranked = _assemble(["A", "B"], lambda mode: [], backend)
    assert [plan.engine_id for plan in ranked] == [1, 2, 3]


def test_equal_engine_and_knobs_are_one_plan():
    backend = [
        theirs(1, "A", 0, TILE_M=1),
        theirs(1, "A", 1, TILE_M=2),
        theirs(1, "B", 2, TILE_M=1),
    ]
    ranked = _assemble(["A", "B"], lambda mode: [ours(TILE_M=1)], backend)
    assert [(plan.engine_id, plan.backend_index) for plan in ranked] == [
        (PREFILL.engine_id, None),
        (1, 0),
        (1, 1),
    ]


def test_knobs_in_another_order_are_the_same_knobs():
    first, second = theirs(1, TILE_M=1, TILE_N=2), theirs(1, TILE_N=2, TILE_M=1)
    assert first.identity == second.identity
    assert first.identity != theirs(1, TILE_M=2, TILE_N=1).identity
    assert first.identity != theirs(2, TILE_M=1, TILE_N=2).identity


@pytest.mark.parametrize("modes", [["A"], ["A", "B"], []])
def test_empty_sides(modes):
    plan, other = ours(), theirs(1, "A")
    assert _assemble(modes, lambda mode: [], []) == []
    assert _assemble(modes, lambda mode: [plan], []) == [plan]
    assert _assemble(modes, lambda mode: [], [other]) == [other]
    assert _assemble(modes, lambda mode: [plan], [other]) == [plan, other]


def test_the_reference_row_alone_follows_the_backend():
    plan, other = ours(REFERENCE), theirs(1, "A")
    assert _assemble(["A", "B"], lambda mode: [plan], [other]) == [other, plan]


def _drops_ours(mode, frost, backend):
    return backend


def _drops_theirs(mode, frost, backend):
    return frost


def _invents(mode, frost, backend):
    return [*frost, *backend, ours(DECODE)]


def _doubles(mode, frost, backend):
    return [*frost, *backend, *backend]


def _swaps(mode, frost, backend):
    """As many plans as before, one of them an equal of another."""
    return [*frost[:-1], ours(DECODE), *backend]


@pytest.mark.parametrize("placement", [_drops_ours, _drops_theirs, _invents, _doubles, _swaps])
def test_a_placement_that_changes_the_plans_is_refused(placement):
    with pytest.raises(ValueError, match="permute"):
        _assemble(["A"], lambda mode: [ours()], [theirs(1, "A")], placement)


def test_a_placement_decides_the_order_of_a_block():
    plan, other = ours(), theirs(1, "A")
    ranked = _assemble(["A"], lambda mode: [plan], [other], lambda mode, f, b: [*b, *f])
    assert ranked == [other, plan]


def test_a_placement_sees_each_block_and_never_the_reference_row():
    seen = []

    def note(mode, frost, backend):
        seen.append((mode, list(frost), list(backend)))
        return frost_first(mode, frost, backend)

    plan, a, b = ours(), theirs(1, "A", 0), theirs(2, "B", 1)
    _assemble(["A", "B"], lambda mode: [ours(REFERENCE), plan], [a, b], note)
    assert seen == [("A", [plan], [a]), ("B", [plan], [b])]


def test_a_plans_name_is_its_row_and_sorted_knobs():
    name = ours(DECODE, TILE_N=128, PACK_GQA=1).name
    assert name == "frost_sdpa_fwd_decode_sm90[PACK_GQA=1, TILE_N=128]"
    assert ours(REFERENCE).name == "frost_sdpa_fwd_reference"
    assert theirs(1).name == ""

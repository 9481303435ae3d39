"""The reference row, through `Graph`, against the float64 oracle over random contract graphs.

The two share no code: the row reads `SdpaFacts`, the oracle the declared graph itself.
"""

from __future__ import annotations

import cudnn
import pytest
from hypothesis import HealthCheck, given, seed, settings

import cudnn_frost
from tests.reference.compare import check
from tests.reference.draws import cases

ROW = "frost_sdpa_fwd_reference"
DRAWS, GROUPS = 520, 40


@pytest.fixture(autouse=True)
def _no_backend_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning against the backend's library is another test's business, and slow 500 times."""

    def declines(self, heuristics=None):
        raise cudnn.cudnnGraphNotSupportedError("not asked here")

    monkeypatch.setattr(cudnn.pygraph, "create_execution_plans", declines)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_contract_graphs(group: int) -> None:
    @seed(group)
    @settings(
        max_examples=DRAWS // GROUPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def agrees(case) -> None:
        built = case.build(graph_factory=cudnn_frost.Graph)
        graph = built.graph
        graph.build([cudnn.heur_mode.A])
        assert graph.selected_engine.name == ROW
        graph.execute(built.buffers)
        check(graph, built.buffers)
        built.check_canaries()

    agrees()

"""The cost model orders the rows that serve one graph."""

from __future__ import annotations

import pytest

from cudnn_frost.analyzer.facts import Band
from cudnn_frost.heuristics.cost import decode_seconds, prefill_seconds

from .samples import HOPPER, facts


@pytest.mark.parametrize("s_q", [1, 8])
def test_short_queries_go_to_the_decode_row(s_q):
    graph = facts(b=4, h=(32, 8, 8), s=(s_q, 4096))
    assert decode_seconds(graph, HOPPER) < prefill_seconds(graph, HOPPER)


@pytest.mark.parametrize("s_q", [512, 1024, 4096])
@pytest.mark.parametrize("band", [Band(), Band(right=0)], ids=lambda band: band.kind)
def test_long_queries_go_to_the_prefill_row(s_q, band):
    graph = facts(b=4, h=(32, 8, 8), s=(s_q, s_q), band=band)
    assert prefill_seconds(graph, HOPPER) < decode_seconds(graph, HOPPER)


@pytest.mark.parametrize("seconds", [prefill_seconds, decode_seconds])
def test_hidden_keys_cost_nothing(seconds):
    whole = facts(h=(32, 8, 8), s=(4096, 4096))
    window = facts(h=(32, 8, 8), s=(4096, 4096), band=Band(left=128, right=0))
    assert seconds(window, HOPPER) < seconds(whole, HOPPER) / 4

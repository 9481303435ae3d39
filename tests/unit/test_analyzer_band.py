"""The band against the contract's formula, written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudnn_frost.analyzer.band import visible_range
from cudnn_frost.analyzer.facts import Band

bounds = st.none() | st.integers(0, 12)


@given(
    alignment=st.sampled_from(["TOP_LEFT", "BOTTOM_RIGHT"]),
    left=st.none() | st.integers(-3, 12),
    right=bounds,
    len_q=st.integers(0, 9),
    len_kv=st.integers(0, 9),
)
def test_visible_range_is_the_formula(alignment, left, right, len_q, len_kv):
    band = Band(alignment=alignment, left=left, right=right)
    off = len_kv - len_q if alignment == "BOTTOM_RIGHT" else 0
    for i in range(11):
        visible = [
            j
            for j in range(len_kv)
            if (right is None or j <= i + off + right)
            and (left is None or j > i + off - left)
            and i < len_q
        ]
        lo, hi = visible_range(band, i, len_q, len_kv)
        assert visible == list(range(lo, hi))

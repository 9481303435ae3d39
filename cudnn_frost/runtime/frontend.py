"""The few things about a `cudnn.pygraph` that have no documented reader.

Everything read here is listed here; a test fails when the installed frontend changed any of it.
"""

from __future__ import annotations

from typing import Any


def auto_bound(graph: Any) -> dict[int, Any]:
    """uid -> framework tensor that a builder call received in place of a graph tensor."""
    return graph._data_bindings


def freeze(graph: Any) -> None:
    """Refuse further mutation: a plan refers to the graph as it is now."""
    graph._freeze()

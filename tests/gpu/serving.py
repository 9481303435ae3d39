"""One row's plans in a graph's list, run with a workspace that nobody may trust."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

POISON = 0xFF
MARGIN_BYTES = 512


def plan_names(graph: Any) -> list[str]:
    return [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]


def plans_of(graph: Any, row: str) -> list[int]:
    """Indices of a row's plans in the planned list, best first."""
    return [i for i, n in enumerate(plan_names(graph)) if n == row or n.startswith(f"{row}[")]


def workspace_bytes(graph: Any, index: int) -> int:
    """What a plan needs; builds and selects it."""
    graph.build_plan_at_index(index)
    return graph.get_workspace_size()


def run_plan(
    graph: Any,
    index: int,
    row: str,
    buffers: Mapping[int, torch.Tensor],
    handle: Any,
    fill: int = POISON,
) -> None:
    """Run a plan and wait for it; its workspace starts as `fill` bytes (0xFF: NaN in each float).

    Asserts that the row serves the plan and that nothing behind the workspace is written.
    """
    need = workspace_bytes(graph, index)
    name = graph.selected_engine.name if graph.selected_engine else None
    assert name == row, f"plan {index} is served by {name or 'the cuDNN backend'}, not {row}"
    device = next(iter(buffers.values())).device
    space = torch.full((need + MARGIN_BYTES,), fill, dtype=torch.uint8, device=device)
    graph.execute(buffers, space, handle)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert bool((space[need:] == fill).all()), "the run wrote behind its workspace"

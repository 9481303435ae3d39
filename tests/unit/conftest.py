"""Fixtures shared by the unit tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch):
    """`Graph` over a backend that is played; the class, for a test to set what it declines."""
    from cudnn_frost import graph

    from .backend import PlayedBackend

    class Backend(PlayedBackend):
        pass

    monkeypatch.setattr(graph, "_BackendGraph", Backend)
    return Backend


@pytest.fixture
def hopper() -> dict[str, Any]:
    """Constructor arguments with which the installed libcudnn plans for an H200."""
    from .backend import Unavailable
    from .backend import hopper as arguments

    try:
        return arguments()
    except Unavailable as reason:
        pytest.skip(str(reason))

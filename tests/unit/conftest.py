"""Fixtures shared by the unit tests."""

from __future__ import annotations

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

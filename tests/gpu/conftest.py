"""GPU cases: they run where there is a Hopper GPU and are not collected elsewhere."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="needs a compute capability 9.0 GPU"))


@pytest.fixture(scope="session")
def handle():
    import cudnn

    return cudnn.create_handle()


@pytest.fixture(autouse=True)
def _unqualified(monkeypatch):
    """Proving a row is how it becomes qualified."""
    monkeypatch.setenv("CUDNN_FROST_UNQUALIFIED", "1")

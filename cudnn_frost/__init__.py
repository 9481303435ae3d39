"""Open CuTe DSL attention engines in the plan list of `cudnn.pygraph`.

`Graph` is `cudnn.pygraph` with more plans; `install()` puts it in that name's place. Importing the
package loads nothing else: `Graph` brings the cuDNN frontend when it is first asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph, install, uninstall

__version__ = "0.1.0"
__all__ = ["Graph", "__version__", "get_include", "install", "uninstall"]


def get_include() -> str:
    """The folder with `cudnn_frost/launch.h`, for C++ that calls prepared launches."""
    return os.path.join(os.path.dirname(__file__), "include")


def __getattr__(name: str) -> Any:
    if name in ("Graph", "install", "uninstall"):
        from . import graph

        return getattr(graph, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

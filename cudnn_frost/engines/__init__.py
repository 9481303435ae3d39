"""Rows, their capabilities and the rules that judge a graph by them."""

from .capabilities import Capabilities
from .registry import ROWS, row_by_id, verdicts
from .row import Row, Verdict

__all__ = ["ROWS", "Capabilities", "Row", "Verdict", "row_by_id", "verdicts"]

"""Words shared by every layer: data types, declines, targets. Standard library only."""

from .decline import Decline, DeclineCode
from .dtypes import DType
from .target import KNOWN_TARGETS, Target

__all__ = ["KNOWN_TARGETS", "DType", "Decline", "DeclineCode", "Target"]

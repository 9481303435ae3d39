"""Attention over sequences sharded across the ranks of a `torch.distributed` process group.

`ForwardProvider` is attention on one rank: packed sequences, O and Stats. `all_to_all_attention`
(heads exchanged for tokens) and `ring_attention` (K and V passed round, partial results merged by
their Stats) put it to work on a `Sharding`.
"""

from __future__ import annotations

from .parallel import all_to_all_attention, merge, ring_attention
from .provider import MODE_VARIABLE, ForwardProvider, Mode, PackedSequences
from .sharding import Sharding

__all__ = [
    "MODE_VARIABLE",
    "ForwardProvider",
    "Mode",
    "PackedSequences",
    "Sharding",
    "all_to_all_attention",
    "merge",
    "ring_attention",
]

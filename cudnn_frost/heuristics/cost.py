"""How long a kernel takes, well enough to order the rows that serve one graph.

Seconds from the declaration alone: per-batch lengths count as the declared extents. Rates are per
Hopper multiprocessor; `docs/notes/decode_sm90.md` says which are measured.
"""

from __future__ import annotations

from ..analyzer.facts import SdpaFacts
from ..vocab import Target

# multiply-adds, twice each, and bytes per second and multiprocessor
_PREFILL_FLOPS = 5.0e12
_DECODE_FLOPS = 3.0e12
_BYTES = 3.2e10
# a launch, and what precedes the first product
_START = 4e-6
# a second kernel that joins partial results
_COMBINE = 3e-6
_TILE = 128
_ROWS_SAMPLED = 64


def _visible_keys(facts: SdpaFacts, rows: int) -> float:
    """Mean number of keys that a block of `rows` successive queries is shown."""
    band = facts.band
    offset = facts.s_kv - facts.s_q if band.alignment == "BOTTOM_RIGHT" else 0
    blocks = _ceil(facts.s_q, rows)
    step = max(1, blocks // _ROWS_SAMPLED)
    total, count = 0, 0
    for block in range(0, blocks, step):
        last = min((block + 1) * rows, facts.s_q) - 1
        end = facts.s_kv if band.right is None else last + offset + band.right + 1
        first = 0 if band.left is None else block * rows + offset - band.left + 1
        total += max(0, min(end, facts.s_kv) - max(first, 0))
        count += 1
    return total / max(count, 1)


def _kv_bytes(facts: SdpaFacts, keys: float) -> float:
    row = facts.h_k * facts.d_qk * facts.k.dtype.bytes + facts.h_v * facts.d_v * facts.v.dtype.bytes
    return facts.b * keys * row


def _block_flops(facts: SdpaFacts, keys: float) -> float:
    """One tile of queries over its keys."""
    return 2 * _TILE * _ceil(round(keys), _TILE) * _TILE * (facts.d_qk + facts.d_v)


def prefill_seconds(facts: SdpaFacts, target: Target) -> float:
    """A tile of queries of one head to a thread block, in whole rounds."""
    sms = max(1, target.sm_count)
    keys = _visible_keys(facts, _TILE)
    rounds = _ceil(facts.b * facts.h_q * _ceil(facts.s_q, _TILE), sms)
    memory = _kv_bytes(facts, keys) / (_BYTES * min(sms, facts.b * facts.h_q))
    return _START + max(rounds * _block_flops(facts, keys) / _PREFILL_FLOPS, memory)


def decode_seconds(facts: SdpaFacts, target: Target) -> float:
    """All heads of a group in a tile, the keys of all sequences shared out evenly."""
    sms = max(1, target.sm_count)
    rows = facts.s_q * max(1, facts.group)
    keys = _visible_keys(facts, max(1, _TILE // max(1, facts.group)))
    blocks = facts.b * facts.h_k * _ceil(rows, _TILE)
    work = blocks * _block_flops(facts, keys) / _DECODE_FLOPS
    memory = _kv_bytes(facts, keys) / _BYTES
    return _START + _COMBINE + max(work, memory) / sms


def _ceil(a: int, b: int) -> int:
    return -(-a // b)

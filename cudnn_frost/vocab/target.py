"""The machine a plan is for: what rows and configurations may ask about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A device and the software beside it.

    name: what to call it in reports.
    cc: compute capability, (0, 0) when there is no CUDA device.
    sm_count: multiprocessors.
    smem_per_block: opt-in shared memory per thread block, bytes.
    registers_per_sm: 32-bit registers per multiprocessor.
    versions: installed package -> version; an absent package is missing. Empty = not looked at
        (analysis for another machine), which declines nothing.
    """

    name: str
    cc: tuple[int, int]
    sm_count: int
    smem_per_block: int
    registers_per_sm: int = 65536
    versions: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def arch(self) -> str:
        """`sm90`, `sm100`, ... or `cpu`."""
        return f"sm{self.cc[0]}{self.cc[1]}" if self.cc != (0, 0) else "cpu"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Target:
        """Inverse of `as_dict`; ValueError names a field missing, unknown or of a wrong type."""
        known = {"name", "cc", "sm_count", "smem_per_block", "registers_per_sm", "versions"}
        for key in data:
            if key not in known:
                raise ValueError(
                    f"target field {key!r} is unknown; known: {', '.join(sorted(known))}"
                )
        for key in ("name", "cc", "sm_count", "smem_per_block"):
            if key not in data:
                raise ValueError(f"target field {key!r} is missing")
        cc = data["cc"]
        if not (
            isinstance(cc, (list, tuple)) and len(cc) == 2 and all(isinstance(x, int) for x in cc)
        ):
            raise ValueError(f"target field 'cc' must be [major, minor], got {cc!r}")
        for key in ("sm_count", "smem_per_block", "registers_per_sm"):
            if key in data and (not isinstance(data[key], int) or isinstance(data[key], bool)):
                raise ValueError(f"target field {key!r} must be an integer, got {data[key]!r}")
        return cls(**{**data, "cc": (cc[0], cc[1])})


KNOWN_TARGETS: dict[str, Target] = {
    "sm90": Target("sm90", (9, 0), sm_count=132, smem_per_block=232448),
    "sm100": Target("sm100", (10, 0), sm_count=148, smem_per_block=232448),
    "cpu": Target("cpu", (0, 0), sm_count=0, smem_per_block=0),
}

"""An engine row: a fixed identity, its capabilities, and which kernel family answers for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..analyzer.facts import Analysis, SdpaFacts
from ..vocab import Decline
from .capabilities import Capabilities


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One engine.

    name: stable plan-name prefix; never contains `eng<digit>`.
    engine_id: fixed for ever, append-only, in this package's own range.
    capabilities: what it takes.
    kernel: the kernel family that `lower` translates to; `reference` for the torch row, empty
        while the row has no kernel.
    qualified: proved on hardware with the sources as they are (a test checks the record).
    behavior_notes, numerical_notes: names in `cudnn.behavior_note` and `cudnn.numerical_note`.
    summary: one line for tables.
    """

    name: str
    engine_id: int
    capabilities: Capabilities
    kernel: str = ""
    qualified: bool = False
    behavior_notes: tuple[str, ...] = ()
    numerical_notes: tuple[str, ...] = ()
    summary: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def is_reference(self) -> bool:
        return self.kernel == "reference"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row's answer to one graph: every decline, or none and it accepts."""

    row: Row
    declines: tuple[Decline, ...] = ()
    analysis: Analysis = field(default_factory=Analysis)

    @property
    def accepted(self) -> bool:
        return not self.declines

    @property
    def facts(self) -> SdpaFacts:
        """The facts judged; raises ValueError when the graph gave none."""
        if self.analysis.facts is None:
            raise ValueError(f"{self.row.name}: the graph has no attention facts")
        return self.analysis.facts

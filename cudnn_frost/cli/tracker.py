"""The tracker's data files: where they are, what they hold, how they are read.

`measurements/*.json` is what `bench/` writes, one run each; `gaps.json` is kept by hand;
`qualification/*.json` is `qualification.py`'s. All errors are `SourceError` naming file and field.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..analyzer.files import SourceError

OURS = "frost"
"""The runner of a measurement that is this package's row."""

T = TypeVar("T")


class Data(BaseModel):
    """A record of a data file: immutable, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShapeMeasurement(Data):
    """One problem shape: every runner's median device time of the same run.

    seconds: runner -> seconds; `frost` is this package's row, the others are peers.
    flops: floating-point operations of the problem, 0 when not stated.
    notes: `plans` (runner -> plan name) and whatever else the benchmark keeps.
    """

    shape: str
    seconds: dict[str, float] = Field(min_length=1)
    flops: float = 0.0
    notes: dict[str, Any] = Field(default_factory=dict)

    @property
    def row(self) -> str:
        """The row behind `frost`, as its plan name says; empty when the notes do not."""
        return str(self.notes.get("plans", {}).get(OURS, "")).partition("[")[0]

    def ratios(self) -> dict[str, float]:
        """Peer -> the peer's time over ours: above 1 the row is faster. Empty without a row."""
        ours = self.seconds.get(OURS)
        if not ours:
            return {}
        return {peer: t / ours for peer, t in self.seconds.items() if peer != OURS}


class MeasurementRecord(Data):
    """One benchmark run.

    command: what was run. machine: `device` and package -> version. rates: figures of the same
    run to read the times against (`matmul_flops` in FLOP/s, `copy_bytes` in bytes/s).
    """

    command: str
    machine: dict[str, str]
    rates: dict[str, float] = Field(default_factory=dict)
    shapes: tuple[ShapeMeasurement, ...] = Field(min_length=1)

    @property
    def peers(self) -> tuple[str, ...]:
        """Every runner but ours, in order of appearance."""
        return tuple(dict.fromkeys(n for s in self.shapes for n in s.seconds if n != OURS))


class Gap(Data):
    """Something that is not served, and what callers meet meanwhile.

    row: a row's name, or empty for what no row stands for.
    missing: what is not there. meanwhile: what happens to such a graph today.
    """

    row: str = ""
    missing: str = Field(min_length=1)
    meanwhile: str = Field(min_length=1)


def default_directory() -> Path:
    """`tracker/` of the checkout that this package was imported from."""
    return Path(__file__).parent.parent.parent / "tracker"


def load(path: Path, shape: type[T] | Any) -> T:
    """A JSON file as `shape` (a type that pydantic validates); SourceError names what is wrong."""
    try:
        return TypeAdapter(shape).validate_python(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SourceError(str(path), "", error.strerror or str(error)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SourceError(str(path), "", f"not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise SourceError(str(path), field, first["msg"]) from error


def read_gaps(directory: Path) -> tuple[Gap, ...]:
    """`gaps.json`, in its order; none when there is no file."""
    path = directory / "gaps.json"
    return load(path, tuple[Gap, ...]) if path.exists() else ()


def read_measurements(directory: Path) -> dict[str, MeasurementRecord]:
    """File name -> run, of `measurements/*.json` in name order."""
    found = sorted((directory / "measurements").glob("*.json"))
    return {path.name: load(path, MeasurementRecord) for path in found}

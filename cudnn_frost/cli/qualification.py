"""Which rows are proved on hardware with the sources as they are.

A record says that a row's cases ran on a device with kernel sources of a certain digest and with
the capabilities the row claimed then. It holds for as long as both are what they were.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from ..analyzer.files import SourceError
from ..engines import ROWS, Capabilities, Row
from ..runtime.cache import kernel_module
from .tracker import Data, load

_PACKAGE = Path(__file__).parent.parent
_KERNELS = "cudnn_frost.kernels"
VERSIONS = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "driver", "cudnn")
"""What a record must state the version of."""


class WorstError(Data):
    """Over all cases. o: relative L2 error of O against the float64 oracle.

    stats: largest absolute error of Stats, natural-log units; None when no case wrote Stats.
    """

    o: float = Field(ge=0, allow_inf_nan=False)
    stats: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class QualificationRecord(Data):
    """The proof of one row on one device; `qualification/<row>.json` of the tracker.

    digest: of the kernel's sources at the run. capabilities: what the row claimed at the run.
    cc: compute capability. versions: at least those of `VERSIONS`. command: what was run.
    """

    row: str
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    capabilities: dict[str, Any]
    device: str = Field(min_length=1)
    cc: tuple[int, int]
    versions: dict[str, str]
    cases_run: int = Field(gt=0)
    cases_failed: int = Field(ge=0)
    worst_error: WorstError
    command: str = Field(min_length=1)

    @field_validator("versions")
    @classmethod
    def _names_them_all(cls, versions: dict[str, str]) -> dict[str, str]:
        missing = [name for name in VERSIONS if not versions.get(name)]
        if missing:
            raise ValueError(f"no version of {', '.join(missing)}")
        return versions


def sources(family: str, package: Path = _PACKAGE) -> dict[str, Path]:
    """Module -> file, of a family's kernel and all it imports below `cudnn_frost.kernels`.

    Imports are followed in the syntax trees; nothing is imported. Raises FileNotFoundError when
    the family has no module.
    """
    root = kernel_module(family)
    found: dict[str, Path] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        path = _file_of(module, package)
        if module in found:
            continue
        if path is None:
            if module == root:
                raise FileNotFoundError(f"kernel family {family!r}: there is no module {module}")
            continue
        found[module] = path
        waiting += _imports(module, path)
    return dict(sorted(found.items()))


def _file_of(module: str, package: Path) -> Path | None:
    """The file of a module below the kernels package, None for anything else."""
    if not module.startswith(f"{_KERNELS}."):
        return None
    stem = package.joinpath(*module.split(".")[1:])
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)


def _imports(module: str, path: Path) -> Iterator[str]:
    """Every module that a file may import: `from a import b` may mean `a` or `a.b`."""
    parents = module.split(".")
    parents = parents if path.name == "__init__.py" else parents[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def digest(row: Row, package: Path = _PACKAGE) -> str:
    """SHA-256 over the syntax trees of a row's kernel sources.

    Comments, docstrings, layout and the Python version do not enter; names, constants and
    annotations do. Raises ValueError for a row without kernel sources.
    """
    if not row.kernel or row.is_reference:
        raise ValueError(f"{row.name} has no kernel sources")
    total = hashlib.sha256()
    for module, path in sources(row.kernel, package).items():
        total.update(f"{module}\n{_canonical(ast.parse(path.read_bytes()))}\n".encode())
    return total.hexdigest()


def _canonical(value: object) -> str:
    """A syntax tree as text, the same under every Python: positions and empty fields left out."""
    if isinstance(value, ast.AST):
        shown = []
        for name, child in ast.iter_fields(value):
            if name == "body" and isinstance(child, list):
                child = _without_docstring(child)
            if name not in ("kind", "type_comment") and child is not None and child != []:
                shown.append(f"{name}={_canonical(child)}")
        return f"{type(value).__name__}({','.join(shown)})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


def claims(capabilities: Capabilities) -> dict[str, Any]:
    """What a row claims, as plain data; fields at their default claim nothing and are left out."""
    return {
        field.name: plain(value)
        for field in fields(capabilities)
        if (value := getattr(capabilities, field.name)) != field.default
    }


def plain(value: Any) -> Any:
    """A capability as JSON has it: sets as sorted lists."""
    if isinstance(value, frozenset):
        return sorted((plain(x) for x in value), key=str)
    if isinstance(value, tuple):
        return [plain(x) for x in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def write_record(
    directory: Path,
    row: Row,
    *,
    device: str,
    cc: tuple[int, int],
    versions: Mapping[str, str],
    cases: tuple[int, int],
    worst_error: WorstError,
    command: str,
) -> Path:
    """Write the record of a run just made, with the digest and claims of the sources here.

    directory: the tracker. cases: (run, failed). Returns the file; a pydantic ValidationError (a
    ValueError) names the field when the record is not one.
    """
    record = QualificationRecord(
        row=row.name,
        digest=digest(row),
        capabilities=claims(row.capabilities),
        device=device,
        cc=cc,
        versions=dict(sorted(versions.items())),
        cases_run=cases[0],
        cases_failed=cases[1],
        worst_error=worst_error,
        command=command,
    )
    path = directory / "qualification" / f"{row.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    return path


def read_records(directory: Path) -> dict[str, QualificationRecord]:
    """Row name -> record, of `qualification/*.json`; SourceError names file and field."""
    found = {}
    for path in sorted((directory / "qualification").glob("*.json")):
        record: QualificationRecord = load(path, QualificationRecord)
        if record.row != path.stem:
            raise SourceError(str(path), "row", f"{record.row!r} is not the file's name")
        found[record.row] = record
    return found


def doubts(row: Row, record: QualificationRecord | None) -> tuple[str, ...]:
    """Why a record does not prove a row as it is here; empty when it does."""
    if record is None:
        return ("there is no record",)
    if not row.kernel or row.is_reference:
        return ("the row has no kernel sources",)
    reasons = []
    if record.digest != digest(row):
        reasons.append("the kernel's sources have changed since the record was made")
    if record.cases_failed:
        reasons.append(f"{record.cases_failed} of {record.cases_run} cases failed")
    now = claims(row.capabilities)
    for name in sorted({*now, *record.capabilities}):
        if now.get(name) != record.capabilities.get(name):
            was, is_now = record.capabilities.get(name), now.get(name)
            reasons.append(f"the row's {name} was {was} at the run and is {is_now}")
    cc = row.capabilities.cc
    if cc is not None and record.cc not in cc:
        reasons.append(f"it was made on compute capability {record.cc[0]}.{record.cc[1]}")
    return tuple(reasons)


def problems(
    records: Mapping[str, QualificationRecord], rows: Iterable[Row] = ROWS
) -> tuple[str, ...]:
    """Every claim that no record proves, and every record of no row; empty when all is well."""
    rows = tuple(rows)
    found = [
        f"{row.name} claims to be qualified, but {reason}"
        for row in rows
        if row.qualified and not row.is_reference
        for reason in doubts(row, records.get(row.name))
    ]
    names = {row.name for row in rows}
    found += [f"{name}: there is no such row" for name in records if name not in names]
    return tuple(found)

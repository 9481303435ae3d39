"""Reading declarations from files: this package's own format, frontend dumps, frontend logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .dumps import record_of_dump
from .record import GraphRecord


class SourceError(ValueError):
    """A file that holds no readable declaration: which file, which field, and why."""

    def __init__(self, path: str, field: str, why: str) -> None:
        self.path, self.field, self.why = path, field, why
        super().__init__(f"{path}: {field}: {why}" if field else f"{path}: {why}")


def read_source(path: str | Path) -> list[GraphRecord]:
    """Every declaration in a file, in order; SourceError when there is none or one is unreadable.

    A declaration file is the JSON form of `GraphRecord`, or a list of them. A dump is the
    frontend's graph JSON. A log is text in which some lines are such dumps.
    """
    name = str(path)
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise SourceError(name, "", str(why)) from None
    try:
        documents = [(f"[{i}]", d) for i, d in enumerate(_as_list(json.loads(text)))]
        if len(documents) == 1:
            documents = [("", documents[0][1])]
    except json.JSONDecodeError as error:
        documents = list(_logged(text))
        if not documents:
            where = f"line {error.lineno}"
            why = f"neither JSON ({error.msg}) nor a log with graphs in it"
            raise SourceError(name, where, why) from None
    if not documents:
        raise SourceError(name, "", "holds no graph")
    return [_record(name, where, document) for where, document in documents]


def _as_list(document: Any) -> list[Any]:
    return document if isinstance(document, list) else [document]


def _logged(text: str) -> Iterator[tuple[str, Any]]:
    """(line, graph) of each line of a log that is a graph."""
    for number, line in enumerate(text.splitlines(), 1):
        start = line.find('{"context":')
        if start < 0:
            continue
        try:
            yield f"line {number}", json.loads(line[start:])
        except json.JSONDecodeError:
            continue


def _record(name: str, where: str, document: Any) -> GraphRecord:
    prefix = f"{where} " if where else ""
    if not isinstance(document, dict):
        got = type(document).__name__
        raise SourceError(name, where, f"a graph is a JSON object, this is a {got}")
    try:
        if "json_version" in document or "context" in document:
            return record_of_dump(document)
        return GraphRecord.model_validate({"origin": "file", **document})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SourceError(name, f"{prefix}{field}", first["msg"]) from None
    except KeyError as error:
        raise SourceError(name, f"{prefix}{error.args[0]}", "missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise SourceError(name, where, str(error)) from None

"""Reading declarations from files: this package's own format, frontend dumps, frontend logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .dumps import record_of_dump
from .record import GraphRecord

# how every dump starts, compact or indented
_DUMP = re.compile(r'\{\s*"context"\s*:')


class SourceError(ValueError):
    """A file that holds no readable declaration: which file, which field, and why."""

    def __init__(self, path: str, field: str, why: str) -> None:
        self.path, self.field, self.why = path, field, why
        super().__init__(f"{path}: {field}: {why}" if field else f"{path}: {why}")


def read_source(path: str | Path) -> list[GraphRecord]:
    """Every declaration in a file, in order; SourceError when there is none or one is unreadable.

    A declaration file is the JSON form of `GraphRecord`, or a list of them. A dump is the
    frontend's graph JSON. A log is text with such dumps among other lines; one that is cut off
    is passed over.
    """
    name = str(path)
    text = _text(name)
    try:
        whole = json.loads(text)
    except RecursionError:
        raise SourceError(name, "", "nested too deeply for a graph") from None
    except json.JSONDecodeError as error:
        documents = list(_logged(text))
        if not documents:
            where = f"line {error.lineno}"
            why = f"neither JSON ({error.msg}) nor a log with graphs in it"
            raise SourceError(name, where, why) from None
    else:
        listed = whole if isinstance(whole, list) else [whole]
        many = len(listed) > 1
        documents = [(f"[{i}]" if many else "", document) for i, document in enumerate(listed)]
    if not documents:
        raise SourceError(name, "", "holds no graph")
    return [_record(name, where, document) for where, document in documents]


def _text(name: str) -> str:
    """A file's text; a log may have bytes in it that are none."""
    try:
        content = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceError(name, "", str(why)) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
    if not _DUMP.search(text):
        raise SourceError(name, "", "not a text file")
    return text


def _logged(text: str) -> Iterator[tuple[str, Any]]:
    """(line, graph) of each dump in a text."""
    decoder, start = json.JSONDecoder(), 0
    while (found := _DUMP.search(text, start)) is not None:
        start = found.end()
        try:
            document, start = decoder.raw_decode(text, found.start())
        except (json.JSONDecodeError, RecursionError):
            continue
        # a graph's inspection starts alike, and leaves out what a declaration needs
        if "json_version" in document:
            yield f"line {text.count(chr(10), 0, found.start()) + 1}", document


def _record(name: str, where: str, document: Any) -> GraphRecord:
    prefix = f"{where} " if where else ""
    if not isinstance(document, dict):
        got = type(document).__name__
        raise SourceError(name, where, f"a graph is a JSON object, this is a {got}")
    try:
        if "json_version" in document:
            return record_of_dump(document)
        if "context" in document:
            why = "missing: the inspection of a graph leaves out ragged offsets; dump it lowered"
            raise SourceError(name, f"{prefix}json_version", why)
        if "nodes" not in document:
            raise SourceError(name, f"{prefix}nodes", "missing")
        return GraphRecord.model_validate({"origin": "file", **document})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SourceError(name, f"{prefix}{field}", first["msg"]) from None
    except SourceError:
        raise
    except ValueError as error:
        raise SourceError(name, where, str(error)) from None

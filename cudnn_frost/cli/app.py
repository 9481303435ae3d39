"""`cudnn-frost`: what the rows say about a graph, what they take, what is proved.

Exit codes of `analyze`: 0 when a row other than the reference accepts some graph of the input, 3
when none does, 2 for input that cannot be used.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..analyzer.extract import analyze as facts_of
from ..analyzer.files import SourceError, read_source
from ..analyzer.live import record_of
from ..analyzer.record import GraphRecord
from ..engines import ROWS, Row
from ..engines.registry import UNQUALIFIED_VARIABLE
from ..heuristics.propose import judge_and_propose
from ..heuristics.report import Report
from ..runtime import cache
from ..runtime.device import target_here
from ..vocab import KNOWN_TARGETS, Target
from . import kernels
from . import matrix as matrix_
from .qualification import claims, problems, read_records
from .tracker import default_directory

UNUSABLE, NOBODY = 2, 3

app = typer.Typer(
    help="Attention graphs, engine rows and their reasons.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(kernels.cache_app, name="cache")
Tracker = Annotated[Path | None, typer.Option(help="The tracker's folder; default the checkout's.")]


def _target(text: str) -> Target:
    """`here`, a known name, or a JSON file of a Target; SourceError names file and field."""
    if text == "here":
        return target_here()
    if text in KNOWN_TARGETS:
        return KNOWN_TARGETS[text]
    known = ", ".join(["here", *KNOWN_TARGETS])
    if not Path(text).exists():
        raise SourceError(text, "--target", f"neither a file nor one of {known}")
    try:
        return Target.from_dict(json.loads(Path(text).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(text, "--target", str(error)) from None


def _graphs(source: str) -> list[GraphRecord]:
    """The declarations of a file, or of the graph that `module:callable` returns."""
    if Path(source).exists() or ":" not in source:
        return read_source(source)
    module, _, name = source.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = importlib.import_module(module)
        for part in name.split("."):
            build = getattr(build, part)
        graph = build() if callable(build) else build
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise SourceError(source, "", why) from None
    finally:
        sys.path.pop(0)
    backend = getattr(graph, "backend", graph)
    if not hasattr(backend, "nodes"):
        got = type(graph).__name__
        raise SourceError(source, "", f"gave a {got}, not a cudnn.pygraph or cudnn_frost.Graph")
    return [record_of(backend, replay_expected=bool(backend.is_cuda_graph_replay_expected))]


def _report(
    record: GraphRecord, target: Target, environment: Mapping[str, str] | None = None
) -> Report:
    """environment: on top of the process's."""
    analysis = facts_of(record)
    environment = {**os.environ, **(environment or {})}
    answers, proposals = judge_and_propose(analysis, target, environment)
    ranked = tuple((plan.name, True) for plan in proposals)
    return Report(analysis, target, answers, tuple(proposals), ranked)


@app.command()
def analyze(
    graph: Annotated[str, typer.Argument(help="A declaration file, a dump, a log, or mod:call.")],
    target: Annotated[str, typer.Option(help="sm90, sm100, cpu, here, or a file.")] = "here",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Print the facts of every graph, every row's verdict with every reason, and the ranking."""
    machine = _target(target)
    reports = [_report(record, machine) for record in _graphs(graph)]
    if as_json:
        typer.echo(json.dumps({"graphs": [report.as_dict() for report in reports]}, indent=1))
    else:
        for index, report in enumerate(reports):
            title = f"graph {index + 1} of {len(reports)}\n" if len(reports) > 1 else ""
            typer.echo(("\n\n" if index else "") + title + report.text())
    if not any(report.served_by for report in reports):
        raise typer.Exit(NOBODY)


@app.command()
def rows(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """What every row takes."""
    if as_json:
        typer.echo(json.dumps({"rows": [_described(row) for row in ROWS]}, indent=1))
        return
    table = Table("row", "takes", show_lines=True)
    for row in ROWS:
        taken = claims(row.capabilities) if row.kernel else {}
        takes = [f"{name}: {matrix_.shown(value)}" for name, value in taken.items()]
        state = "qualified" if row.qualified else "not qualified"
        head = [row.name, f"id {row.engine_id}, {state if row.kernel else 'no kernel'}"]
        table.add_row(
            "\n".join([*head, row.summary]), "\n".join(takes) or "nothing in this version"
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _described(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "engine_id": row.engine_id,
        "kernel": row.kernel,
        "qualified": row.qualified,
        "summary": row.summary,
        "capabilities": claims(row.capabilities) if row.kernel else {},
    }


@app.command()
def matrix(
    write: Annotated[bool, typer.Option("--write", help="Write the file.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 when the file is stale.")] = False,
    tracker: Tracker = None,
) -> None:
    """The support matrix: what is served, what is proved where, what was measured, what is not."""
    directory = tracker or default_directory()
    text, path = matrix_.render(directory), directory / matrix_.FILE
    if write:
        path.write_text(text, encoding="utf-8")
    elif check:
        stale = matrix_.difference(path, text)
        if stale:
            typer.echo(f"{path} is stale; run cudnn-frost matrix --write\n{stale}", err=True)
            raise typer.Exit(1)
    else:
        typer.echo(text, nl=False)


@app.command()
def qualification(tracker: Tracker = None) -> None:
    """Check that a record proves every row that claims to be qualified; exit 1 if not."""
    found = problems(read_records(tracker or default_directory()))
    for problem in found:
        typer.echo(problem, err=True)
    if found:
        raise typer.Exit(1)


@app.command("compile")
def compile_(
    graph: Annotated[
        str | None, typer.Argument(help="As of analyze: only what the plans of its graphs launch.")
    ] = None,
    target: Annotated[str, typer.Option(help="sm90, sm100, here, or a file.")] = "here",
    row: Annotated[
        list[str] | None, typer.Option(help="Rows whose name holds this; default those offered.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Fill the compile cache, on a machine with or without a GPU, so that no other compiles.

    Exit codes: 0 all kept, 1 something failed, 3 nothing to compile.
    """
    machine = _target(target)
    rows = kernels.rows_for(machine, row or ())
    if graph is None:
        wanted = kernels.jobs_of_rows(rows)
    else:
        # a row asked for by name may be unqualified
        asked = {UNQUALIFIED_VARIABLE: "1"} if row else {}
        reports = [_report(record, machine, asked) for record in _graphs(graph)]
        wanted = kernels.jobs_of_graphs(reports, rows)
    if not wanted:
        elsewhere = "" if machine.cc != (0, 0) else "; --target names another machine"
        reasons = "; analyze says why, --row takes rows that are not qualified" if graph else ""
        typer.echo(f"no kernel to compile for {machine.name}{elsewhere}{reasons}", err=True)
        raise typer.Exit(NOBODY)
    missing = [job for job in wanted if not kernels.is_kept(job.key)]
    failed = kernels.compile_all(missing, min(jobs, len(missing))) if missing else []
    kept, made = len(wanted) - len(missing), len(missing) - len(failed)
    failed += kernels.make_launcher()
    for failure in failed:
        typer.echo(failure, err=True)
    typer.echo(f"{cache.directory()}: {made} compiled, {kept} kept before, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)


def main() -> None:
    """The console entry: bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except (SourceError, OSError) as error:
        typer.echo(f"cudnn-frost: {error}", err=True)
        raise SystemExit(UNUSABLE) from None

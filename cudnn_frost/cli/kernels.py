"""`cudnn-frost compile` and `cudnn-frost cache`: kernels made ahead, and what is kept of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..analyzer.files import SourceError
from ..engines import ROWS, Row
from ..engines.registry import offer_declines
from ..heuristics.propose import config_of
from ..heuristics.report import Report
from ..runtime import cache
from ..runtime.launcher import launcher, launcher_key
from ..runtime.store import CompileKey, DamagedEntry, Entry, entries, remove_scratch
from ..vocab import Target

cache_app = typer.Typer(help="The compiled kernels that are kept.", no_args_is_help=True)
Folder = Annotated[Path | None, typer.Option("--directory", help="Default: the cache's own.")]


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile. config: of the family, whose signature it gives."""

    kernel: str
    config: Any

    @property
    def key(self) -> CompileKey:
        return cache.compile_key(self.kernel, self.config, self.config.signature())


def rows_for(target: Target, names: Iterable[str]) -> list[Row]:
    """The rows with a kernel for a target whose name holds one of `names`; without names, those
    that would be offered.

    SourceError names a name that no row of the target answers to.
    """
    built = [
        row
        for row in ROWS
        if row.kernel and not row.is_reference and target.cc in (row.capabilities.cc or ())
    ]
    names = tuple(names)
    for name in names:
        if not name:
            raise SourceError("--row", "", "is empty")
        if not any(name in row.name for row in built):
            known = ", ".join(row.name for row in built) or "none"
            raise SourceError(
                name, "--row", f"no row of {target.arch} with a kernel; known: {known}"
            )
    if names:
        return [row for row in built if any(name in row.name for name in names)]
    return [row for row in built if not offer_declines(row, os.environ)]


def jobs_of_rows(rows: Iterable[Row]) -> list[Job]:
    """Every shipped configuration of these rows, each once."""
    jobs = (
        Job(row.kernel, config)
        for row in rows
        for config in cache.shipped_configs(row.kernel)
        if config.dtype in row.capabilities.input_dtype
    )
    return list(dict.fromkeys(jobs))


def jobs_of_graphs(reports: Iterable[Report], rows: Iterable[Row]) -> list[Job]:
    """What these rows' plans of graphs launch, each once."""
    rows = tuple(rows)
    jobs = (
        Job(plan.row.kernel, config_of(plan.row, report.analysis.facts, plan.knobs))
        for report in reports
        for plan in report.proposals
        if report.analysis.facts and plan.row in rows
    )
    return list(dict.fromkeys(jobs))


def _compile(job: Job) -> str:
    """In a process of its own: why the kernel could not be kept, or nothing."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: warnings.append(entry.getMessage())  # type: ignore
    logger = logging.getLogger("cudnn_frost")
    logger.addHandler(handler)
    try:
        cache.entry_of(job.kernel, job.config, job.config.signature())
    finally:
        logger.removeHandler(handler)
    return "" if is_kept(job.key) else "; ".join(warnings)


def compile_all(jobs: list[Job], processes: int) -> list[str]:
    """Compile what the cache does not hold, with a progress bar; the jobs that failed, and why."""
    failed = []
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_compile, job): job for job in jobs}
        for done in _progress(as_completed(running), len(jobs)):
            error = done.exception()
            why = f"{type(error).__name__}: {error}" if error else done.result()
            if why:
                failed.append(f"{running[done].config.key()}: {why}")
    return failed


def _progress(done: Iterator[Any], total: int) -> Iterator[Any]:
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(done, total=total)


def make_launcher() -> list[str]:
    """Keep the launcher too; why it could not be made, if so."""
    try:
        launcher()
    except NotImplementedError as error:
        return [str(error)]
    return []


def is_kept(key: CompileKey) -> bool:
    """Whether the cache holds an entry whole."""
    try:
        Entry.of(cache.directory(), key).checked_key()
    except DamagedEntry:
        return False
    return True


@cache_app.command("list")
def list_(directory: Folder = None) -> None:
    """Every kept kernel: its size, its age, and whether this version would use it."""
    folder = directory or cache.directory()
    typer.echo(str(folder))
    for entry in entries(folder):
        state, key = _state(entry)
        typer.echo(f"{_kept(entry):27}  {state}{'  ' + key.config if key else ''}")


@cache_app.command()
def verify(directory: Folder = None) -> None:
    """Check every kept kernel against its digest and its key; exit 1 when one is damaged."""
    found = entries(directory or cache.directory())
    damaged = [state for entry in found for state, key in [_state(entry)] if key is None]
    for state in damaged:
        typer.echo(state, err=True)
    typer.echo(f"{len(found) - len(damaged)} of {len(found)} kernels are whole")
    if damaged:
        raise typer.Exit(1)


@cache_app.command()
def clear(
    stale: Annotated[
        bool, typer.Option("--stale", help="Only those this version would not use.")
    ] = False,
    directory: Folder = None,
) -> None:
    """Remove the kept kernels."""
    folder = directory or cache.directory()
    found = entries(folder)
    removed = [entry for entry in found if not stale or _state(entry)[0] != CURRENT]
    for entry in removed:
        entry.remove()
    if not stale:
        remove_scratch(folder)
    typer.echo(f"removed {len(removed)} of {len(found)} kernels")


CURRENT = "current"


def _state(entry: Entry) -> tuple[str, CompileKey | None]:
    """What to say of an entry, and its key when it is whole."""
    try:
        key = entry.checked_key()
    except DamagedEntry as error:
        return str(error), None
    is_current = key == launcher_key() or key.fingerprint == cache.fingerprint()
    return (CURRENT if is_current else "of other sources"), key


def _kept(entry: Entry) -> str:
    """Since when, and how large."""
    try:
        about = entry.library.stat()
    except OSError:
        return "?"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(about.st_mtime))
    return f"{since}  {about.st_size / 1024:4.0f} KiB"

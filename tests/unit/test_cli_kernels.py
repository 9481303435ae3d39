"""`cudnn-frost compile` and `cudnn-frost cache`, with the real compiler for one kernel."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cudnn_frost.analyzer.files import SourceError
from cudnn_frost.cli import kernels
from cudnn_frost.engines import ROWS
from cudnn_frost.runtime import cache
from cudnn_frost.vocab import KNOWN_TARGETS, DType

from .test_cli_commands import DATA, SERVED, run

SM90 = KNOWN_TARGETS["sm90"]
PATH = os.environ["PATH"]


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(SERVED))
    return str(path)


@pytest.fixture
def kept(tmp_path):
    return str(tmp_path / "kept")


def run_cache(*arguments: str, kept: str):
    return run(*arguments, CUDNN_FROST_CACHE_DIR=kept, PATH=PATH)


def test_a_graph_is_compiled_once_then_kept_listed_verified_and_cleared(graph, kept):
    compile_ = ("compile", graph, "--target", "sm90")
    code, out, err = run_cache(*compile_, kept=kept)
    assert code == 0 and "1 compiled, 0 kept before, 0 failed" in out, err
    assert "1/1" in err
    code, out, _ = run_cache(*compile_, kept=kept)
    assert code == 0 and "0 compiled, 1 kept before" in out
    code, out, _ = run_cache("cache", "list", kept=kept)
    assert code == 0 and "current  prefill_sm90(dtype=BFLOAT16" in out and " KiB" in out
    assert "current  launch" in out and out.count("current") == 2
    assert run_cache("cache", "verify", kept=kept)[:2] == (0, "2 of 2 kernels are whole\n")

    library = max(Path(kept).glob("*.so"), key=lambda path: path.stat().st_size)
    library.write_bytes(library.read_bytes()[:100])
    code, out, err = run_cache("cache", "verify", kept=kept)
    assert code == 1 and out == "1 of 2 kernels are whole\n" and str(library) in err
    assert "not the library that was stored" in run_cache("cache", "list", kept=kept)[1]
    code, out, _ = run_cache("cache", "clear", "--stale", kept=kept)
    assert code == 0 and out == "removed 1 of 2 kernels\n"
    code, out, _ = run_cache("cache", "clear", kept=kept)
    assert code == 0 and out == "removed 1 of 1 kernels\n"
    assert {path.suffix for path in Path(kept).iterdir()} == {".lock"}


def test_without_a_cpp_compiler_kernels_are_kept_and_the_rest_is_said(graph, kept):
    environment = {"CUDNN_FROST_CACHE_DIR": kept, "PATH": PATH, "CXX": "nobody"}
    code, out, err = run("compile", graph, "--target", "sm90", **environment)
    assert code == 1 and "1 compiled" in out and "needs a C++ compiler once" in err


def test_a_kernel_that_cannot_be_kept_is_a_failure(graph):
    code, out, err = run_cache("compile", graph, "--target", "sm90", kept=os.devnull + "/nowhere")
    assert code == 1 and "1 failed" in out
    assert "prefill_sm90(" in err and "cannot be written" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--target", "cpu"), 3, "no kernel to compile for cpu"),
        (("--target", "sm100"), 3, "no kernel to compile for sm100"),
        (("--target", "sm90", "--row", "nobody"), 2, "nobody: --row: no row of sm90"),
        (("--target", "sm90", "--row", ""), 2, "--row: is empty"),
        (("--target", "cpu"), 3, "--target names another machine"),
        ((str(DATA / "thd_prefill.json"), "--target", "sm90"), 3, "analyze says why"),
        (("--target", "sm91"), 2, "sm91"),
        (("absent.json", "--target", "sm90"), 2, "absent.json"),
        (("--jobs", "0"), 2, "jobs"),
        ((str(DATA / "thd_prefill.json"), "--target", "sm90"), 3, "no kernel to compile"),
    ],
)
def test_nothing_to_compile_is_said(kept, arguments, code, said):
    got, _, err = run_cache("compile", *arguments, kept=kept)
    assert got == code and said in err
    assert not Path(kept).exists()


def test_rows_are_those_offered_unless_named(monkeypatch):
    monkeypatch.delenv("CUDNN_FROST_UNQUALIFIED", raising=False)
    built = [row for row in ROWS if row.kernel and not row.is_reference]
    assert kernels.rows_for(SM90, ()) == [row for row in built if row.qualified]
    monkeypatch.setenv("CUDNN_FROST_UNQUALIFIED", "1")
    assert kernels.rows_for(SM90, ()) == built
    monkeypatch.delenv("CUDNN_FROST_UNQUALIFIED")
    assert [row.name for row in kernels.rows_for(SM90, ("decode_sm90_fp8",))] == [
        "frost_sdpa_fwd_decode_sm90_fp8"
    ]
    with pytest.raises(SourceError, match="frost_sdpa_fwd_prefill_sm90"):
        kernels.rows_for(SM90, ("decode", "reference"))


def test_jobs_are_every_shipped_configuration_once():
    (fp8,) = (row for row in ROWS if row.name == "frost_sdpa_fwd_decode_sm90_fp8")
    (half,) = (row for row in ROWS if row.name == "frost_sdpa_fwd_decode_sm90")
    jobs = kernels.jobs_of_rows([fp8, fp8])
    assert {job.config.dtype for job in jobs} == {DType.FP8_E4M3, DType.FP8_E5M2}
    assert len(set(jobs)) == len(jobs)
    both = kernels.jobs_of_rows([fp8, half])
    assert {job.key for job in both} == {
        kernels.Job("decode_sm90", config).key for config in cache.shipped_configs("decode_sm90")
    }


def test_a_row_named_is_compiled_though_unqualified(kept, monkeypatch):
    """The plans of a paged graph, which no qualified row serves."""
    path = str(DATA / "paged_decode.json")
    code, _, err = run_cache("compile", path, "--target", "sm90", kept=kept)
    (row,) = (row for row in ROWS if row.name == "frost_sdpa_fwd_decode_sm90")
    assert (code == 3 and "no kernel to compile" in err) or row.qualified
    code, out, err = run_cache("compile", path, "--target", "sm90", "--row", "decode", kept=kept)
    assert code == 0 and "2 compiled" in out, err


FOREIGN = ("package.json", "libfoo.so", "poetry.lock", f"{'a' * 63}.so", f"{'A' * 64}.json")


def test_files_that_are_no_entries_are_left_alone(kept):
    folder = Path(kept)
    folder.mkdir()
    (folder / "folder.json").mkdir()
    for name in FOREIGN:
        (folder / name).write_text("mine")
    lone = folder / f"{'b' * 64}.lock"
    lone.write_text("")
    assert run_cache("cache", "verify", kept=kept)[:2] == (0, "0 of 0 kernels are whole\n")
    for arguments in (("clear", "--stale"), ("clear",)):
        assert run_cache("cache", *arguments, kept=kept)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*FOREIGN, "folder.json", lone.name]
    )


@pytest.mark.parametrize("verb", ["list", "verify", "clear"])
def test_a_directory_that_is_a_file_is_said(kept, verb):
    Path(kept).write_text("")
    code, _, err = run_cache("cache", verb, kept=kept)
    assert code == 2 and kept in err


@pytest.mark.parametrize("verb", ["list", "verify", "clear"])
def test_a_directory_that_is_not_there_holds_nothing(kept, verb):
    assert run_cache("cache", verb, kept=kept)[0] == 0


def test_compilers_may_carry_options(graph, kept):
    environment = {"CUDNN_FROST_CACHE_DIR": kept, "PATH": PATH, "CXX": "c++ -g0", "CC": "cc -s"}
    code, out, err = run("compile", graph, "--target", "sm90", **environment)
    assert code == 0 and "0 failed" in out, err

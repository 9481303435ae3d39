"""The compile cache: what is a key, what is trusted, what happens when the disk is not."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cudnn_frost.kernels.configs.prefill_sm90 import shipped_configs
from cudnn_frost.runtime import artifacts, cache
from cudnn_frost.runtime.store import Entry


@dataclass(frozen=True)
class Compiled:
    """Stands for what a kernel module's compile returns."""

    text: str

    def __call__(self, *arguments: object) -> str:
        return self.text


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A cache of its own and a compiler that records its calls."""
    calls: list[str] = []

    def compile_(kernel: str, config: object, signature: object) -> Compiled:
        calls.append(kernel)
        return Compiled(f"{kernel} compiled {len(calls)}")

    monkeypatch.setattr(cache, "_compile", compile_)
    monkeypatch.setattr(cache, "_memo", {})
    monkeypatch.setattr(cache, "_key_locks", {})
    monkeypatch.setattr(artifacts, "export", lambda c, path: Path(path).write_text(c.text))
    monkeypatch.setattr(artifacts, "load", lambda path: Compiled(Path(path).read_text()))
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    return calls


CONFIG = shipped_configs()[0]


def load(config=CONFIG):
    return cache.entry_of("prefill_sm90", config, config.signature())


def test_one_process_compiles_once(compiler):
    assert load() is load()
    assert len(compiler) == 1


def test_a_second_process_loads_what_the_first_stored(compiler, monkeypatch):
    first = load()
    monkeypatch.setattr(cache, "_memo", {})
    assert load() == first
    assert len(compiler) == 1


def test_another_configuration_is_another_entry(compiler):
    load()
    load(replace(CONFIG, stats=not CONFIG.stats))
    assert len(compiler) == 2


def test_other_sources_are_another_entry(compiler, monkeypatch):
    load()
    monkeypatch.setattr(cache, "_memo", {})
    monkeypatch.setattr(cache, "fingerprint", lambda: "other sources")
    load()
    assert len(compiler) == 2


def described(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def of_another_key(folder: Path) -> None:
    path = described(folder)
    path.write_text(path.read_text().replace("stats=False", "stats=True"))


def without_description(folder: Path) -> None:
    described(folder).unlink()


def without_library(folder: Path) -> None:
    described(folder).with_suffix(".so").unlink()


def with_half_a_description(folder: Path) -> None:
    path = described(folder)
    path.write_text(path.read_text()[:40])


def with_a_list_for_a_description(folder: Path) -> None:
    described(folder).write_text("[]")


def with_half_a_library(folder: Path) -> None:
    path = described(folder).with_suffix(".so")
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES = [
    of_another_key,
    without_description,
    without_library,
    with_half_a_description,
    with_a_list_for_a_description,
    with_half_a_library,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_compiled_again_and_repaired(compiler, monkeypatch, tmp_path, damage):
    load()
    damage(tmp_path)
    for times in (2, 2):
        monkeypatch.setattr(cache, "_memo", {})
        load()
        assert len(compiler) == times


def test_a_library_that_does_not_load_is_compiled_again(compiler, monkeypatch, caplog):
    load()
    monkeypatch.setattr(cache, "_memo", {})

    def refuse(path):
        raise RuntimeError("not a library")

    monkeypatch.setattr(artifacts, "load", refuse)
    assert load()() == "prefill_sm90 compiled 2"
    assert caplog.text.count("damaged") == 1 and "not a library" in caplog.text


def unwritable(monkeypatch):
    """Root writes anywhere, so a read-only file system is acted."""

    def refuse(self):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Entry, "locked", refuse)


def test_an_unusable_directory_is_a_warning_and_a_compilation(compiler, monkeypatch, caplog):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, os.devnull + "/nowhere")
    assert load()() == "prefill_sm90 compiled 1"
    assert "cannot be written" in caplog.text


def test_a_read_only_directory_that_was_filled_is_read(compiler, monkeypatch, caplog):
    first = load()
    monkeypatch.setattr(cache, "_memo", {})
    unwritable(monkeypatch)
    assert load() == first and len(compiler) == 1 and not caplog.text


def test_a_read_only_directory_without_the_entry_is_a_warning(compiler, monkeypatch, caplog):
    unwritable(monkeypatch)
    assert load()() == "prefill_sm90 compiled 1"
    assert "Read-only" in caplog.text


def test_a_full_disk_is_a_warning_and_the_kernel_still_runs(
    compiler, monkeypatch, caplog, tmp_path
):
    def full(compiled, path):
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts, "export", full)
    assert load()() == "prefill_sm90 compiled 1"
    assert "not kept" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_failed_compilation_is_not_kept_and_names_the_kernel(compiler, monkeypatch, tmp_path):
    def refuse(kernel, config, signature):
        raise NotImplementedError(f"{kernel} did not compile: no")

    monkeypatch.setattr(cache, "_compile", refuse)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="prefill_sm90 did not compile"):
            load()
    assert not list(tmp_path.glob("*.json"))


def _load_in_a_process(folder: str) -> str:
    os.environ[cache.DIRECTORY_VARIABLE] = folder

    def compile_(kernel: str, config: object, signature: object) -> Compiled:
        time.sleep(0.5)
        with open(os.path.join(folder, "calls"), "a") as calls:
            calls.write("x")
        return Compiled("compiled")

    cache._compile = compile_
    artifacts.export = lambda c, path: Path(path).write_text(c.text)
    artifacts.load = lambda path: Compiled(Path(path).read_text())
    return load()()


def test_processes_share_one_compilation(tmp_path):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        assert set(pool.map(_load_in_a_process, [str(tmp_path)] * 3)) == {"compiled"}
    assert (tmp_path / "calls").read_text() == "x"


def test_threads_share_one_compilation(compiler):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler) == 1 and len(set(map(id, found))) == 1


def test_no_key_holds_an_extent():
    """Lengths, totals and pointers are run-time arguments."""
    key = str(cache.compile_key("prefill_sm90", CONFIG, CONFIG.signature()))
    assert not any(word in key for word in ("seqlen", "batch", "num_heads", "pointer", "stride"))

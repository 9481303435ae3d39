"""The compile cache: what is a key, what is trusted, what happens when the disk is not."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cudnn_frost.kernels.configs.prefill_sm90 import shipped_configs
from cudnn_frost.runtime import artifacts, cache


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
    return cache.entry_of("sm90.prefill", config, config.signature())


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


def test_an_entry_whose_key_differs_is_compiled_again(compiler, monkeypatch, tmp_path):
    load()
    for described in tmp_path.glob("*.key"):
        described.write_text("the key of something else")
    monkeypatch.setattr(cache, "_memo", {})
    load()
    assert len(compiler) == 2


def test_a_library_without_its_key_is_not_trusted(compiler, monkeypatch, tmp_path):
    load()
    for described in tmp_path.glob("*.key"):
        described.unlink()
    monkeypatch.setattr(cache, "_memo", {})
    load()
    assert len(compiler) == 2


def test_an_unusable_directory_is_a_warning_and_a_compilation(compiler, monkeypatch, caplog):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, os.devnull + "/nowhere")
    assert load()() == "sm90.prefill compiled 1"
    assert "unusable" in caplog.text


def test_a_damaged_entry_is_compiled_again(compiler, monkeypatch, caplog):
    load()
    monkeypatch.setattr(cache, "_memo", {})

    def refuse(path):
        raise RuntimeError("not a library")

    monkeypatch.setattr(artifacts, "load", refuse)
    assert load()() == "sm90.prefill compiled 2"
    assert "damaged" in caplog.text


def test_a_full_disk_is_a_warning_and_the_kernel_still_runs(compiler, monkeypatch, caplog):
    def full(compiled, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts, "export", full)
    assert load()() == "sm90.prefill compiled 1"
    assert "not kept" in caplog.text


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
    key = cache.full_key("sm90.prefill", CONFIG, CONFIG.signature())
    assert not any(word in key for word in ("seqlen", "batch", "num_heads", "pointer", "stride"))

"""What importing this package, and each of its judging folders, loads: nothing heavy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DSL = {"cutlass", "cuda", "tvm_ffi"}
HEAVY = DSL | {"torch", "cudnn", "numpy"}

# folder -> what importing any of its modules may not load
FOLDERS = {
    "vocab": HEAVY | {"pydantic"},
    "analyzer": HEAVY,
    "kernels/configs": HEAVY | {"pydantic"},
    "engines": HEAVY,
    "heuristics": HEAVY,
    "runtime": DSL | {"torch"},
}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)


def loaded_by(statements: str) -> set[str]:
    """Top-level modules that the statements load in a fresh process."""
    program = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        f"{statements}\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    return set(json.loads(_python("-c", program).stdout))


def _modules(folder: str) -> list[str]:
    paths = sorted((REPOSITORY / "cudnn_frost" / folder).glob("*.py"))
    inner = [p.relative_to(REPOSITORY).with_suffix("") for p in paths]
    return [".".join(p.parts).removesuffix(".__init__") for p in inner]


def test_importing_the_package_loads_nothing_but_itself():
    report = _python("-X", "importtime", "-c", "import cudnn_frost").stderr
    names = {line.split("|")[-1].strip() for line in report.splitlines() if "|" in line}
    assert "cudnn_frost" in names
    assert not {name for name in names if name.split(".")[0] in HEAVY}
    own = {name for name in names if re.match(r"cudnn_frost\b", name)}
    assert own == {"cudnn_frost"}
    others = loaded_by("import cudnn_frost") - sys.stdlib_module_names
    assert others == {"cudnn_frost"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_of_a_folder_imports_light(folder):
    modules = _modules(folder)
    assert len(modules) > 1
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    assert "cudnn_frost" in loaded
    assert not loaded & FOLDERS[folder]


def test_graph_brings_no_framework_of_its_own():
    """`Graph` needs the cuDNN frontend, and loads no framework that the frontend does not."""
    alone = loaded_by("import cudnn")
    both = loaded_by("import cudnn\nfrom cudnn_frost import Graph")
    assert "cudnn" in alone
    assert not (both - alone) & (DSL | {"torch"})


def test_judging_a_graph_loads_nothing_heavy():
    statements = (
        "import os\n"
        "from cudnn_frost.analyzer.facts import Analysis\n"
        "from cudnn_frost.heuristics.propose import judge_and_propose\n"
        "from cudnn_frost.vocab import KNOWN_TARGETS\n"
        "judge_and_propose(Analysis(ops=('sdpa',)), KNOWN_TARGETS['sm90'], os.environ)"
    )
    assert not loaded_by(statements) & HEAVY


@pytest.mark.parametrize("module", ("cudnn", "decimal"))
def test_a_load_is_noticed(module):
    """The probe itself: it reports what a statement loads, one level down too."""
    assert module in loaded_by(f"def f():\n    import {module}\nf()")

"""Who imports whom: every import of every file, function bodies and TYPE_CHECKING included."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = "cudnn_frost"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

_DSL = frozenset({"cutlass", "cuda", "tvm_ffi", "nvidia_cutlass_dsl"})
_TORCH = frozenset({"torch"})
_CUDNN = frozenset({"cudnn"})


@dataclass(frozen=True)
class Layer:
    """number: its place; a file imports from lower numbers and its own folder.

    banned: top-level modules it may not touch. only: the other folders it may use, None = all
    lower ones. outside: third-party modules it may use, None = all that are not banned.
    """

    number: int
    banned: frozenset[str] = field(default=frozenset())
    only: frozenset[str] | None = None
    outside: frozenset[str] | None = None


_VOCAB = frozenset({"vocab"})
LAYERS = {
    "vocab": Layer(0, _TORCH | _DSL | _CUDNN, frozenset(), frozenset()),
    "analyzer": Layer(1, _TORCH | _DSL),
    "kernels.configs": Layer(1, _TORCH | _DSL | _CUDNN, _VOCAB, frozenset()),
    "engines": Layer(2, _DSL),
    "heuristics": Layer(3, _TORCH | _DSL),
    "kernels": Layer(
        4, _TORCH | _CUDNN, _VOCAB | {"kernels.configs"}, frozenset({"cutlass", "cuda"})
    ),
    "runtime": Layer(5),
    "graph": Layer(6),
    # the package itself offers what graph.py defines
    "": Layer(6, _TORCH | _DSL | _CUDNN, frozenset({"graph"}), frozenset()),
    "cli": Layer(7),
    "context_parallel": Layer(7),
}


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted module name -> file, of everything below a package folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder_of(module: str) -> str | None:
    """The row of the layer table that a module of the package falls under, None for none."""
    inner = module.removeprefix(PACKAGE).lstrip(".")
    if not inner:
        return ""
    named = [n for n in LAYERS if n and (inner == n or inner.startswith(f"{n}."))]
    return max(named, key=len, default=None)


def _leading_text(node: ast.expr) -> str:
    """A string literal, or what an f-string certainly starts with."""
    if isinstance(node, ast.JoinedStr):
        return _leading_text(node.values[0]) if node.values else ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def imports_of(module: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import a file can make, by statement or by name."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - is_package
                parents = module.split(".")[: len(module.split(".")) - up]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = _leading_text(node.args[0])
            if called in ("import_module", "__import__", "find_spec", "load_module") and name:
                yield node.lineno, name.rstrip(".")


def _reason(importer: str, imported: str) -> str:
    """Why a folder may not import a module; empty when it may."""
    layer, top = LAYERS[importer], imported.split(".")[0]
    if top != PACKAGE:
        if top in layer.banned:
            return f"may not touch {top}"
        allowed = layer.outside
        if allowed is not None and top not in allowed | sys.stdlib_module_names:
            return f"takes nothing from outside but {', '.join(sorted(allowed)) or 'stdlib'}"
        return ""
    target = folder_of(imported)
    if target is None:
        return f"{imported} is in no folder of the layer table"
    if target == importer:
        return ""
    if layer.only is not None and target not in layer.only:
        return f"uses {', '.join(sorted(layer.only)) or 'nothing'} of this package"
    if LAYERS[target].number < layer.number or importer == "":
        return ""
    return f"layer {layer.number} imports layer {LAYERS[target].number}"


def violations(root: Path) -> list[str]:
    """`file:line: folder imports module: why`, for every import that the table forbids."""
    known = modules_of(root)
    found = []
    for module, path in known.items():
        where, importer = path.relative_to(root.parent), folder_of(module)
        if importer is None:
            found.append(f"{where}:1: {module} is in no folder of the layer table")
            continue
        for line, imported in imports_of(module, path, known):
            reason = _reason(importer, imported)
            if reason:
                found.append(f"{where}:{line}: {importer} imports {imported}: {reason}")
    return found


def test_every_import_is_allowed():
    found = violations(ROOT)
    assert not found, "\n".join(["", *found])


def test_the_checker_reads_this_package():
    known = modules_of(ROOT)
    edges = {
        (folder_of(module), folder_of(imported))
        for module, path in known.items()
        for _, imported in imports_of(module, path, known)
        if imported.startswith(PACKAGE)
    }
    assert {("analyzer", "vocab"), ("kernels", "kernels.configs"), ("graph", "runtime")} <= edges


FORBIDDEN = [
    ("vocab/x.py", "from ..analyzer import facts"),
    ("vocab/x.py", "import pydantic"),
    ("analyzer/x.py", "def f():\n    import torch"),
    ("analyzer/x.py", "from ..kernels.configs import c"),
    ("analyzer/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cutlass"),
    ("kernels/configs/x.py", "import cudnn_frost.analyzer.facts"),
    ("kernels/configs/x.py", "from cuda.bindings import driver"),
    ("engines/x.py", "class A:\n    def f(self):\n        import cutlass.cute as cute"),
    ("engines/x.py", "from cudnn_frost import heuristics"),
    ("heuristics/x.py", "import importlib\nimportlib.import_module('torch')"),
    ("heuristics/x.py", "import importlib\nimportlib.import_module(f'cudnn_frost.runtime.{1}')"),
    ("heuristics/x.py", "__import__('cuda')"),
    ("kernels/sm90/x.py", "from ...engines import rules"),
    ("kernels/sm90/x.py", "from cudnn_frost.analyzer.facts import SdpaFacts"),
    ("kernels/common/x.py", "import torch.utils.dlpack"),
    ("kernels/common/x.py", "import numpy"),
    ("runtime/x.py", "from .. import graph"),
    ("runtime/x.py", "import cudnn_frost"),
    ("graph.py", "from .cli import main"),
    ("__init__.py", "from .engines import rules"),
    ("somewhere/x.py", "import json"),
    ("cli/x.py", "from ..context_parallel import x"),
]

ALLOWED = [
    ("vocab/x.py", "from . import y\nimport json"),
    ("analyzer/x.py", "import pydantic\nfrom ..vocab import DType"),
    ("kernels/configs/x.py", "from ...vocab import DType\nfrom .c import C"),
    ("engines/x.py", "def f():\n    import torch\nfrom . import rules\nfrom .rules import judge"),
    ("heuristics/x.py", "from ..kernels.configs import c\nfrom ..engines import Row"),
    ("kernels/sm90/x.py", "import cutlass\nfrom cuda.bindings import driver"),
    ("kernels/sm90/x.py", "from ..common import softmax\nfrom ..configs.c import C"),
    ("runtime/x.py", "import torch, cutlass, cudnn\nfrom ..kernels.sm90 import k"),
    ("graph.py", "from .runtime import plan"),
    ("__init__.py", "from . import graph"),
    ("cli/x.py", "from .. import __version__\nfrom ..graph import Graph"),
]


def _package(tmp_path: Path, name: str, source: str) -> Path:
    root = tmp_path / PACKAGE
    for module in ("vocab", "analyzer", "engines", "heuristics", "runtime", "kernels/configs"):
        folder = root / module
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (root / "engines" / "rules.py").write_text("")
    (root / "graph.py").write_text("")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(source + "\n")
    return root


@pytest.mark.parametrize(("name", "source"), FORBIDDEN)
def test_a_forbidden_import_is_found_by_file_and_line(tmp_path, name, source):
    found = violations(_package(tmp_path, name, source))
    assert len(found) == 1, found
    line = 1 if name.startswith("somewhere") else len(source.splitlines())
    assert found[0].startswith(f"{PACKAGE}/{name}:{line}: ")


@pytest.mark.parametrize(("name", "source"), ALLOWED)
def test_an_allowed_import_is_not_reported(tmp_path, name, source):
    assert violations(_package(tmp_path, name, source)) == []

"""How large a file, a function and a comment may be, and what source text may not say."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_frost.engines import ROWS
from cudnn_frost.heuristics.propose import FAMILIES

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("cudnn_frost", "tests", "bench", "examples")

FILE_LINES, KERNEL_FILE_LINES = 900, 1200
FUNCTION_LINES, ROLE_LINES = 80, 160
PARAMETERS, ROLE_PARAMETERS = 10, 14
COMMENT_LINES = 8
DOCSTRING_LINES = 40
LINE = 100

Found = Iterator[tuple[int, str]]


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """Files of the repository's folders, as paths inside it."""
    paths = (p for folder in folders for p in (REPOSITORY / folder).rglob("*"))
    return sorted(p.relative_to(REPOSITORY) for p in paths if p.suffix in suffixes)


def is_kernel_file(name: str) -> bool:
    """A device program or collective; a configuration is plain Python."""
    kernels = name.startswith("cudnn_frost/kernels/")
    return kernels and not name.startswith("cudnn_frost/kernels/configs/")


def file_length(name: str, text: str) -> Found:
    limit = KERNEL_FILE_LINES if is_kernel_file(name) else FILE_LINES
    count = len(text.splitlines())
    if count > limit:
        yield 1, f"{count} lines; at most {limit}"


def line_length(name: str, text: str) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LINE:
            yield number, f"{len(line)} columns; at most {LINE}"


def _roles(tree: ast.Module) -> set[ast.AST]:
    """Methods that run on the device."""
    methods = (
        (node, ast.unparse(decorator))
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    )
    return {node for node, text in methods if text.split("(")[0] in ("cute.jit", "cute.kernel")}


def _functions(name: str, text: str) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """(function, is it a role method of a kernel file), nested ones included."""
    tree = ast.parse(text)
    roles = _roles(tree) if is_kernel_file(name) else set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, node in roles  # type: ignore[misc]


def function_length(name: str, text: str) -> Found:
    for node, is_role in _functions(name, text):
        limit = ROLE_LINES if is_role else FUNCTION_LINES
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if count > limit:
            yield node.lineno, f"{node.name} has {count} lines; at most {limit}"


def parameter_count(name: str, text: str) -> Found:
    for node, is_role in _functions(name, text):
        limit = ROLE_PARAMETERS if is_role else PARAMETERS
        spec = node.args
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        names = [a.arg for a in (*every, spec.vararg, spec.kwarg) if a is not None]
        count = len([n for n in names if n not in ("self", "cls")])
        if count > limit:
            yield node.lineno, f"{node.name} has {count} parameters; at most {limit}"


def comment_run(name: str, text: str) -> Found:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    alone = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    for first in sorted(line for line in alone if line - 1 not in alone):
        count = next(n for n in range(1, len(alone) + 2) if first + n not in alone)
        if count > COMMENT_LINES:
            yield first, f"{count} comment lines in a row; at most {COMMENT_LINES}"


def module_docstring(name: str, text: str) -> Found:
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    count = len(docstring.splitlines()) if docstring else 0
    if count > DOCSTRING_LINES:
        yield 1, f"module docstring has {count} lines; at most {DOCSTRING_LINES}"


_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_NUMBER = r"\b\d+(?:[.,]\d+)?\s*"
HISTORY = {
    "a date": (
        r"\b(?:19|20)\d\d-(?:0\d|1[0-2])\b",
        r"\b\d{1,2}[./]\d{1,2}[./](?:19|20)\d\d\b",
        rf"\b(?:{_MONTHS})[a-z]*\.?\s+(?:\d{{1,2}},?\s+)?(?:19|20)\d\d\b",
        r"\b(?:in|since|until|as of|before|after)\s+20[12]\d\b",
    ),
    "an issue number": (
        # a colour of a style sheet follows a colon
        r"(?<![\w&:])(?<!: )#\d+\b",
        r"\b(?:PR|MR|pull request|nvbug|bug|ticket)s?\s*[#:]?\s*\d+\b",
        r"/(?:issues|pull)/\d+",
    ),
    "a benchmark figure": (
        _NUMBER + r"[TGP]FLOP",
        _NUMBER + r"[TGM]i?B/s",
        _NUMBER + r"(?:us|µs|μs|ns)\b",
        _NUMBER + r"(?:x|\u00d7|%|times)\s+(?:faster|slower|speedup)",
    ),
}


def history(name: str, text: str) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        for what, patterns in HISTORY.items():
            for pattern in patterns:
                for hit in re.finditer(pattern, line, re.IGNORECASE):
                    yield number, f"says {what}: {hit[0]!r}"


_MACHINE = "|".join(f"/{folder}/" for folder in ("work", "root", "tmp", "home", "Users"))


def machine_path(name: str, text: str) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        for hit in re.finditer(rf"(?<![\w.~}}-])(?:{_MACHINE})", line):
            yield number, f"names a path of one machine: {hit[0]}"


CHECKS = {
    check.__name__: check
    for check in (
        file_length,
        line_length,
        function_length,
        parameter_count,
        comment_run,
        module_docstring,
    )
}


def violations(check, paths: list[Path]) -> list[str]:
    """`file:line: what` of one check over files."""
    found = []
    for path in paths:
        text = (REPOSITORY / path).read_text()
        found += [f"{path}:{line}: {what}" for line, what in check(path.as_posix(), text)]
    return found


def _assert_none(found: list[str]) -> None:
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("name", CHECKS)
def test_within_budget(name):
    _assert_none(violations(CHECKS[name], sources(*FOLDERS)))


def test_source_says_what_is_true_now():
    _assert_none(violations(history, sources("cudnn_frost", "examples")))


def test_no_file_names_a_path_of_one_machine():
    written = sources(*FOLDERS, "docs", "tracker", suffixes=(".py", ".md", ".json"))
    top = [Path(n) for n in ("README.md", "Makefile", "pyproject.toml", "constraints.txt")]
    _assert_none(violations(machine_path, [*written, *(p for p in top if _exists(p))]))


def _exists(path: Path) -> bool:
    return (REPOSITORY / path).exists()


def test_no_plan_name_reads_as_a_backend_engine():
    """Callers bar plans by substring, `eng4` among them; neither our rows nor knobs may match."""
    names = [row.name for row in ROWS]
    names += [knob for family in FAMILIES.values() for knob in family.knobs]
    names += [
        node.value
        for path in sources("cudnn_frost")
        for node in ast.walk(ast.parse((REPOSITORY / path).read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("frost_")
    ]
    assert len(names) > 2 * len(ROWS)
    assert not [name for name in names if re.search(r"eng\d", name, re.IGNORECASE)]


# ---- every check, seen to fail


def _function(lines: int, parameters: str = "", indent: str = "", head: str = "") -> str:
    body = f"{indent}    x = 1\n" * (lines - 1)
    return f"{head}{indent}def f({parameters}):\n{body}"


def _names(count: int) -> str:
    return ", ".join(f"a{i}" for i in range(count))


_KERNEL = "cudnn_frost/kernels/sm90/x.py"
_ROLE = "class K:\n    @cute.jit\n"
_PLAIN = "class K:\n"
OVER = [
    (file_length, "cudnn_frost/x.py", "x = 1\n" * 901),
    (file_length, "cudnn_frost/kernels/configs/x.py", "x = 1\n" * 901),
    (file_length, _KERNEL, "x = 1\n" * 1201),
    (line_length, "cudnn_frost/x.py", "#" * 101),
    (function_length, "cudnn_frost/x.py", _function(81)),
    (function_length, "cudnn_frost/x.py", "class A:\n" + _function(81, indent="    ")),
    (function_length, "cudnn_frost/x.py", _function(81, "self", "    ", _ROLE)),
    (function_length, _KERNEL, _function(81, "self", "    ", _PLAIN)),
    (function_length, _KERNEL, _function(161, "self", "    ", _ROLE)),
    (parameter_count, "cudnn_frost/x.py", _function(2, _names(11))),
    (parameter_count, "cudnn_frost/x.py", _function(2, f"self, {_names(9)}, *, b, **c")),
    (parameter_count, _KERNEL, _function(2, f"self, {_names(11)}", "    ", _PLAIN)),
    (parameter_count, _KERNEL, _function(2, f"self, {_names(15)}", "    ", _ROLE)),
    (comment_run, "cudnn_frost/x.py", "x = 1\n" + "    # a\n" * 9),
    (module_docstring, "cudnn_frost/x.py", '"""' + "a\n" * 41 + '"""'),
    (history, "x.py", "# fixed on 2031-04"),
    (history, "x.py", '"""Since March 2031 this holds."""'),
    (history, "x.py", "# wrong in 2024"),
    (history, "x.py", "# see #123"),
    (history, "x.py", "# nvbug 4512345 says so"),
    (history, "x.py", "# https://github.com/a/b/pull/7"),
    (history, "x.py", "# reaches 660 TFLOP/s"),
    (history, "x.py", "# takes 12.5 us"),
    (history, "x.py", "# 3.1 TB/s of reads"),
    (history, "x.py", "# 1.4x faster than before"),
    (machine_path, "x.py", "open('/" + "tmp/a')"),
    (machine_path, "x.py", "# see /" + "work/x"),
]

UNDER = [
    (file_length, _KERNEL, "x = 1\n" * 1200),
    (file_length, "cudnn_frost/x.py", "x = 1\n" * 900),
    (line_length, "cudnn_frost/x.py", "#" * 100),
    (function_length, "cudnn_frost/x.py", _function(80)),
    (function_length, _KERNEL, _function(160, "self", "    ", _ROLE)),
    (parameter_count, "cudnn_frost/x.py", _function(2, f"self, {_names(10)}")),
    (parameter_count, _KERNEL, _function(2, f"self, {_names(14)}", "    ", _ROLE)),
    (comment_run, "cudnn_frost/x.py", "# a\n" * 8 + "\n" + "# b\n" * 8),
    (comment_run, "cudnn_frost/x.py", "x = 1  # a\n" * 20),
    (module_docstring, "cudnn_frost/x.py", '"""' + "a\n" * 39 + '"""'),
    (history, "x.py", "# tile 2048, head dim 128, page 16 (Press et al., 2022)"),
    (history, "x.py", "style = 'color: #333'"),
    (history, "x.py", 'f"{value:#10x}"'),
    (history, "x.py", "1 << 20  # bytes; sm90, cu13, version 4.8.1"),
    (machine_path, "x.py", "f'{root}/" + "tmp/a'"),
]


@pytest.mark.parametrize(("check", "name", "text"), OVER)
def test_what_is_over_is_reported(check, name, text):
    assert len(list(check(name, text))) >= 1


@pytest.mark.parametrize(("check", "name", "text"), UNDER)
def test_what_is_within_is_not(check, name, text):
    assert list(check(name, text)) == []

"""The command line: exit codes, JSON, one-line errors, nothing heavy loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_frost.engines import ROWS

DATA = Path(__file__).parent / "data"
DUMPS = ["paged_decode.json", "thd_prefill.json"]
SERVED = {
    "nodes": [
        {
            "op": "sdpa",
            "compute_dtype": "FLOAT",
            "inputs": {
                name: {
                    "uid": uid,
                    "dtype": "BFLOAT16",
                    "dim": [2, heads, 64, 128],
                    "stride": [heads * 64 * 128, 128, heads * 128, 1],
                }
                for uid, (name, heads) in enumerate([("q", 8), ("k", 2), ("v", 2)], 1)
            },
            "outputs": {
                "O": {
                    "uid": 4,
                    "dtype": "BFLOAT16",
                    "dim": [2, 8, 64, 128],
                    "stride": [65536, 128, 1024, 1],
                }
            },
            "params": {"use_causal_mask": True},
        }
    ]
}


def run(*arguments: str, cwd: Path | None = None, **environment: str):
    """A process of its own: (exit code, stdout, stderr)."""
    code = "import sys; from cudnn_frost.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin", **environment},
    )
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", DUMPS)
def test_json_of_a_dump_lists_every_row(name):
    code, out, _ = run("analyze", str(DATA / name), "--target", "sm90", "--json")
    (graph,) = json.loads(out)["graphs"]
    assert [row["name"] for row in graph["rows"]] == [row.name for row in ROWS]
    assert len(graph["rows"]) == 5 and code == 3
    declined = [row for row in graph["rows"] if not row["accepted"]]
    for row in declined:
        for decline in row["declines"]:
            assert set(decline) == {"code", "subject", "got", "want", "remedy"}
    assert graph["ranked"] == ["frost_sdpa_fwd_reference"]


def test_exit_zero_when_a_row_serves(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(SERVED))
    code, out, _ = run("analyze", str(path), "--target", "sm90", CUDNN_FROST_UNQUALIFIED="1")
    assert code == 0, out
    assert "frost_sdpa_fwd_prefill_sm90[STAGES=2, TILE_M=128, TILE_N=128]" in out


def test_text_gives_every_reason_with_its_remedy(tmp_path):
    body = json.loads(json.dumps(SERVED))
    body["nodes"][0]["params"] = {"use_casual_mask": True, "stats_use_log2": True}
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(body))
    code, out, _ = run("analyze", str(path), "--target", "sm100")
    assert code == 3
    for said in ("sm100", "use_casual_mask", "Did you mean 'use_causal_mask'?", "log2"):
        assert said in out


def test_a_log_gives_every_graph(tmp_path):
    lines = ["INFO"]
    for name in DUMPS:
        lines.append(json.dumps(json.loads((DATA / name).read_text()), separators=(",", ":")))
    path = tmp_path / "graphs.log"
    path.write_text("\n".join(lines))
    _, out, _ = run("analyze", str(path), "--target", "sm90", "--json")
    assert len(json.loads(out)["graphs"]) == 2


def test_a_callable_that_returns_a_graph(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import cudnn\n"
        "def build():\n"
        "    g = cudnn.pygraph(io_data_type=cudnn.data_type.HALF)\n"
        "    q, k, v = (g.tensor(dim=[1, 2, 8, 16]) for _ in range(3))\n"
        "    g.sdpa(q=q, k=k, v=v, is_inference=True)\n"
        "    return g\n"
        "def wrong():\n"
        "    return 3\n"
        "def fails():\n"
        "    raise KeyError('x')\n"
    )
    code, out, _ = run("analyze", "mine:build", "--target", "cpu", cwd=tmp_path)
    assert code == 3 and "graph: sdpa B=1" in out
    for name, said in (("wrong", "gave a int"), ("fails", "KeyError"), ("nowhere", "nowhere")):
        code, _, err = run("analyze", f"mine:{name}", cwd=tmp_path)
        assert code == 2 and said in err
    code, _, err = run("analyze", "no_such_module:build", cwd=tmp_path)
    assert code == 2 and "no_such_module" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "neither JSON"), ("[]", "no graph"), ('{"nodes": [{}]}', "nodes.0.op")],
)
def test_unusable_input_names_the_file(tmp_path, content, said):
    path = tmp_path / "bad.json"
    path.write_text(content)
    code, out, err = run("analyze", str(path))
    assert code == 2 and not out and str(path) in err and said in err


def test_a_missing_file_and_an_unknown_target(tmp_path):
    code, _, err = run("analyze", str(tmp_path / "nowhere.json"))
    assert code == 2 and "No such file" in err
    code, _, err = run("analyze", str(DATA / DUMPS[0]), "--target", "sm12")
    assert code == 2 and "sm12" in err and "sm90" in err


def test_a_target_file(tmp_path):
    path = tmp_path / "target.json"
    target = {"name": "mine", "cc": [9, 0], "sm_count": 114, "smem_per_block": 232448}
    path.write_text(json.dumps(target))
    _, out, _ = run("analyze", str(DATA / DUMPS[0]), "--target", str(path), "--json")
    assert json.loads(out)["graphs"][0]["target"]["sm_count"] == 114
    path.write_text(json.dumps({**target, "sm_cuont": 1}))
    code, _, err = run("analyze", str(DATA / DUMPS[0]), "--target", str(path))
    assert code == 2 and "sm_cuont" in err


def test_a_file_is_analyzed_without_torch_cutlass_or_cudnn():
    code = (
        "import sys\n"
        "from cudnn_frost.cli import app\n"
        f"sys.argv = ['cudnn-frost', 'analyze', {str(DATA / DUMPS[0])!r}, '--target', 'sm90']\n"
        "try:\n    app.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {m.split('.')[0] for m in sys.modules} & {'torch', 'cutlass', 'cudnn', 'cuda'}\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_rows():
    code, out, _ = run("rows", "--json")
    assert code == 0 and [r["name"] for r in json.loads(out)["rows"]] == [r.name for r in ROWS]
    code, out, _ = run("rows")
    assert code == 0 and "frost_sdpa_fwd_prefill_sm90" in out

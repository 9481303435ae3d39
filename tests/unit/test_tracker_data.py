"""The tracker: the generated matrix is current, and a claim without a proof fails."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cudnn_frost.analyzer.files import SourceError
from cudnn_frost.cli import matrix, qualification
from cudnn_frost.cli.tracker import default_directory, read_gaps, read_measurements
from cudnn_frost.engines import ROWS

PREFILL = next(row for row in ROWS if row.kernel == "prefill_sm90")
PACKAGE = Path(qualification.__file__).parent.parent
VERSIONS = dict.fromkeys(qualification.VERSIONS, "1")


def write(directory: Path, row=PREFILL, failed: int = 0, cc=(9, 0)) -> None:
    qualification.write_record(
        directory,
        row,
        device="a device",
        cc=cc,
        versions=VERSIONS,
        cases=(10, failed),
        worst_error=qualification.WorstError(o=1e-3, stats=1e-6),
        command="a command",
    )


def test_the_matrix_is_current():
    directory = default_directory()
    assert not matrix.difference(directory / matrix.FILE, matrix.render(directory))


def test_no_row_claims_what_no_record_proves():
    assert qualification.problems(qualification.read_records(default_directory())) == ()


def test_a_claim_without_a_record_is_a_problem():
    claiming = replace(PREFILL, qualified=True)
    (problem,) = qualification.problems({}, [claiming])
    assert "there is no record" in problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"failed": 1}, "1 of 10 cases failed"),
        ({"cc": (10, 0)}, "compute capability 10.0"),
    ],
)
def test_a_record_that_does_not_prove(tmp_path, change, said):
    write(tmp_path, **change)
    record = qualification.read_records(tmp_path)[PREFILL.name]
    assert said in "; ".join(qualification.doubts(PREFILL, record))


def test_a_record_proves_the_sources_and_claims_it_was_made_with(tmp_path):
    write(tmp_path)
    record = qualification.read_records(tmp_path)[PREFILL.name]
    assert qualification.doubts(PREFILL, record) == ()
    wider = replace(PREFILL.capabilities, sink=True)
    (doubt,) = qualification.doubts(replace(PREFILL, capabilities=wider), record)
    assert "sink" in doubt


def test_the_digest_follows_code_and_not_comments(tmp_path):
    package = tmp_path / "cudnn_frost"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert qualification.digest(PREFILL, package) == qualification.digest(PREFILL)
    common = sorted((package / "kernels" / "common").glob("[a-z]*.py"))[0]
    common.write_text("# a comment\n" + common.read_text())
    assert qualification.digest(PREFILL, package) == qualification.digest(PREFILL)
    common.write_text(common.read_text() + "\nX = 1\n")
    assert qualification.digest(PREFILL, package) != qualification.digest(PREFILL)


def test_the_digest_covers_common_and_configs():
    modules = qualification.sources("prefill_sm90")
    assert "cudnn_frost.kernels.sm90.prefill" in modules
    assert "cudnn_frost.kernels.configs.prefill_sm90" in modules
    assert any(name.startswith("cudnn_frost.kernels.common.") for name in modules)


def test_bad_data_names_file_and_field(tmp_path):
    write(tmp_path)
    (path,) = (tmp_path / "qualification").glob("*.json")
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "cases_run": 0}))
    with pytest.raises(SourceError, match="cases_run"):
        qualification.read_records(tmp_path)
    (tmp_path / "gaps.json").write_text('[{"missing": "x"}]')
    with pytest.raises(SourceError, match="meanwhile"):
        read_gaps(tmp_path)


def test_a_matrix_shows_measurements_and_gaps(tmp_path):
    (tmp_path / "measurements").mkdir()
    run = {
        "command": "bench",
        "machine": {"device": "a GPU", "torch": "1"},
        "shapes": [{"shape": "s", "seconds": {"frost": 2e-3, "cudnn": 3e-3}, "flops": 4e9}],
    }
    (tmp_path / "measurements" / "run.json").write_text(json.dumps(run))
    (tmp_path / "gaps.json").write_text('[{"missing": "this", "meanwhile": "that"}]')
    text = matrix.render(tmp_path)
    assert "| s | 2 | 1.50 |" in text and "| - | this | that |" in text
    assert read_measurements(tmp_path)["run.json"].peers == ("cudnn",)
    path = tmp_path / matrix.FILE
    path.write_text(text.replace("1.50", "1.51"))
    assert "1.51" in matrix.difference(path, text)

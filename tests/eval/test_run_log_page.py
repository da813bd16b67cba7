"""A run log is read by the commands that docs/reference/run_log.md shows."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cramming.record import load_record
from cramming.runlog import RUN_LOG
from tests.eval.runs import write_run


def test_the_log_is_read_by_pandas_and_its_head_by_the_shell(tmp_path: Path) -> None:
    pandas: Any = pytest.importorskip("pandas")
    run = write_run(tmp_path / "a")
    log = pandas.read_json(run / RUN_LOG, lines=True)
    assert log[log.event == "steps"].tokens.max() == 10_000
    command = f"tail -n 1 {run / RUN_LOG} | tr -d '\\n' | sha256sum"
    shown = subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
    assert shown.split()[0] == load_record(run)["log"]["head"]

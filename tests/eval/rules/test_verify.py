"""`cramming verify`: a finished run is in order, an unfinished one is told from a broken one, every change is named."""

import shutil
from pathlib import Path

from eval.verify import Inputs, verify_run


def test_a_finished_run_is_in_order(honest_run: Path, inputs: Inputs) -> None:
    result = verify_run(honest_run, inputs)
    assert result.in_order and result.division == "closed", (result.problems, result.findings)

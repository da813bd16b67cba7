from pathlib import Path

from eval.rules.load import load_run


def test_the_honest_run_is_of_the_closed_division(honest_run: Path) -> None:
    verdict = load_run(honest_run).verdict
    assert verdict.division == "closed", verdict.broken

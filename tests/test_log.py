"""Every test that docs/log.md names as the one that finds a fault is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_log_names_exists() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    there = {file.stem for file in files}
    there |= {
        name
        for file in files
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
    }
    named = re.findall(r"\btest_\w+", (ROOT / "docs" / "log.md").read_text(encoding="utf-8"))
    assert len(named) > 100 and sorted(set(named) - there) == []

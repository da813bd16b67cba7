"""The script for a GPU, on a CPU at a tiny scale: every row is measured, and what cannot be says why."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cramming.bench import main as bench
from cramming.config import UserError


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_script", Path(__file__).parents[2] / "benchmarks" / "gpu.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows_of(gpu: ModuleType, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "gpu.md"
    gpu.main(["--scale", "tiny", "--device", "cpu", "--out", str(out), *arguments])
    return [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]


def test_a_capped_run_finds_its_micro_batch(gpu: ModuleType, tmp_path: Path) -> None:
    (row,) = rows_of(gpu, tmp_path, "--only", "cap base")
    assert row["tokens_per_step"] == 32 * 16 and row["tokens_per_second"] > 0 and row["memory_gb"] == 11


def test_what_cannot_be_measured_says_why(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise UserError("no such peer")

    monkeypatch.setattr(bench, "pair", broken)
    first, late = (rows_of(gpu, tmp_path, "--only", "bert 128", *more)[0] for more in ([], ["--minutes", "0"]))
    assert first["error"] == "no such peer" and "not begun within 0.0 minutes" in late["error"]


@pytest.mark.slow
def test_every_row_on_a_cpu(gpu: ModuleType, tmp_path: Path) -> None:
    rows = rows_of(gpu, tmp_path)
    assert len(rows) == 9
    for row in rows:
        if row["row"].startswith("fp8") and importlib.util.find_spec("torchao") is None:
            assert "needs the package torchao" in row["error"]
        elif row["row"] != "ceiling":
            assert row["tokens_per_second"] > 0 and row["share_of_ceiling"] > 0, row
        assert row["row"].startswith("fp8") or "error" not in row, row
    pairs = [row for row in rows if row["row"].split()[0] in ("bert", "modern")]
    assert len(pairs) == 4 and all(row["speedup"] > 0 for row in pairs)

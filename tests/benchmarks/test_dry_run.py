"""The dry run of the GPU's code: what it needs, its reckoning, and one step where the CUDA build of torch is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
KERNELS = [
    {
        "name": "aten.mm",
        "kind": "product",
        "backward": False,
        "launches": 4,
        "bytes": 1e6,
        "flops": 1e12,
        "registers": 0,
        "spilled": 0,
    },
    {
        "name": "triton_per_fused_native_layer_norm_0",
        "kind": "triton",
        "backward": True,
        "launches": 2,
        "bytes": 4e9,
        "flops": 0,
        "registers": 72,
        "spilled": 8,
    },
]
ROW = {
    "part": "compiled",
    "architecture": "sm_90",
    "model": "bert-base",
    "name": "",
    "length": 128,
    "tokens": 65536,
    "parameters": 10**8,
    "flops_per_token": 6e8,
    "graphs": 1,
    "breaks": 0,
    "kernels": KERNELS,
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's tables, which need no CUDA."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import report

    return report


def test_time_is_operations_or_bytes_whichever_takes_longer(report: Any) -> None:
    seconds = report.Reckoning(ROW, "H200").seconds
    assert seconds["matrix products"] == pytest.approx(4e12 / (989e12 * 0.7))
    assert seconds["norm and residual"] == pytest.approx(8e9 / (4.8e12 * 0.8))
    slower = report.Reckoning(ROW, "A100")
    assert slower.tokens_per_second < report.Reckoning(ROW, "H200").tokens_per_second


def test_each_change_has_a_line_of_bytes_by_model(report: Any) -> None:
    other = ROW | {"name": "blocks", "model": "modern", "tokens": 32768}
    header, _, *lines = report.bytes_by_change([ROW, other, ROW | {"length": 512}])
    assert header == "| kB a token | bert-base | modern |"
    assert lines[0].endswith("| 122 | – |") and lines[1] == "| blocks | – | 244 |"
    assert len(lines) == 2


def test_the_section_is_replaced_and_the_rest_of_the_page_stays(
    report: Any, tmp_path: Path
) -> None:
    raw, docs = tmp_path / "raw.jsonl", tmp_path / "tricks.md"
    training = {
        "part": "training",
        "model": "modern",
        "mode": "bf16",
        "outcomes": {"rows auto": "ok", "x": "FAILED: y"},
    }
    raw.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW, training)))
    docs.write_text("# Measured\n\nbefore\n\n## after\n\nlast\n")
    for _ in range(2):
        report.write(raw, tmp_path / "out.md", docs)
    text = docs.read_text()
    assert text.count(report.SECTION) == 1 and "before" in text and "## after\n\nlast" in text
    assert "(1 FAILED, 1 passed)" in text and "1 (up to 8 B)" in text


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("triton_poi_fused__to_copy_add_cat_cos_mul_roll_view_12", True),
        ("triton_poi_fused_add_arange_cat_div_mul_pow_reciprocal_6", True),
        ("triton_poi_fused_cat_neg_sin", True),
        ("triton_per_fused_add_mean_mul_pow_rsqrt_3", False),  # a norm's squares
        ("triton_poi_fused_add_cat_mul_roll_stack_using_cosine", False),
        ("cramming.angle_tables", False),
    ],
)
def test_a_kernel_that_computes_angles_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, fails: bool
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import dry_run as script

    kernels = [*KERNELS, KERNELS[0] | {"name": name}]
    row = script.checked(ROW | {"kernels": kernels})
    assert ("error" in row) == fails
    assert not fails or name in row["error"]


def test_without_the_cuda_build_it_says_so_in_one_line(tmp_path: Path) -> None:
    if missing() is None:
        pytest.skip("it is there")
    outcome = dry_run(tmp_path, "modern")
    assert (
        outcome.returncode == 1
        and outcome.stderr.startswith("dry_run: ")
        and len(outcome.stderr.splitlines()) == 1
    )


@pytest.mark.slow
def test_a_step_on_fake_tensors(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    outcome = dry_run(tmp_path, '"finetuning", "model": "bert-base", "mode": "bf16"')
    (row,) = map(json.loads, (tmp_path / "raw.jsonl").read_text().splitlines())
    assert set(row["outcomes"].values()) == {"ok"}, (
        row,
        outcome.stderr,
    )  # without a read by the host


def missing() -> str | None:
    """Why the dry run cannot run with this Python."""
    code = "import fake_card; print(fake_card.missing() or '')"
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    return outcome.stdout.strip() or None


def dry_run(folder: Path, only: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, FOLDER / "dry_run.py", "--raw", folder / "raw.jsonl", "--only", only]
    return subprocess.run(command, capture_output=True, text=True)

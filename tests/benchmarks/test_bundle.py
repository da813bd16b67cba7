"""The bundle: a folder from which the suite runs where there is little but torch, transformers and scikit-learn."""

import json
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
BROUGHT = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "triton")


def needed(names: tuple[str, ...]) -> dict[str, list[Path]]:
    """These distributions and all that they need, as installed here: the top of each one's files."""
    from packaging.requirements import Requirement

    found: dict[str, list[Path]] = {}
    left = list(names)
    while left:
        name = left.pop()
        try:
            one = distribution(name)
        except (
            PackageNotFoundError
        ):  # not on this platform, or not installed: no Triton beside torch for CPUs
            continue
        if one.name in found:
            continue
        tops = {
            Path(str(file)).parts[0] for file in one.files or () if not str(file).startswith("..")
        }
        found[one.name] = [Path(str(one.locate_file(top))) for top in sorted(tops)]
        for text in one.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


def bare_environment(folder: Path) -> Path:
    """Its Python: a virtual environment that has only what the other machine has, by links."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    for tops in needed(BROUGHT).values():
        for top in tops:
            if top.exists() and not (site / top.name).exists():
                (site / top.name).symlink_to(top)
    return folder / "bin" / "python"


def write_text(folder: Path) -> tuple[Path, Path]:
    """Some text, and three tasks of a few examples."""
    lines = "\n\n".join(
        f"The {i}th day was like the day before it, said number {i * 7}." * 4 for i in range(4000)
    )
    (folder / "text.txt").write_text(lines)
    headers = {
        "RTE": "index\tsentence1\tsentence2\tlabel",
        "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    }
    for task in ("RTE", "MRPC", "CoLA"):
        (folder / "glue" / task).mkdir(parents=True)
        for name, count in (("train.tsv", 64), ("dev.tsv", 16)):
            rows = {
                "RTE": [
                    f"{i}\tIt was day {i}.\tDay {i}.\t{'not_' * (i % 2)}entailment"
                    for i in range(count)
                ],
                "MRPC": [f"{i % 2}\t{i}\t{i}\tIt was day {i}.\tDay {i}." for i in range(count)],
                "CoLA": [f"x\t{i % 2}\t\tIt was day {i}." for i in range(count)],
            }[task]
            text = "\n".join(filter(None, [headers.get(task), *rows])) + "\n"
            (folder / "glue" / task / name).write_text(text)
    return folder / "text.txt", folder / "glue"


def python(code: str, interpreter: Path, *path: Path) -> "subprocess.CompletedProcess[str]":
    env = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"}
    return subprocess.run([interpreter, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.slow  # pip downloads some megabytes
def test_the_suite_runs_from_the_bundle_alone(tmp_path: Path) -> None:
    """All parts of each stage on a CPU; and nothing of what this environment has beside what the other machine has."""
    text, glue = write_text(tmp_path)
    bundle, bare = tmp_path / "bundle", bare_environment(tmp_path / "bare")
    command = [
        sys.executable,
        FOLDER / "bundle.py",
        "--out",
        bundle,
        "--text",
        text,
        "--glue",
        glue,
        "--vocabulary",
        "400",
    ]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert python("import hydra", bare).returncode != 0
    assert {path.name for path in bundle.iterdir()} == {
        ".gitignore",
        "bundle.json",
        "corpus",
        "glue",
        "wheels",
    }
    for stage, names in (
        (1, ["ceilings", "ours bert-base 16"]),
        (2, ["lever: fp8 by rows"]),
        (3, ["killed", "fine-tuning", "trick: accumulation"]),
        (4, ["minutes: best", "scores: best"]),
    ):
        command = [
            bare,
            FOLDER / "run.py",
            "--stage",
            str(stage),
            "--out",
            tmp_path / "out",
            "--bundle",
            bundle,
            "--work",
            tmp_path / "work",
            "--scale",
            "tiny",
            "--device",
            "cpu",
            "--only",
            *names,
        ]
        ran = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
        lines = (tmp_path / "out" / f"stage{stage}.jsonl").read_text()
        assert ran.returncode == 0, (ran.stdout, ran.stderr, lines)
        found = {row["row"]: row for row in map(json.loads, lines.splitlines()) if "result" in row}
        assert len(found) == len(names) and not any(
            "refused" in row["result"] for row in found.values()
        )


def test_what_is_bundled_has_the_versions_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import bundle

    found = bundle.requirements()
    assert "hydra-core>=1.3.2,<1.4" in found and "pluggy" in found and len(found) == len(set(found))

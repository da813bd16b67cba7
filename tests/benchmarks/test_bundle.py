"""The bundle: a folder from which the suite runs where there is little but torch, transformers and scikit-learn."""

import json
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
ROOT = FOLDER.parents[1]
BROUGHT = (
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "scikit-learn",
    "triton",
    "matplotlib",
    "jinja2",
    "psutil",
)
IMPORT_ALL = """
import importlib, pkgutil, sys
from pathlib import Path
import cramming
for module in pkgutil.walk_packages(cramming.__path__, "cramming."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
folder = Path(sys.argv[1])
sys.path[:0] = [str(folder), str(folder.parent)]
for name in ["peers", *sorted(file.stem for file in folder.glob("*.py"))]:
    importlib.import_module(name)
"""


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bundle

    return bundle


def needed(names: tuple[str, ...]) -> dict[str, list[Path]]:
    """These distributions and all that they need, as installed here: the top of each one's files."""
    from packaging.requirements import Requirement

    wheels: dict[str, list[Path]] = {}
    left = list(names)
    while left:
        name = left.pop()
        try:
            dist = distribution(name)
        except (
            PackageNotFoundError
        ):  # not on this platform, or not installed: no Triton beside torch for CPUs
            continue
        if dist.name in wheels:
            continue
        tops = {
            Path(str(file)).parts[0] for file in dist.files or () if not str(file).startswith("..")
        }
        wheels[dist.name] = [Path(str(dist.locate_file(top))) for top in sorted(tops)]
        for text in dist.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return wheels


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


def make_repository(folder: Path) -> Path:
    """Make a git repository with a file of the predecessor's package and one beside it."""
    (folder / "cramming").mkdir(parents=True)
    (folder / "cramming" / "__init__.py").write_text("name = 'predecessor'\n")
    (folder / "LICENSE.MD").write_text("MIT\n")
    (folder / "large.bin").write_text("left out\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", folder, *command], check=True)
    return folder


def make_wheel(folder: Path, name: str, *requires: str) -> str:
    """Make a wheel of nothing but its metadata; return the file's name."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines.extend(f"Requires-Dist: {requirement}" for requirement in requires)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    return file.name


def run_python(interpreter: Path, code: str, *arguments: Path, path: list[Path]) -> str:
    """Run code with these folders on the path and nothing else of this environment; return its errors."""
    env = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"}
    command = [interpreter, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return done.stderr if done.returncode else ""


@pytest.mark.slow  # pip downloads 25 MB
def test_all_that_is_measured_imports_from_the_bundle_alone(tmp_path: Path) -> None:
    text, glue = write_text(tmp_path)
    out, bare = tmp_path / "bundle", bare_environment(tmp_path / "bare")
    command = [sys.executable, FOLDER / "bundle.py", "--out", out, "--vocabulary", "400"]
    command += ["--text", text, "--glue", glue]
    command += ["--predecessor", make_repository(tmp_path / "repository")]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    content = json.loads((out / "bundle.json").read_text())
    assert content["python"] == f"3.{sys.version_info.minor}"
    parts = {"corpus", "glue", "predecessor", "predecessor_wheels", "wheels"}
    assert parts < set(content["sizes_bytes"])
    for folder, wheels in (
        ("wheels", content["wheels"]),
        ("predecessor_wheels", content["predecessor"]["wheels"]),
    ):
        assert set(wheels) == {path.name for path in (out / folder).iterdir()}
        for wheel in wheels:
            with zipfile.ZipFile(out / folder / wheel) as archive:
                archive.extractall(tmp_path / "site" / folder)
    ours, theirs = tmp_path / "site" / "wheels", tmp_path / "site" / "predecessor_wheels"
    assert run_python(bare, "import hydra", path=[ROOT])
    assert not run_python(bare, IMPORT_ALL, FOLDER, path=[ROOT, ours])
    code = "import transformers as t, hydra, dill, einops; assert t.__version__ == '4.57.6'"
    assert not run_python(bare, code, path=[theirs])


def test_the_predecessor_is_exported_at_its_commit_without_history(
    bundle: Any, tmp_path: Path
) -> None:
    repository = make_repository(tmp_path / "repository")
    commit = bundle.export_predecessor(repository, tmp_path / "out")
    head = subprocess.run(
        ["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert commit == head.stdout.strip()
    exported = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name for path in exported} == {"__init__.py", "LICENSE.MD"}


def test_a_bundle_is_made_whole_or_not_at_all(
    bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder; what it lacks is said before anything is downloaded, and nothing is in the way of the repeat."""
    text, _ = write_text(tmp_path)
    (tmp_path / "predict.py").write_text("import sys; open(sys.argv[2], 'w').close()")
    wanted: list[str] = []
    monkeypatch.setattr(bundle, "fetch_wheels", lambda *arguments: wanted.append("wheels"))
    monkeypatch.setattr(bundle, "prepare_corpus", lambda *arguments: None)
    monkeypatch.setattr(bundle, "PREDICT", tmp_path / "predict.py")
    monkeypatch.chdir(tmp_path)
    whole = ["--out", "made/bundle", "--text", str(text), "--glue", "glue"]
    for wrong in (["--glue", str(text)], ["--predecessor", "glue"]):
        with pytest.raises(SystemExit, match=r"--out=.*: not made"):
            bundle.main([*whole, *wrong])
        assert not wanted and not list((tmp_path / "made").iterdir())
    bundle.main(whole)
    names = {path.name for path in (tmp_path / "made" / "bundle").iterdir()}
    assert wanted and names == {".gitignore", "bundle.json", "glue", "predictions.json"}


def test_tree_and_bundle_together_fit_into_the_limit(bundle: Any, tmp_path: Path) -> None:
    room = bundle.LIMIT_BYTES - bundle.tree_bytes()
    assert room > 55 * 2**20  # the tree itself stays small
    bundle.report(tmp_path, {"python": "3.12", "sizes_bytes": {"corpus": room}})
    with pytest.raises(SystemExit, match="--documents"):
        bundle.report(tmp_path, {"python": "3.12", "sizes_bytes": {"corpus": room + 1}})


def test_the_tree_is_what_git_does_not_ignore(
    bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = make_repository(tmp_path)
    monkeypatch.setattr(bundle, "ROOT", repository)
    before = bundle.tree_bytes()
    (repository / "new.txt").write_text("12345")
    (repository / ".gitignore").write_text("/build\n")
    (repository / "build").write_text("ignored")
    assert bundle.tree_bytes() == before + len("12345") + len("/build\n")


def test_what_is_bundled_has_the_versions_of_the_project(bundle: Any) -> None:
    requirements = bundle.requirements()
    assert "hydra-core>=1.3.2,<1.4" in requirements
    assert len(requirements) == len(bundle.PACKAGES)


def test_a_wheel_meets_what_is_wanted_and_what_others_require(bundle: Any, tmp_path: Path) -> None:
    first = make_wheel(tmp_path, "first", "Second_part>=2,<3", 'third>1; extra == "dev"')
    second = make_wheel(tmp_path, "second_part", "third (~=1.0)")
    third = make_wheel(tmp_path, "third")
    assert bundle.requirements_of_wheels(tmp_path, ["first>=1", "third"]) == {
        first: "first>=1",
        second: "second-part<3,>=2",
        third: "third~=1.0",
    }

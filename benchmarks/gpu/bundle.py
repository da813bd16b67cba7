"""Bundle of everything that a machine with a GPU and no network lacks: packages, a corpus, GLUE tasks, the predecessor.

    python benchmarks/gpu/bundle.py --out build/bundle --python 3.12 --text 'wiki/*.txt.xz' --glue <GLUE folder> \
        --predecessor <clone of github.com/JonasGeiping/cramming>

    wheels/              what run.py imports beside torch, transformers, NumPy, SciPy, scikit-learn, matplotlib,
                         Jinja2 and psutil, for `--python` on Linux x86_64
    corpus/              about 8M tokens of the text, prepared by `cramming prepare`, with a vocabulary of 32,768
    glue/                RTE, MRPC and CoLA
    predecessor/         its package at the clone's commit, without history
    predecessor_wheels/  what it imports in other versions than ours, or beside them
    predictions.json     memory, speed and bytes by kernel that predict.py expects on a card
    bundle.json          the requirement that each wheel meets, the predecessor's commit, the size of each part

pip needs a network here. Git ignores the folder; it and the tree must fit into 64 MiB. No room is left for SciPy and
scikit-learn (44 MiB), or for pandas and pyarrow (57 MiB), which the predecessor imports: the other machine has them.
"""

import argparse
import email
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.message import Message
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # a checkout works without an installation

from cramming.files import overwrite_atomically

ROOT = Path(__file__).resolve().parents[2]
PREDICT = Path(__file__).with_name("predict.py")
LIMIT_BYTES = 64 * 2**20  # of the tree and the bundle together
TASKS = ("RTE", "MRPC", "CoLA")
# By name in pyproject.toml, which says the version. What they need comes along.
PACKAGES = ("hydra-core", "omegaconf", "pydantic", "rich", "typer", "torchao", "pytest")
# Exactly what `import cramming` loads there, less what every machine with torch and transformers has.
PREDECESSOR_PACKAGES = (
    "transformers==4.57.6",
    "tokenizers>=0.22,<=0.23.0",
    "huggingface-hub>=0.34,<1",
    "datasets==5.0.1",
    "dill>=0.3,<0.4.2",
    "multiprocess<0.70.20",
    "xxhash>=3.5",
    "einops>=0.8",
    "nvidia-ml-py>=12",
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    "requests>=2.32.2",
    "urllib3>=2",
    "certifi>=2024",
    "charset-normalizer>=3",
    "idna>=3",
)
ANTLR = "antlr4-python3-runtime==4.9.3"  # omegaconf needs it; the index has its source only
GLIBC_MINORS = (35, 34, 31, 28, 27, 26, 24, 17)  # of manylinux; the newest first


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument(
        "--python",
        default=f"3.{sys.version_info.minor}",
        help="of the other machine; else this one's",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        required=True,
        help="files or globs; documents stand between blank lines",
    )
    parser.add_argument(
        "--documents", type=int, default=2600, help="8M tokens of Wikipedia's articles"
    )
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument(
        "--glue", type=Path, required=True, help="folder with RTE/, MRPC/ and CoLA/"
    )
    parser.add_argument("--predecessor", type=Path, help="its git repository; else left out")
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()  # other folders are current in what this starts
    if args.out.exists():
        raise SystemExit(f"--out={args.out}: it exists. Remove it or name another folder.")
    try:
        overwrite_atomically(args.out, partial(make_bundle, args), synced=False)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--out={args.out}: not made. {error}") from None


def make_bundle(args: argparse.Namespace, out: Path) -> None:
    """Make the folder, first what needs no network; refuse what does not fit beside the tree."""
    out.mkdir()
    (out / ".gitignore").write_text("*\n", encoding="utf-8")
    content: dict[str, Any] = {"python": args.python}
    copy_tasks(out / "glue", args.glue)
    if args.predecessor:
        commit = export_predecessor(args.predecessor, out / "predecessor")
        wheels = fetch_wheels(out / "predecessor_wheels", args.python, PREDECESSOR_PACKAGES, False)
        content["predecessor"] = {"commit": commit, "wheels": wheels}
    content["wheels"] = fetch_wheels(out / "wheels", args.python, requirements(), True)
    prepare_corpus(out / "corpus", args.text, args.documents, args.vocabulary)
    predictions = out / "predictions.json"
    subprocess.run([sys.executable, PREDICT, "--out", predictions], check=True, cwd=ROOT)
    content["sizes_bytes"] = sizes_of_parts(out)
    text = json.dumps(content, indent=1)
    (out / "bundle.json").write_text(text + "\n", encoding="utf-8")
    report(args.out, content)


def requirements() -> list[str]:
    """Return the requirements of `PACKAGES` with the versions that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        listed.extend(extra)
    by_name = {name_of(requirement): requirement for requirement in listed}
    return [by_name[name] for name in PACKAGES]


def fetch_wheels(
    folder: Path, python: str, wanted: Sequence[str], with_dependencies: bool
) -> dict[str, str]:
    """Download wheels and build ANTLR's; return the requirement that each wheel's file meets."""
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ANTLR], check=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for platform in [*platforms, "manylinux2014_x86_64"]:
        target.extend(["--platform", platform])
    if not with_dependencies:
        target.append("--no-deps")
    command = [*pip, "download", "--find-links", folder, *target, "-d", folder, *wanted]
    subprocess.run(command, check=True)
    return requirements_of_wheels(folder, [*wanted, ANTLR])


def requirements_of_wheels(folder: Path, wanted: Sequence[str]) -> dict[str, str]:
    """Return for each wheel's file what `wanted` and the wheels beside it require of its package."""
    wheels = sorted(folder.glob("*.whl"))
    by_file = {wheel.name: metadata_of(wheel) for wheel in wheels}
    stated = list(wanted)
    for metadata in by_file.values():
        for requirement in metadata.get_all("Requires-Dist", []):
            unconditional = ";" not in requirement
            if unconditional:
                stated.append(requirement)
    clauses: dict[str, set[str]] = {}
    for requirement in stated:
        clauses.setdefault(name_of(requirement), set()).update(clauses_of(requirement))
    met = {}
    for file, metadata in by_file.items():
        name = name_of(metadata["Name"])
        met[file] = name + ",".join(sorted(clauses.get(name, ())))
    return met


def metadata_of(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(member))


def name_of(requirement: str) -> str:
    """Return the normalized name of the package that is required."""
    name = re.split(r"[\s<>=!~\[;(]", requirement.strip())[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def clauses_of(requirement: str) -> list[str]:
    """Return the conditions on the version, such as `>=1` and `<2`; none if any will do."""
    versions = re.search(r"[<>=!~][^;)]*", requirement)
    return versions.group().replace(" ", "").split(",") if versions else []


def export_predecessor(repository: Path, folder: Path) -> str:
    """Write the predecessor's package without history; return the commit."""
    git = ["git", "-C", str(repository)]
    revision = subprocess.run([*git, "rev-parse", "HEAD"], stdout=subprocess.PIPE, check=True)
    archive_command = [*git, "archive", "HEAD", "cramming", "LICENSE.MD"]
    packed = subprocess.run(archive_command, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return revision.stdout.decode().strip()


def copy_tasks(folder: Path, glue: Path) -> None:
    """Copy training and development sets."""
    for task in TASKS:
        (folder / task).mkdir(parents=True)
        for name in ("train.tsv", "dev.tsv"):
            shutil.copyfile(glue / task / name, folder / task / name)


def prepare_corpus(folder: Path, text: Sequence[str], documents: int, vocabulary: int) -> None:
    """Prepare the corpus by the verb that users call."""
    paths = json.dumps([str(Path(pattern).absolute()) for pattern in text])
    settings = [
        "data=text",
        f"data.paths={paths}",
        "data.documents=block",
        f"data.max_documents={documents}",
        "data.orders=[]",
        f"data.corpus={folder.resolve()}",
        f"tokenizer.vocab_size={vocabulary}",
    ]
    subprocess.run([sys.executable, "-m", "cramming", "prepare", *settings], check=True, cwd=ROOT)


def sizes_of_parts(bundle: Path) -> dict[str, int]:
    """Return the bytes of each file and folder at the top of the bundle."""
    sizes = {}
    for part in sorted(bundle.iterdir()):
        files = part.rglob("*") if part.is_dir() else [part]
        sizes[part.name] = sum(file.stat().st_size for file in files if file.is_file())
    return sizes


def tree_bytes() -> int:
    """Return the size of the files of this checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def report(bundle: Path, content: dict[str, Any]) -> None:
    """Print the sizes; refuse a bundle that does not fit beside the tree."""
    sizes = {**content["sizes_bytes"], "tree": tree_bytes()}
    parts = [f"{name} {size / 2**20:.1f}" for name, size in sizes.items() if size > 2**16]
    total = sum(sizes.values())
    summary = f"{total / 2**20:.1f} of {LIMIT_BYTES / 2**20:.0f} MiB ({', '.join(parts)})"
    if total > LIMIT_BYTES:
        raise SystemExit(f"--out={bundle}: too large, {summary}. Lower --documents.")
    print(f"{bundle}: {summary}, for Python {content['python']}")


if __name__ == "__main__":
    main()

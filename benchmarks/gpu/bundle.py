"""Everything that a machine with a GPU and no network lacks, in one folder: packages, a corpus and three GLUE tasks.

    python benchmarks/gpu/bundle.py --out build/bundle --python 3.12 --text 'wiki/*.txt.xz' --glue <GLUE folder>

    wheels/      what the stages import beside torch, transformers, NumPy, SciPy, scikit-learn and Triton, for
                 `--python` on Linux x86_64
    corpus/      about 18M tokens of the text, prepared here by `cramming prepare`, with a vocabulary of 32,768
    glue/        RTE, MRPC and CoLA
    bundle.json  the requirement that each wheel meets: one that the other machine meets itself is not unpacked there

pip needs a network here. The folder tells git to ignore it, and is refused above 60 MiB. Left out, because no stage
imports it: datasets and evaluate (they need pyarrow, 46 MiB; for hub data sets, parquet files and the Hugging Face form
of the metrics), matplotlib (plots) and zstandard (.zst archives). SciPy and scikit-learn (44 MiB) are needed and would
not fit: run.py says so where they are missing.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 60 * 2**20
TASKS = ("RTE", "MRPC", "CoLA")
# By name where pyproject.toml says which version. The others are what these need and a bare torch does not bring.
WANTED = ("hydra-core", "omegaconf", "rich", "psutil", "accelerate", "torchao", "pytest")
NEEDED_BY_THEM = ("markdown-it-py", "mdurl", "pygments", "iniconfig", "pluggy")
SOURCES = ("antlr4-python3-runtime==4.9.3",)  # omegaconf's; on the index as source only
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17)  # of manylinux; the newest first


def requirements() -> list[str]:
    """With the versions that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    known = {re.split(r"[<>=!~\[; ]", text)[0]: text for text in listed}
    return [*(known[name] for name in WANTED), *NEEDED_BY_THEM]


def fetch_wheels(folder: Path, python: str) -> dict[str, str]:
    """Download or build them: the wheel's file name, and the requirement that it meets."""
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    platforms = [word for n in GLIBC for word in ("--platform", f"manylinux_2_{n}_x86_64")]
    target = [
        "--python-version",
        python,
        "--implementation",
        "cp",
        "--only-binary=:all:",
        *platforms,
        "--platform",
        "manylinux2014_x86_64",
    ]
    found: dict[str, str] = {}
    for command, wanted in (("download", requirements()), ("wheel", SOURCES)):
        options = [*target, "-d"] if command == "download" else ["-w"]
        subprocess.run([*pip, command, "--no-deps", *options, folder, *wanted], check=True)
    for requirement in (*requirements(), *SOURCES):
        name = re.sub(r"[-_.]+", "_", re.split(r"[<>=!~\[; ]", requirement)[0])
        (wheel,) = (
            path.name
            for path in folder.glob("*.whl")
            if path.name.lower().startswith(f"{name.lower()}-")
        )
        found[wheel] = requirement
    return found


def prepare_corpus(folder: Path, text: Sequence[str], documents: int, vocabulary: int) -> None:
    """By the verb, as everybody does it."""
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


def copy_tasks(folder: Path, glue: Path) -> None:
    """Training and development sets."""
    for task in TASKS:
        (folder / task).mkdir(parents=True)
        for name in ("train.tsv", "dev.tsv"):
            shutil.copyfile(glue / task / name, folder / task / name)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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
        "--documents", type=int, default=5800, help="so many (18M tokens of Wikipedia's articles)"
    )
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument(
        "--glue", type=Path, required=True, help="folder with RTE/, MRPC/ and CoLA/"
    )
    args = parser.parse_args(arguments)
    if args.out.exists():
        raise SystemExit(f"bundle: {args.out} is there already; remove it or name another")
    args.out.mkdir(parents=True)
    (args.out / ".gitignore").write_text("*\n", encoding="utf-8")
    wheels = fetch_wheels(args.out / "wheels", args.python)
    (args.out / "bundle.json").write_text(json.dumps({"wheels": wheels}, indent=1) + "\n")
    copy_tasks(args.out / "glue", args.glue)
    prepare_corpus(args.out / "corpus", args.text, args.documents, args.vocabulary)
    sizes = {part: size_of(args.out / part) for part in ("wheels", "corpus", "glue")}
    text = ", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in sizes.items())
    if sum(sizes.values()) > LIMIT_BYTES:
        raise SystemExit(
            f"bundle: {args.out} is above {LIMIT_BYTES / 2**20:.0f} MiB ({text}); lower --documents"
        )
    print(f"{args.out}: {text}; {len(wheels)} wheels for Python {args.python}")


if __name__ == "__main__":
    main()

"""Where the output goes may end or be full: the exit code and one line say whether the work was done."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m cramming pretrain --show-config | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_closed_output_is_not_an_error() -> None:
    """Some daemons start programs this way."""
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m cramming --help >&-"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_work_that_a_closed_pipe_ends_is_not_taken_for_done(tmp_path: Path) -> None:
    shell = f"set -o pipefail; {sys.executable} -m cramming prepare data.corpus={tmp_path}/c | true"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr.count("\n") == 1 and "nobody reads the output any more" in done.stderr


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "cramming", "prepare", f"data.corpus={tmp_path}/c"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "standard output: No space left" in done.stderr
    )


def test_what_is_not_in_the_encoding_of_the_output_is_escaped(tmp_path: Path) -> None:
    """Texts, and names that are no text at all; the folder with such a name is one as any other."""
    (tmp_path / "a.txt").write_text(
        "\n\n".join(f"Ωμέγα {number} " + "word " * number for number in range(60))
    )
    folder = os.fsdecode(b"caf\xe9")

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "cramming", *words]
        settings = {**os.environ, "PYTHONIOENCODING": "latin-1"}
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="latin-1",
            cwd=tmp_path,
            env=settings,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    made = f"data.corpus={folder}"
    said("prepare", "data=text", "data.paths=[a.txt]", "tokenizer.vocab_size=300", made)
    assert r"\u03c9\u03bc" in said("inspect", folder, "--documents", "1")

"""Archives of runs: what is packed, the same bytes each time, and what strangers put into them."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.manifest import MANIFEST
from eval import submit
from eval.archive import LIST, SUFFIX, changed_since, opened, pack, unpack
from eval.rules.evidence import predicted
from eval.rules.load import load_run, load_runs
from tests.eval.rules.forge import forge
from tests.eval.rules.test_forgeries import within, without

Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def copied(honest_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_run, tmp_path / "runs" / "honest"))


def test_the_archive_holds_log_predictions_and_manifest(
    copied: Path, compose: Compose, tmp_path: Path
) -> None:
    out = tmp_path / f"a{SUFFIX}"
    address = "https://example.org/weights"
    submit.main(path=copied, out=out, weights_url=address)
    with opened(out) as folder:
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
        listed = json.loads((folder / LIST).read_text())
    assert {"run.jsonl", MANIFEST, LIST} <= names
    assert len([name for name in names if name.startswith("predictions/")]) == 24
    assert set(listed["outside"]) >= {"final/model.safetensors", "final/tokenizer.json"}
    assert any(name.startswith("checkpoints/") for name in listed["outside"])
    assert listed["weights"] == address


def test_the_same_run_gives_the_same_bytes(copied: Path, tmp_path: Path) -> None:
    archives = [tmp_path / f"{name}{SUFFIX}" for name in "ab"]
    for archive in archives:
        pack(copied, archive)
        (copied / "record.json").write_text("what is derived does not count")
    assert archives[0].read_bytes() == archives[1].read_bytes()


def test_a_report_lists_archives_beside_folders(copied: Path) -> None:
    pack(copied, copied.parent / f"other{SUFFIX}")
    runs = load_runs(copied.parent)
    assert [run.problem for run in runs] == [None, None]
    assert len({run.label for run in runs}) == 2


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without("finetuned", slice(-1, None)), "not finished"),
        (without("exported"), "not finished"),
        (within("rules_version", "6"), "R1"),
    ],
)
def test_a_run_that_is_invalid_or_unfinished_is_refused(
    change: Callable[..., object], rule: str, copied: Path, compose: Compose
) -> None:
    forge(copied, change)
    with pytest.raises(UserError, match=rule):
        submit.main(path=copied, out=None, weights_url=None)
    assert not list(copied.glob(f"*{SUFFIX}"))


def test_each_changed_file_is_named(copied: Path, tmp_path: Path) -> None:
    archive = tmp_path / f"a{SUFFIX}"
    pack(copied, archive)
    folder = unpack(archive, tmp_path / "unpacked")
    assert changed_since(folder) == []
    prediction = next((folder / "predictions").iterdir())
    prediction.unlink()
    (folder / "run.jsonl").write_bytes(b"")
    named = "\n".join(changed_since(folder))
    assert prediction.name in named and "run.jsonl" in named


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1}', '{"format": 2, "files": {}}', "[" * 10_000],
)
def test_a_list_that_was_not_written_so_is_refused(text: str, copied: Path) -> None:
    (copied / LIST).write_text(text)
    assert LIST in str(load_run(copied).problem)


def archived(place: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    archive = place / f"x{SUFFIX}"
    with zipfile.ZipFile(archive, "w", method) as bundle:
        for name, content in files.items():
            bundle.writestr(name, content)
    return archive


@pytest.mark.parametrize(
    "files",
    [
        {"../x/run.jsonl": b"", "../x/files.json": b""},
        {"x/run.jsonl": b"", "x/files.json": b"", "x/../../y": b""},
        {"x/run.jsonl": b"", "x/files.json": b"", "x/.hidden": b""},
        {"x/run.jsonl": b"", "x/files.json": b"", "y/run.jsonl": b""},
        {"x/run.jsonl": b""},
        {"x/record.json": b"{}", "x/files.json": b"{}", "x/budget.jsonl": b""},
        {"x/run.jsonl": bytes(5001), "x/files.json": b""},
        {},
    ],
)
def test_an_archive_that_no_run_makes_is_refused_in_one_line(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.archive.MAX_BYTES", 5000)
    archive = archived(tmp_path, files)
    with pytest.raises(UserError) as caught:
        unpack(archive, tmp_path / "unpacked")
    assert "\n" not in str(caught.value) and str(archive) in str(caught.value)
    assert not (tmp_path / "y").exists()
    assert load_runs(tmp_path)[0].problem


def array_of(shape: str, content: bytes = b"") -> bytes:
    """A .npy file whose header claims a shape."""
    claim = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({shape},), }}"
    header = claim.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "method"),
    [
        (array_of(str(10**15)), zipfile.ZIP_DEFLATED),
        (array_of("4", b"x" * 8), zipfile.ZIP_DEFLATED),
        (array_of("9**9**9**9"), zipfile.ZIP_DEFLATED),
        (array_of(str(2**22), bytes(2**25)), zipfile.ZIP_DEFLATED),
        (array_of("4", bytes(32)), zipfile.ZIP_BZIP2),
        (saved(np.array(["text"])), zipfile.ZIP_DEFLATED),
        (b"", zipfile.ZIP_DEFLATED),
    ],
    ids=["petabyte", "short", "expression", "bomb", "bzip2", "text", "empty"],
)
def test_predictions_of_strangers_are_read_with_care(
    content: bytes, method: int, tmp_path: Path
) -> None:
    file = archived(tmp_path, {"dev.cola.npy": content}, method)
    with pytest.raises(ValueError, match="no predictions"):
        predicted(file, "dev.cola")

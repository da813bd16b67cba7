"""The GLUE server's zip: ours is accepted by our validator, and planted mistakes are each named."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.data.task_files import GLUE, ExampleFile
from cramming.record_schema import Scores, read
from eval.report import submission
from eval.report.submission import FILES, archive, collect, to_tsv, validate


@pytest.fixture(autouse=True)
def small_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten examples per test set instead of up to 390,965."""
    small = {name: (task, ExampleFile(**{**source.__dict__, "examples": 10})) for name, (task, source) in FILES.items()}
    monkeypatch.setattr(submission, "FILES", small)


def _predictions() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.uniform(-1, 6, 10) if task.regression else rng.integers(0, len(task.labels), 10).astype(float)
        for name, (task, _) in FILES.items()
    }


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(name, content)
    return buffer.getvalue()


def _good_files() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive(_predictions()))) as bundle:
        return {name: bundle.read(name) for name in bundle.namelist()}


def test_the_servers_names_and_words() -> None:
    names = "AX CoLA MNLI-m MNLI-mm MRPC QNLI QQP RTE SST-2 STS-B WNLI"
    assert sorted(FILES) == sorted(f"{name}.tsv" for name in names.split())
    files = {name: content.decode() for name, content in _good_files().items()}
    assert all(text.startswith("index\tprediction\n0\t") for text in files.values())
    words = {name: {line.split("\t")[1] for line in text.splitlines()[1:]} for name, text in files.items()}
    three = {"entailment", "neutral", "contradiction"}
    assert all(words[f"{name}.tsv"] <= three for name in ("MNLI-m", "MNLI-mm", "AX"))
    assert all(words[f"{name}.tsv"] <= {"entailment", "not_entailment"} for name in ("QNLI", "RTE"))
    assert all(words[f"{name}.tsv"] <= {"0", "1"} for name in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI"))


def test_scores_are_clipped_and_have_three_decimals() -> None:
    text = to_tsv("STS-B.tsv", [-1.0, 5.4, 2.34567, *[0.0] * 7])
    assert text.splitlines()[1:4] == ["0\t0.000", "1\t5.000", "2\t2.346"]


def test_validator_accepts_ours_and_the_zip_is_reproducible() -> None:
    assert validate(archive(_predictions())) == []
    assert archive(_predictions()) == archive(_predictions())


def _replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return change


MISTAKES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "missing file": ("WNLI.tsv", None, "WNLI.tsv: 0 times"),
    "no header": ("RTE.tsv", _replace(b"index\tprediction\n", b""), "RTE.tsv:1: the header"),
    "wrong header": ("RTE.tsv", _replace(b"index\tprediction", b"id\tlabel"), "RTE.tsv:1: the header"),
    "spaces for tab": ("SST-2.tsv", _replace(b"3\t", b"3 "), "SST-2.tsv:5: '3 "),
    "too few rows": ("CoLA.tsv", lambda c: c[: c.rindex(b"9\t")], "CoLA.tsv: 9 predictions for 10"),
    "too many rows": ("CoLA.tsv", lambda c: c + b"10\t1\n", "CoLA.tsv: 11 predictions for 10"),
    "numbers for words": ("QNLI.tsv", _replace(b"entailment", b"1"), "QNLI.tsv:"),
    "words for numbers": ("MRPC.tsv", lambda c: c[:-2] + b"entailment\n", "MRPC.tsv:11: "),
    "wrong word": ("AX.tsv", lambda c: c[: c.rindex(b"\t") + 1] + b"not_entailment\n", "AX.tsv:11: "),
    "shuffled index": ("QQP.tsv", lambda c: c.replace(b"\n4\t", b"\n5\t", 1), "QQP.tsv:6: '5"),
    "score out of range": ("STS-B.tsv", lambda c: c[: c.rindex(b"\t") + 1] + b"5.5\n", "STS-B.tsv:11: "),
    "score is not a number": ("STS-B.tsv", lambda c: c[: c.rindex(b"\t") + 1] + b"nan\n", "STS-B.tsv:11: "),
    "not UTF-8": ("MNLI-m.tsv", lambda c: b"\xff\xfe" + c, "MNLI-m.tsv:1: the header"),
    "Windows line ends": ("MNLI-mm.tsv", lambda c: c.replace(b"\n", b"\r\n"), "MNLI-mm.tsv:1: the header"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_validator_names_planted_mistakes(mistake: str) -> None:
    name, change, message = MISTAKES[mistake]
    files = _good_files()
    content = files.pop(name)
    if change:
        files[name] = change(content)
    problems = validate(_zip(files))
    assert len(problems) == 1 and problems[0].startswith(message), problems


def test_validator_names_other_files_and_broken_zips() -> None:
    inside = _zip({f"glue/{name}": content for name, content in _good_files().items()})
    assert len(validate(inside)) == 2 * len(FILES)
    whole = archive(_predictions())
    encrypted, damaged = bytearray(whole), bytearray(whole)
    encrypted[whole.rindex(b"PK\x01\x02") + 8] |= 1  # a flag of the last file in the directory
    place = whole.index(b"CoLA.tsv") + len("CoLA.tsv") + 2
    damaged[place : place + 8] = b"\xff" * 8
    for content in (b"", whole[:100], bytes(encrypted), bytes(damaged)):
        assert "not a readable zip" in validate(content)[0]


def test_bad_predictions_are_named() -> None:
    for values in ([0.0] * 9, [float("nan")] + [0.0] * 9, [2.0] + [0.0] * 9, [0.5] + [0.0] * 9):
        for name in ("CoLA.tsv", "STS-B.tsv"):
            found = validate(archive(_predictions() | {name: np.array(values)}))
            odd = name == "CoLA.tsv" or len(values) < 10 or np.isnan(values[0])
            assert [problem.split(":")[0] for problem in found] == [name] * int(odd)


def _store(folder: Path, predictions: dict[str, np.ndarray], **changed: Any) -> None:
    """As eval.finetune.store leaves them: one file per task and seed, several test sets in MNLI's."""
    (folder / "predictions").mkdir()
    (folder / "pieces").mkdir()
    by_task: dict[str, dict[str, Any]] = {}
    for name, (task, source) in FILES.items():
        arrays = by_task.setdefault(task.name, {})
        arrays[f"test.{source.entry}"] = predictions[name]
        arrays[f"test_ids.{source.entry}"] = np.arange(10)
    for task_name, arrays in by_task.items():
        path = folder / "predictions" / f"{task_name}-seed3.npz"
        np.savez_compressed(path, **{**arrays, **changed.get(task_name, {})})
    for task in GLUE.values():
        metrics = {source.entry: {"metrics": dict.fromkeys(task.metrics, 0.5)} for source in task.scored}
        (folder / "pieces" / f"{task.name}-seed3.json").write_text(json.dumps({"entries": metrics}))


def _section(*left_out: str) -> dict[str, Any]:
    """What the record has of it, without some tasks."""
    per_seed = {"per_seed": [0.4, 0.5]}
    found = {
        source.entry: {"metrics": dict.fromkeys(task.metrics, per_seed)}
        for task in GLUE.values() if task.name not in left_out for source in task.scored
    }  # fmt: skip
    return {"seeds": [1, 3], "tasks": found}


def test_collects_what_fine_tuning_left_and_says_what_is_missing(tmp_path: Path) -> None:
    for name in ("whole", "damaged"):
        (tmp_path / name).mkdir()
    predictions, section = _predictions(), read(Scores, _section())
    _store(tmp_path / "whole", predictions)
    found, missing = collect(tmp_path / "whole", section, 3)
    assert missing == {} and archive(found) == archive(predictions)
    folder = tmp_path / "damaged"
    _store(folder, predictions, sst2={"test.sst2": np.zeros(9)}, rte={"test_ids.rte": np.arange(10)[::-1]})
    (folder / "predictions/wnli-seed3.npz").unlink()
    (folder / "predictions/qqp-seed3.npz").write_bytes(b"torn")
    _, missing = collect(folder, section, 3)
    assert list(missing) == ["SST-2.tsv", "QQP.tsv", "RTE.tsv", "WNLI.tsv"]
    assert "9 of 10" in missing["SST-2.tsv"] and "order" in missing["RTE.tsv"]
    assert "not fine-tuned" in missing["WNLI.tsv"]


def test_damaged_predictions_are_missing_wherever_the_damage_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte can make it an encrypted file, one of an unknown method, a text without an end, or no zip at all."""
    monkeypatch.setattr(submission, "FILES", {"RTE.tsv": submission.FILES["RTE.tsv"]})
    predictions = _predictions()
    _store(tmp_path, predictions)
    path = tmp_path / "predictions/rte-seed3.npz"
    whole = path.read_bytes()
    torn = [whole[:size] for size in (0, 1, 100, len(whole) - 1)]
    flipped = [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    reasons = set()
    for content in torn + flipped:
        path.write_bytes(content)
        found, missing = collect(tmp_path, read(Scores, _section()), 3)
        reasons.add(missing.get("RTE.tsv"))
        assert "RTE.tsv" in missing or np.array_equal(found["RTE.tsv"], predictions["RTE.tsv"])
    assert "the stored predictions are damaged" in reasons


def test_takes_only_what_the_recorded_scores_are_made_of(tmp_path: Path) -> None:
    """The folder also keeps tasks that an earlier call scored, and a later, unfinished one has replaced."""
    _store(tmp_path, _predictions())
    piece = tmp_path / "pieces/rte-seed3.json"
    piece.write_text(piece.read_text().replace("0.5", "0.4"))
    (tmp_path / "pieces/cola-seed3.json").unlink()
    found, missing = collect(tmp_path, read(Scores, _section("mnli")), 3)
    assert set(missing) == {"CoLA.tsv", "RTE.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"} and len(found) == 6
    assert set(missing.values()) == {"not of the scores on record"}
    assert collect(tmp_path, read(Scores, _section()), 1)[0] == {}

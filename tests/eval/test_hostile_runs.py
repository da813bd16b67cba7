"""Run folders that are made to stop whoever reads them: each is listed, with what is wrong, and hides no other run."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cramming.config import file_sha256
from eval.archive import SUFFIX, pack
from eval.report.main import main
from eval.rules import load
from eval.rules.evidence import predicted

CLAIM = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s,), }"


def array_of(shape: str, content: bytes = b"") -> bytes:
    """A .npy file whose header claims a shape."""
    header = (CLAIM % shape).ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def zipped(content: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """As each set's predictions of CoLA."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as arrays:
        for name in ("dev.cola", "test.cola"):
            arrays.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def torn(content: bytes) -> bytes:
    """What was packed can no longer be unpacked."""
    first, *members = content.split(b"PK\x03\x04")
    return b"PK\x03\x04".join(
        [first, *(member[:60] + b"\xff" * 20 + member[80:] for member in members)]
    )


PREDICTIONS = {
    "no-archive": b"PK",
    "claims-a-petabyte": zipped(array_of(str(10**15))),
    "claims-what-is-not-there": zipped(array_of("4", b"x" * 8)),
    "claims-an-expression": zipped(array_of("9**9**9**9")),
    "bomb": zipped(array_of(str(2**24), bytes(2**27))),
    "bomb-of-bz2": zipped(array_of(str(2**24), bytes(2**27)), zipfile.ZIP_BZIP2),
    "of-no-axis": zipped(saved(np.float64(1))),
    "of-two-axes": zipped(saved(np.zeros((1043, 2)))),
    "of-objects": zipped(saved(np.array([None]))),
    "of-words": zipped(saved(np.array(["1"]))),
    "torn": torn(zipped(saved(np.random.default_rng(0).normal(size=1043)))),
}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def in_json(name: str, key: str, value: str) -> Callable[[Path], object]:
    """A key more in the (last line of the) file, in JSON's own words."""

    def change(run: Path) -> None:
        text = (run / name).read_text().rstrip()
        (run / name).write_text(f'{text[:-1]}, "{key}": {value}}}\n')

    return change


def aliases(run: Path) -> None:
    """A few lines that are 10^12 words to whoever looks at each."""
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for one, before in zip("bcdefghijkl", "abcdefghijk"):
        text += f"{one}: &{one} [{', '.join([f'*{before}'] * 10)}]\n"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    del settings["seed"]
    (run / "config.yaml").write_text(f"{yaml.safe_dump(settings)}{text}seed: *l\n")


# What is done to a folder, and what is said of it.
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nested-50": (in_json("record.json", "more", nested(50)), ""),
    **{
        f"nested-{n}": (in_json("record.json", "more", nested(n)), "nested deeper")
        for n in (200, 500)
    },
    **{
        f"nested-{n}": (in_json("record.json", "more", nested(n)), "") for n in (930, 950, 970)
    },  # for some reader
    "metrics-nested": (in_json("metrics.jsonl", "more", nested(500)), ""),
    "half-a-pair": (in_json("record.json", "name", r'"\ud800x"'), ""),
    "control": (in_json("record.json", "name", r'"\u0000\u001b[2J\u202e"'), ""),
    "aliases": (aliases, "this or record.json is not as the suite writes it"),
}


def piece(run: Path) -> None:
    """That R27 compares the predictions of CoLA with."""
    place = run / "glue" / "pretrained" / "pieces"
    place.mkdir()
    sha256 = file_sha256(run / "glue" / "pretrained" / "predictions" / "cola-seed0.npz")
    values = json.loads((run / "record.json").read_text())["glue"]["pretrained"]["tasks"]["cola"][
        "metrics"
    ]
    metrics = {name: found["per_seed"][0] for name, found in values.items()}
    found = {
        "entries": {"cola": {"metrics": metrics}},
        "train_loss": 0.5,
        "predictions_sha256": sha256,
        "epoch": 5,
    }
    (place / "cola-seed0.json").write_text(json.dumps({**found, "key": ""}))


def leaderboard(runs: Path) -> str:
    main(
        {
            "runs": str(runs),
            "report": {"out": None, "each_run": True, "ledger": "no duels", "repository": None},
        }
    )
    return (runs / "report" / "leaderboard.md").read_text(encoding="utf-8")


def test_no_hostile_run_hides_another(tmp_path: Path, make_record: Any, write_run: Any) -> None:
    """Neither by its files nor by its name, which may be no text at all."""
    write_run(tmp_path / "good", make_record() | {"name": "good"})
    hostile = {
        "division_requested": "open"
    }  # so that none is another seed of the good one's recipe
    for name, content in PREDICTIONS.items():
        piece(write_run(tmp_path / name, make_record() | hostile | {"name": name}, content))
    for name, (change, _) in FOLDERS.items():
        change(write_run(tmp_path / name, make_record() | hostile | {"name": name}))
    write_run(
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), make_record() | hostile | {"name": ""}
    )
    (tables, _, _) = leaderboard(tmp_path).partition("## Reference")
    runs = {run.folder.name: run for run in load.load_runs(tmp_path)}
    assert len(runs) == 2 + len(PREDICTIONS) + len(FOLDERS) and "| 1 | good<br>" in tables
    for name, run in runs.items():
        assert run.label.isprintable() and f"| {run.label}" in tables, name
        evidence = (
            run.problem
            or {finding.rule: finding.evidence for finding in run.verdict.findings}["R27"]
        )
        assert (
            "no predictions" if name in PREDICTIONS else FOLDERS.get(name, ("", ""))[1]
        ) in evidence, name


def test_what_no_reader_foresaw_is_listed_too(
    tmp_path: Path, make_record: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: Any) -> None:
        if record.name == "bad":
            raise MemoryError

    monkeypatch.setattr(
        load, "judge", lambda record, judge=load.judge: fail(record) or judge(record)
    )
    for name in ("good", "bad"):
        write_run(tmp_path / name, make_record() | {"name": name})
    text = leaderboard(tmp_path)
    assert (
        "| good<br>" in text and "| bad | " in text and "cannot be judged (MemoryError: )" in text
    )


def test_what_no_reader_of_archives_foresaw_is_listed_too(
    tmp_path: Path, make_record: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> list[str]:
        raise OverflowError(folder.name)

    pack(write_run(tmp_path / "good", make_record() | {"name": "good"}), tmp_path / f"bad{SUFFIX}")
    monkeypatch.setattr(load, "altered_since", fail)
    text = leaderboard(tmp_path)
    assert (
        "| good<br>" in text
        and f"| bad{SUFFIX} | " in text
        and "cannot be judged (OverflowError: good)" in text
    )


def test_what_an_initialisation_is_called_does_not_reach_the_terminal_raw(
    tmp_path: Path,
    make_record: Any,
    write_run: Any,
    make_section: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = make_record()
    record["glue"]["\x1b[2J\u202e::error::"] = make_section("random")
    write_run(tmp_path / "a", record)
    leaderboard(tmp_path)
    said = capsys.readouterr().out
    assert "[2J" in said and all(line.isprintable() for line in said.splitlines())


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_are_numbers_or_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "cola-seed0.npz").write_bytes(PREDICTIONS[name])
    with pytest.raises(ValueError, match=r"cola-seed0\.npz: no predictions"):
        predicted(tmp_path / "cola-seed0.npz", "dev.cola")


@pytest.mark.parametrize(
    ("place", "value", "wanted"),
    [
        ("gate", 5, "record.json: pretrain.gate is 5, not a section"),
        ("train_loss", "low", "record.json: pretrain.train_loss is 'low', not a finite number"),
        ("exaflops", None, "config.yaml: this or record.json is not as the suite writes it"),
    ],
)
def test_what_is_wrong_in_the_record_is_not_blamed_on_another_file_alone(
    tmp_path: Path, make_record: Any, write_run: Any, place: str, value: Any, wanted: str
) -> None:
    record = make_record()
    record["pretrain"][place] = value
    run = write_run(tmp_path / "a", record)
    found = load.load_run(run).record.contradictions or []
    assert any(problem.startswith(wanted) for problem in found), found
    assert not [problem for problem in found if "Error" in problem and "record.json" not in problem]


def test_a_gate_without_a_value_is_none(tmp_path: Path, make_record: Any, write_run: Any) -> None:
    """As of runs from before there was one."""
    record = make_record()
    record["pretrain"]["gate"] = None
    assert load.load_run(write_run(tmp_path / "a", record)).record.contradictions == []

"""`cramming verify`: a finished run is in order, an unfinished one is told from a broken one, every change is named."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cramming.config import UserError
from cramming.model.heads import MaskedLM
from cramming.model.load import load_masked_lm
from eval import recompute, verify
from eval.archive import SUFFIX, pack
from eval.report.table import rows_of
from eval.rules.load import load_runs
from eval.verify import Inputs, Verification, verify_run
from tests.eval.rules.forge import forge, of_kind, read_events, write_events
from tests.eval.rules.test_forgeries import without

Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def copied(honest_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_run, tmp_path / "runs" / "honest"))


@pytest.fixture
def log_alone(inputs: Inputs) -> Inputs:
    """A verifier without tasks and corpus, who reads the folder alone."""
    return replace(inputs, make_tasks=lambda *_: False, corpus=Path("nowhere"))


def test_a_finished_run_is_in_order(honest_run: Path, inputs: Inputs) -> None:
    result = verify_run(honest_run, inputs)
    assert result.in_order and result.division == "closed", (result.problems, result.findings)
    assert any(line.startswith("weights: verified") for line in result.checked)
    assert any("27 values" in line or "values computed again" in line for line in result.checked)


def test_a_fine_tuning_done_again_gives_the_same(honest_run: Path, inputs: Inputs) -> None:
    for seed in range(3):
        draw = random.Random(seed)
        result = verify_run(honest_run, replace(inputs, refinetune=True, draw=draw))
        assert result.in_order, result.problems
        assert any("prediction by prediction" in line for line in result.checked)


def test_weights_that_give_no_number_are_named(
    honest_run: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nan(folder: Path) -> MaskedLM:
        model = load_masked_lm(folder)
        torch.nn.utils.vector_to_parameters(
            torch.full((sum(each.numel() for each in model.parameters()),), math.nan),
            model.parameters(),
        )
        return model

    monkeypatch.setattr(recompute, "load_masked_lm", load_nan)
    result = verify_run(honest_run, inputs)
    assert any("validation loss nan computed again" in problem for problem in result.problems)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([0, 1, 1], []),
        ([0, 0, 1], ["1 of 3 predictions of rte differ"]),
        ([0, 1], ["2 predictions of rte, not 3"]),
    ],
)
def test_other_predictions_are_named(stored: list[int], message: list[str]) -> None:
    repeated = np.array([0, 1, 1])
    assert recompute.differing_predictions("rte", np.array(stored), repeated) == message


def test_an_archive_is_in_order(
    copied: Path,
    tmp_path: Path,
    compose: Compose,
    capsys: pytest.CaptureFixture[str],
    inputs: Inputs,
) -> None:
    """Without the weights it is of the open division, with their address of the closed."""
    archive = tmp_path / f"honest{SUFFIX}"
    for address, division in ((None, "open"), ("https://example.org/weights", "closed")):
        pack(copied, archive, weights=address)
        verify.main(
            path=archive,
            json=True,
            tasks=None,
            corpus=None,
            weights=None,
            refinetune=False,
            overlap_seconds=60.0,
            make_tasks=inputs.make_tasks,
            search=inputs.search,
        )
        summary = json.loads(capsys.readouterr().out)
        assert summary["in_order"] and summary["division"] == division, summary


@pytest.mark.parametrize("option", ["tasks", "weights"])
def test_a_folder_that_is_not_there_is_no_fault_of_the_run(
    copied: Path, tmp_path: Path, inputs: Inputs, option: str
) -> None:
    folders: dict[str, Path | None] = {"tasks": None, "weights": None, option: tmp_path / "typo"}
    with pytest.raises(UserError, match=f"^--{option}=.*typo: no such folder"):
        verify.main(
            path=copied,
            json=False,
            corpus=None,
            refinetune=False,
            overlap_seconds=60.0,
            make_tasks=inputs.make_tasks,
            search=inputs.search,
            **folders,
        )


def test_weights_given_apart_are_verified(copied: Path, tmp_path: Path, inputs: Inputs) -> None:
    weights = shutil.move(copied / "final", tmp_path / "weights")
    result = verify_run(copied, replace(inputs, weights=Path(weights)))
    assert not result.problems
    assert any(line.startswith("weights: verified") for line in result.checked)


UNFINISHED: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "in progress": lambda events: events.__delitem__(slice(60, None)),
    "stopped": lambda events: (
        events.__delitem__(slice(events.index(of_kind(events, "end")[0]) + 1, None)),
        of_kind(events, "end")[0].update(reason="stopped"),
    ),
    "diverged": lambda events: (
        events.__delitem__(slice(events.index(of_kind(events, "end")[0]) + 1, None)),
        of_kind(events, "end")[0].update(reason="diverged"),
    ),
    "not scored": lambda events: (without("scoring")(events), without("finetuned")(events)),
    "half scored": without("finetuned", slice(10, None)),
}


@pytest.mark.parametrize("how", UNFINISHED)
def test_what_is_not_finished_has_an_exit_code_of_its_own(
    how: str, copied: Path, compose: Compose, log_alone: Inputs
) -> None:
    for name in ("predictions", "final", "checkpoints"):
        shutil.rmtree(copied / name)
    forge(copied, UNFINISHED[how])
    result = verify_run(copied, log_alone)
    assert result.is_unfinished and result.exit_code == 3, (result.problems, result.findings)
    assert rows_ranked(copied.parent) == 0


def rows_ranked(runs: Path) -> int:
    return sum(row.competes for row in rows_of(load_runs(runs)))


def test_a_record_that_verify_refuses_is_not_ranked(copied: Path, log_alone: Inputs) -> None:
    events = read_events(copied)
    of_kind(events, "steps")[3]["tokens"] += 1
    write_events(copied, events)
    assert verify_run(copied, log_alone).exit_code == 1
    assert rows_ranked(copied.parent) == 0


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    paths: list[tuple[Any, ...]] = []
    for key, value in items:
        if isinstance(value, dict | list) and value:
            paths += leaves(value, (*path, key))
        else:
            paths.append((*path, key))
    return paths


def other_value(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + draw.choice([1, -1, 7])
    if isinstance(value, str):
        return f"{value[:-1]}{'0' if value[-1:] != '0' else '1'}"
    return [1]


def change_leaf(lines: list[bytes], number: int, draw: random.Random) -> None:
    event = json.loads(lines[number])
    *sections, name = draw.choice(leaves(event))
    node = event
    for section in sections:
        node = node[section]
    node[name] = other_value(node[name], draw)
    lines[number] = json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()


def change_log(run: Path, draw: random.Random) -> str:
    """Change, delete, copy or move a line; returns what must be named."""
    path = run / "run.jsonl"
    lines = path.read_bytes().splitlines()
    number = draw.randrange(len(lines))
    how = draw.choice(["leaf", "leaf", "leaf", "delete", "swap", "copy"])
    if how == "leaf":
        change_leaf(lines, number, draw)
    elif how == "delete":
        del lines[number]
    elif how == "copy":
        lines.insert(draw.randrange(len(lines)), lines[number])
    else:
        other = draw.choice([index for index in range(len(lines)) if index != number])
        lines[number], lines[other] = lines[other], lines[number]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return "run.jsonl"


def change_file(run: Path, draw: random.Random) -> str:
    """Change a byte of a file, cut it, remove it or exchange it for another; returns its name."""
    folder = run / draw.choice(["predictions", "final"])
    files = sorted(folder.iterdir())
    file = draw.choice(files)
    content = file.read_bytes()
    how = draw.choice(["byte", "cut", "remove", "exchange"])
    if how == "remove":
        file.unlink()
    elif how == "exchange":
        others = [other for other in files if other.read_bytes() != content]
        file.write_bytes(draw.choice(others).read_bytes())
    else:
        place = draw.randrange(len(content))
        changed = bytes([content[place] ^ (1 << draw.randrange(8))])
        rest = content[place + 1 :] if how == "byte" else b""
        file.write_bytes(content[:place] + changed + rest)
    return f"{folder.name}/{file.name}"


def named(result: Verification) -> str:
    return "\n".join(result.problems)


def assert_every_change_is_named(honest: Path, place: Path, inputs: Inputs, count: int) -> None:
    draw = random.Random(1)
    for number in range(count):
        run = Path(shutil.copytree(honest, place / str(number)))
        before = (run / "run.jsonl").read_bytes()
        expected = change_log(run, draw) if draw.random() < 0.7 else change_file(run, draw)
        changed = (run / "run.jsonl").read_bytes() != before or expected != "run.jsonl"
        result = verify_run(run, inputs)
        assert not changed or expected in named(result), (number, expected, result.problems)
        shutil.rmtree(run)


def test_every_change_is_named(honest_run: Path, tmp_path: Path, log_alone: Inputs) -> None:
    assert_every_change_is_named(honest_run, tmp_path, log_alone, 200)


@pytest.mark.slow
def test_each_of_2000_changes_is_named(honest_run: Path, tmp_path: Path, log_alone: Inputs) -> None:
    assert_every_change_is_named(honest_run, tmp_path, log_alone, 2000)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda run: (run / "predictions" / "x.npz").write_bytes(b"PK"), "predictions/x.npz"),
        (lambda run: (run / "final" / "more.bin").write_bytes(b"x"), "final/more.bin"),
        (lambda run: next((run / "checkpoints").glob("*.pt")).write_bytes(b"x"), "checkpoints/"),
        (lambda run: (run / "record.json").write_text("{"), "record.json"),
        (lambda run: (run / "run.jsonl").write_bytes(b""), "run.jsonl"),
        (
            lambda run: (run / "run.jsonl").write_bytes((run / "run.jsonl").read_bytes()[:-1]),
            "run.jsonl",
        ),
    ],
)
def test_other_changes_are_named(
    change: Callable[[Path], object], name: str, copied: Path, log_alone: Inputs
) -> None:
    change(copied)
    result = verify_run(copied, log_alone)
    assert name in named(result) and result.exit_code == 1


def test_what_is_derived_may_be_deleted(copied: Path, inputs: Inputs) -> None:
    """Checkpoints may be deleted too; without the weights a run is of the open division."""
    (copied / "record.json").unlink()
    shutil.rmtree(copied / "checkpoints")
    assert verify_run(copied, inputs).in_order
    shutil.rmtree(copied / "final")
    result = verify_run(copied.rename(copied.with_name("another name")), inputs)
    assert result.in_order and result.division == "open"

"""`cramming glue` stopped, killed and run again, with other settings or workers: the same scores, or done anew."""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cramming.data.task_files import GLUE
from cramming.device import describe
from cramming.environment import environment
from cramming.record import load_record
from cramming.runlog import EventLog, Finetuned, read_log
from eval.finetune import store
from eval.finetune.config import Init
from eval.finetune.models import ModelSource, open_model
from eval.finetune.scoring import conditions
from eval.tasks.datasets import TaskData
from eval.tasks.locate import read_task
from tests.eval.glue.calls import main

Section = Callable[..., dict[str, Any]]
Done = Callable[..., list[tuple[str, str, int]]]
Change = Callable[..., dict[str, Any]]


@contextmanager
def stopped_at_write(number: int) -> Iterator[list[str]]:
    """Stop before or after a write of log or predictions; yields what was written.

    Even numbers stop before write `number // 2`, odd ones after it.
    """
    written: list[str] = []

    def stopping(write: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return write(*arguments, **named)  # the heartbeat of a clock that a test left
            if number == 2 * len(written):
                raise KeyboardInterrupt
            result = write(*arguments, **named)
            written.append(write.__name__)
            if number == 2 * len(written) - 1:
                raise KeyboardInterrupt
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventLog, "append", stopping(EventLog.append))
        patch.setattr(store, "overwrite_atomically", stopping(store.overwrite_atomically))
        yield written


def test_stopped_at_any_write_it_ends_the_same_and_one_fine_tuning_is_lost_at_most(
    config: dict[str, Any],
    with_eval: Change,
    section_of: Section,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = with_eval(config, tasks=["cola"])
    unbroken = {**small, "name": "unbroken"}
    with stopped_at_write(-1) as written:
        main(unbroken)
    assert written == ["append"] * 2 + ["overwrite_atomically", "append"] * 2
    trained: list[int] = []
    real = store.ScoreLog.save
    monkeypatch.setattr(store.ScoreLog, "save", lambda *a: trained.append(a[2]) or real(*a))
    folder = Path(small["runs"]) / "first"
    for number in range(2 * len(written)):
        trained.clear()
        with stopped_at_write(number), pytest.raises(KeyboardInterrupt):
            main(small)
        num_saved = len(
            [e for e in read_log(folder / "run.jsonl") if isinstance(e.event, Finetuned)]
        )
        if num_saved < 2 and number >= 3:
            assert load_record(folder)["unfinished"] == [
                f"glue, pretrained: {2 - num_saved} of 2 not fine-tuned"
            ]
        main(small)
        assert section_of(small) == section_of(unbroken), number
        assert 2 <= len(trained) <= 3 and "unfinished" not in load_record(folder)
        log = (folder / "run.jsonl").read_bytes()
        main(small)
        assert (folder / "run.jsonl").read_bytes() == log, "a finished scoring writes nothing"
        shutil.rmtree(folder)


@pytest.mark.slow
def test_killed_at_random_moments_the_result_is_the_same(
    config: dict[str, Any], tmp_path: Path, section_of: Section, finetuned: Done
) -> None:
    """`kill -9` of the parent alone: its worker processes have to notice."""
    hyper = ",".join(
        f"{name}: {config['eval']['hyperparameters'][name]}"
        for name in ("max_length", "learning_rate")
    )
    settings = [
        "eval=glue_sane",
        f"eval.data_dir={config['eval']['data_dir']}",
        f"--runs={config['runs']}",
        "--device=cpu",
        f"--model={config['model_name']}",
        "eval.seeds=[0,1,2,3,4,5]",
        "eval.workers=2",
        f"eval.hyperparameters={{{hyper}}}",
    ]
    killed = {**config, "name": "killed"}

    def start(name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "output.txt").open("ab") as log:
            command = [sys.executable, "-m", "cramming", "glue", *settings, "--name", name]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)

    assert start("unbroken").wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    random, num_saved = np.random.default_rng(0), [0]
    for _ in range(5):
        process, wanted = start("killed"), num_saved[-1] + random.integers(0, 3)
        while process.poll() is None and len(finetuned(killed)) < wanted:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5) if wanted else random.uniform(0, 10))
        process.kill()
        process.wait()
        num_saved.append(len(finetuned(killed)))
    assert start("killed").wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    assert section_of(killed) == section_of({**config, "name": "unbroken"})
    assert len(set(num_saved)) > 2, f"every kill came at the same stage: {num_saved}"
    assert not list(Path(config["runs"]).rglob("*.tmp")), "what a killed process left half written"


def test_stored_results_of_other_settings_or_data_are_not_taken(
    config: dict[str, Any], section_of: Section, finetuned: Done
) -> None:
    main(config)
    config["eval"]["hyperparameters"]["learning_rate"] = 2e-3
    main(config)
    assert len(finetuned(config)) == 8
    fresh = {**config, "name": "fresh"}
    main(fresh)
    assert {**section_of(config), "history_entries": 4} == section_of(fresh)
    dev = Path(config["eval"]["data_dir"]) / "CoLA/dev.tsv"
    dev.write_text("\n".join(dev.read_text().splitlines()[:10]) + "\n")
    main(config)
    assert section_of(config)["tasks"]["cola"]["eval_examples"] == 10
    assert len(finetuned(config)) == 10


def test_numbers_do_not_depend_on_workers(config: dict[str, Any], section_of: Section) -> None:
    main(config)
    config["eval"]["workers"] = 2
    parallel = {**config, "name": "parallel"}
    main(parallel)
    assert section_of(config) == section_of(parallel)
    losses = []
    for name in ("first", "parallel"):
        entries = read_log(Path(config["runs"]) / name / "run.jsonl")
        events = [entry.event for entry in entries if isinstance(entry.event, Finetuned)]
        losses.append({(event.task, event.seed): event.train_loss for event in events})
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_what_was_scored_with_its_test_sets_is_not_fine_tuned_again_without(
    config: dict[str, Any],
    with_eval: Change,
    section_of: Section,
    finetuned: Done,
    predictions_of: Callable[..., Path],
) -> None:
    """No score depends on them; a task that was begun with them continues with them, to whatever end."""
    both = with_eval(config, tasks=["mnli"], init=["pretrained", "random"], baselines=True)
    main(with_eval(both, init=["random"], seeds=[0]))
    baselines = [("floor", "mnli", 0), ("constant", "mnli", 0)]
    expected = [("random", "mnli", 0), *baselines]
    assert finetuned(both) == expected
    main(with_eval(both, predict_test=False))
    expected += [("pretrained", "mnli", 0), ("pretrained", "mnli", 1), ("random", "mnli", 1)]
    assert finetuned(both) == expected, "no baseline, and of the random model the second seed"
    main(both)
    main(with_eval(both, predict_test=False))
    expected += [("pretrained", "mnli", 0), ("pretrained", "mnli", 1)]
    assert finetuned(both) == expected, "test sets of the trained model, which had none"
    unbroken = {**both, "name": "unbroken"}
    main(unbroken)
    for init in ("pretrained", "random"):
        assert section_of(both, init)["predictions"] == section_of(unbroken, init)["predictions"]
        with np.load(predictions_of(both, "mnli", 1, init)) as arrays:
            assert "test.ax" in arrays


def perfect_predictions(file: Path) -> None:
    np.savez(file, **{"dev.cola": np.arange(20) % 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [Path.unlink, perfect_predictions, lambda f: f.write_text("x")])
@pytest.mark.parametrize("init", ["pretrained", "floor"])
def test_a_result_without_the_predictions_it_was_made_of_is_done_again(
    config: dict[str, Any],
    with_eval: Change,
    section_of: Section,
    finetuned: Done,
    predictions_of: Callable[..., Path],
    init: str,
    damage: Callable[[Path], object],
) -> None:
    small = with_eval(config, tasks=["cola"], seeds=[0], baselines=True)
    main(small)
    before, file = section_of(small, init), predictions_of(small, "cola", 0, init)
    content, done = file.read_bytes(), finetuned(small)
    damage(file)
    main(small)
    assert finetuned(small) == [*done, (init, "cola", 0)]
    assert section_of(small, init)["tasks"] == before["tasks"] and file.read_bytes() == content


def test_scores_that_the_predictions_do_not_give_are_done_again(
    config: dict[str, Any], with_eval: Change, section_of: Section, finetuned: Done
) -> None:
    """Another version of a metric, or a rewritten log, leaves such scores."""
    small = with_eval(config, tasks=["cola"], seeds=[0])
    main(small)
    before, folder = section_of(small), Path(small["runs"]) / "first"
    events = [entry.event for entry in read_log(folder / "run.jsonl")]
    (folder / "run.jsonl").unlink()
    log = EventLog(folder / "run.jsonl")
    for event in events:
        if isinstance(event, Finetuned):
            scores = event.entries["cola"]
            edited = scores.model_copy(update={"metrics": dict.fromkeys(scores.metrics, 0.95)})
            event = event.model_copy(update={"entries": {"cola": edited}})
        log.append(event)
    log.close()
    assert section_of(small)["tasks"]["cola"]["score"] == 95
    main(small)
    assert section_of(small)["tasks"] == before["tasks"] and len(finetuned(small)) == 2


def test_what_a_run_depends_on_decides_its_conditions(config: dict[str, Any], model: Path) -> None:
    task, source = read_task(config["eval"]["data_dir"], GLUE["cola"]), open_model(model)
    machine = environment(asdict(describe(torch.device("cpu"))))

    def conditions_of(
        changed: ModelSource | None = None,
        init: Init = "pretrained",
        data: TaskData = task,
        **changes: Any,
    ) -> str:
        return conditions(
            data, changed or open_model(model), init, {"precision": "fp32"}, {**machine, **changes}
        )

    assert conditions_of() == conditions_of(git={}, platform="other", transformers="0"), (
        "the suite's own encoder and tokenizer"
    )
    other = [
        conditions_of(torch="0"),
        conditions_of(tokenizers="0"),
        conditions_of(device={"kind": "cuda", "name": "x"}),
        conditions_of(init="random"),
    ]
    other += [
        conditions_of(data=replace(task, train=task.scored[0])),
        conditions_of(replace(source, sha256="0")),
    ]
    before = conditions_of()
    for name in ("vocab.json", "merges.txt", "sentencepiece.bpe.model"):
        (model / name).write_text("other")
        assert conditions_of() != before
        (model / name).unlink()
    stock = replace(source, is_native=False)
    assert conditions_of(stock) != conditions_of(stock, transformers="0")
    (model / "tokenizer.json").rename(
        model / "elsewhere"
    )  # then transformers has to read vocab.txt
    assert conditions_of() != conditions_of(transformers="0")
    assert len({conditions_of(), *other}) == 7

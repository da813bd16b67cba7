"""`cramming glue` stopped, killed and run again, with other settings or workers: the same bytes, or done anew."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cramming.data.task_files import GLUE
from cramming.device import describe
from cramming.environment import environment
from eval.finetune.config import Init
from eval.finetune.loop import Predictions
from eval.finetune.models import ModelSource, open_model
from eval.finetune.scoring import conditions
from eval.finetune.store import RunStore
from eval.glue import main
from eval.rules.load import load_run
from eval.tasks.datasets import TaskData
from eval.tasks.locate import read_task

Read = Callable[..., bytes]


def test_an_interrupted_run_goes_on_and_ends_the_same(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, glue_json: Read
) -> None:
    done = []
    save = RunStore.save

    def stop_at_the_third(
        self: RunStore, data: TaskData, seed: int, key: str, found: Predictions
    ) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append((data.task.name, seed))
        return save(self, data, seed, key, found)

    monkeypatch.setattr(RunStore, "save", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(config)
    assert done == [("cola", 0), ("cola", 1)]
    monkeypatch.setattr(
        RunStore, "save", lambda *a: done.append((a[1].task.name, a[2])) or save(*a)
    )
    main(config)
    assert done == [("cola", 0), ("cola", 1), ("mnli", 0), ("mnli", 1)]
    main({**config, "name": "unbroken"})
    assert glue_json(config) == glue_json({**config, "name": "unbroken"})


@pytest.mark.slow
def test_killed_at_ten_random_moments_the_result_is_the_same_bytes(
    config: dict[str, Any], tmp_path: Path, glue_json: Read
) -> None:
    """`kill -9` of the parent alone: its worker processes have to notice."""
    hyper = ",".join(
        f"{name}: {config['eval']['hyperparameters'][name]}"
        for name in ("max_length", "learning_rate")
    )
    settings = [
        "eval=glue_sane",
        f"eval.data_dir={config['eval']['data_dir']}",
        f"runs={config['runs']}",
        "device=cpu",
        f"model_path={config['model_path']}",
        "eval.seeds=[0,1,2,3,4,5]",
        "eval.workers=2",
        f"eval.hyperparameters={{{hyper}}}",
    ]

    def start(name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "output.txt").open("ab") as log:
            command = [sys.executable, "-m", "cramming", "glue", *settings, f"name={name}"]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)

    def pieces() -> int:
        return len(list(Path(config["runs"]).glob("killed/glue/pretrained/pieces/*.json")))

    assert start("unbroken").wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    random, kept = np.random.default_rng(0), [0]
    for _ in range(10):
        process, wanted = start("killed"), kept[-1] + random.integers(0, 3)
        while process.poll() is None and pieces() < wanted:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5) if wanted else random.uniform(0, 10))
        process.kill()
        process.wait()
        kept.append(pieces())
    assert start("killed").wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    assert glue_json({**config, "name": "killed"}) == glue_json({**config, "name": "unbroken"})
    assert len(set(kept)) > 3, f"every kill came at the same stage: {kept}"
    assert not list(Path(config["runs"]).rglob("*.tmp")), "what a killed process left half written"


def test_stored_results_of_other_settings_or_data_are_not_taken(
    config: dict[str, Any], glue_json: Read
) -> None:
    main(config)
    before = glue_json(config)
    config["eval"]["hyperparameters"]["learning_rate"] = 2e-3
    main(config)
    assert glue_json(config) != before
    fresh = {**config, "name": "fresh"}
    main(fresh)
    assert glue_json(config) == glue_json(fresh)
    dev = Path(config["eval"]["data_dir"]) / "CoLA/dev.tsv"
    dev.write_text("\n".join(dev.read_text().splitlines()[:10]) + "\n")
    main(config)
    assert json.loads(glue_json(config))["tasks"]["cola"]["eval_examples"] == 10


def test_numbers_do_not_depend_on_workers(config: dict[str, Any], glue_json: Read) -> None:
    main(config)
    config["eval"]["workers"] = 2
    main({**config, "name": "parallel"})
    assert glue_json(config) == glue_json({**config, "name": "parallel"})
    here, there = (
        sorted((Path(config["runs"]) / n / "glue/pretrained/pieces").iterdir())
        for n in ("first", "parallel")
    )
    losses = [
        [json.loads(file.read_text())["train_loss"] for file in files] for files in (here, there)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks of the runs that are done and stored, in order."""
    tasks: list[str] = []
    save = RunStore.save
    monkeypatch.setattr(RunStore, "save", lambda *a: tasks.append(a[1].task.name) or save(*a))
    return tasks


def test_stored_scores_are_computed_again_from_their_predictions(
    config: dict[str, Any],
    with_eval: Callable[..., dict[str, Any]],
    glue_json: Read,
    done: list[str],
) -> None:
    """An edited number is no result; for the bag of words neither."""
    few = with_eval(config, tasks=["cola"], seeds=[0], baselines=True)
    main(few)
    for init in ("pretrained", "floor"):
        before, piece = (
            glue_json(few, init),
            Path(config["runs"]) / f"first/glue/{init}/pieces/cola-seed0.json",
        )
        kept = piece.read_bytes()
        edited = json.loads(kept)
        edited["entries"]["cola"]["metrics"] = dict.fromkeys(
            edited["entries"]["cola"]["metrics"], 0.95
        )
        piece.write_text(json.dumps(edited))
        main(few)
        assert glue_json(few, init) == before and piece.read_bytes() == kept
    assert done == ["cola"] * 3  # once by each, the constant class included


def test_what_was_scored_with_its_test_sets_is_not_fine_tuned_again_without(
    config: dict[str, Any],
    with_eval: Callable[..., dict[str, Any]],
    glue_json: Read,
    done: list[str],
) -> None:
    """No score depends on them; a task that was begun with them goes on with them, to whatever end."""
    both = with_eval(config, tasks=["mnli"], init=["pretrained", "random"], baselines=True)
    main(with_eval(both, init=["random"], seeds=[0]))
    assert done == ["mnli"] * 3
    main(with_eval(both, predict_test=False))
    assert done == ["mnli"] * 6, "no baseline, and of the random model only the second seed"
    main(both)
    main(with_eval(both, predict_test=False))
    assert done == ["mnli"] * 8, "test sets of the trained model, which had none"
    main({**both, "name": "unbroken"})
    folder = Path(config["runs"])
    for init in ("pretrained", "random"):
        assert glue_json(both, init) == glue_json({**both, "name": "unbroken"}, init)
        for seed in (0, 1):
            files = [
                np.load(folder / f"{name}/glue/{init}/predictions/mnli-seed{seed}.npz")
                for name in ("first", "unbroken")
            ]
            assert all(
                np.array_equal(files[0][name], files[1][name]) for name in {*files[0], *files[1]}
            )
    assert not load_run(folder / "first").record.contradictions


def perfect_predictions(folder: Path) -> None:
    np.savez(folder / "predictions/cola-seed0.npz", **{"dev.cola": np.arange(20) % 2})


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "predictions/cola-seed0.npz").unlink(),
        perfect_predictions,
        *(
            lambda folder, text=text: (folder / "pieces/cola-seed0.json").write_text(text)
            for text in ("[]", '{"key": ', '{"key": 3}', "[" * 100_000)
        ),
    ],
)
def test_a_piece_without_the_predictions_it_was_made_of_is_done_again(
    config: dict[str, Any],
    with_eval: Callable[..., dict[str, Any]],
    glue_json: Read,
    done: list[str],
    damage: Callable[[Path], object],
) -> None:
    few = with_eval(config, tasks=["cola"])
    main(few)
    before, folder = glue_json(few), Path(config["runs"]) / "first/glue/pretrained"
    kept = (folder / "predictions/cola-seed0.npz").read_bytes()
    damage(folder)
    main(few)
    assert done == ["cola"] * 3 and glue_json(few) == before
    assert (folder / "predictions/cola-seed0.npz").read_bytes() == kept


def test_what_a_run_depends_on_decides_its_conditions(config: dict[str, Any], model: Path) -> None:
    task, source = read_task(config["eval"]["data_dir"], GLUE["cola"]), open_model(model)
    machine = environment(asdict(describe(torch.device("cpu"))))

    def found(
        changed: ModelSource | None = None,
        init: Init = "pretrained",
        data: TaskData = task,
        **changes: Any,
    ) -> str:
        return conditions(
            data, changed or open_model(model), init, {"precision": "fp32"}, {**machine, **changes}
        )

    assert found() == found(git={}, platform="other", transformers="0"), (
        "the suite's own encoder and tokenizer"
    )
    other = [
        found(torch="0"),
        found(tokenizers="0"),
        found(device={"kind": "cuda", "name": "x"}),
        found(init="random"),
    ]
    other += [found(data=replace(task, train=task.scored[0])), found(replace(source, sha256="0"))]
    before = found()
    for name in ("vocab.json", "merges.txt", "sentencepiece.bpe.model"):
        (model / name).write_text("other")
        assert found() != before
        (model / name).unlink()
    stock = replace(source, own=False)
    assert found(stock) != found(stock, transformers="0")
    (model / "tokenizer.json").rename(
        model / "elsewhere"
    )  # then transformers has to read vocab.txt
    assert found() != found(transformers="0")
    assert len({found(), *other}) == 7

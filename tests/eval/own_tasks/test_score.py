"""`cramming score` end to end on tiny models: every kind of task, what is stored, frozen encoders, labelled words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import yaml

from cramming import cli, verbs
from cramming.config import UserError, build
from cramming.data.task_files import GLUE
from cramming.overrides import compose
from eval.finetune import loop
from eval.finetune.config import EvalConfig, Hyperparameters
from eval.finetune.encode import load_word_encoder, number_first_tokens
from eval.own_tasks.compare import compare
from eval.own_tasks.main import read_tasks
from eval.own_tasks.metrics import METRICS
from eval.own_tasks.readers import glue_task
from eval.tasks import metrics
from eval.tasks.locate import read_task
from tests.eval.glue_layouts import write_glue

FAST = [
    "eval.seeds=[0,1]",
    "eval.workers=1",
    "eval.hyperparameters.epochs=2",
    "eval.hyperparameters.learning_rate=1e-2",
    "eval.hyperparameters.pooling=mean",
    "eval.hyperparameters.pooler=false",
    "eval.hyperparameters.max_length=16",
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A file with one task of each kind, of random words; each label says whether or how many high words there are."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        numbers = [int(n) for n in rng.integers(0, 20, rng.integers(2, 8))]
        tags = ["B-HIGH" if number >= 10 else "O" for number in numbers]
        kinds = [
            name
            for name, holds in (("high", max(numbers) > 15), ("low", min(numbers) < 5))
            if holds
        ]
        rows.append(
            {
                "words": [f"w{number}" for number in numbers],
                "text": " ".join(f"w{number}" for number in numbers),
                "other": "w1 w2",
                "first": "high" if numbers[0] >= 10 else "low",
                "share": float(np.mean(np.array(numbers) >= 10)) * 100,
                "kinds": kinds,
                "tags": tags,
            }
        )
    for name, part in (("train", rows[:40]), ("dev", rows[40:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    files = {"files": {"train": "train.jsonl", "dev": "dev.jsonl"}}
    content = {
        "first": {
            "kind": "classification",
            "files": {"train": "train.jsonl"},
            "folds": 2,
            "text": ["text", "other"],
            "label": "first",
            "metric": "macro_f1",
            "class_weights": "balanced",
        },
        "share": {"kind": "regression", **files, "text": "text", "label": "share", "metric": "mse"},
        "kinds": {
            "kind": "multilabel",
            **files,
            "text": "text",
            "label": "kinds",
            "metric": "macro_f1",
            "class_weights": "balanced",
        },
        "spans": {
            "kind": "tokens",
            **files,
            "text": "words",
            "label": "tags",
            "metric": "span_f1",
        },
    }
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def models(tmp_path: Path, write_bert: Callable[..., Path]) -> list[Path]:
    """Two tiny BERTs of different width."""
    return [
        write_bert(tmp_path / "narrow", 20),
        write_bert(tmp_path / "wide", 20, hidden_size=32),
    ]


def score(tasks: Path, *words: str) -> dict[str, Any]:
    """Run the verb; return its result."""
    out = tasks.parent / "out"
    call = cli.parse(["score", str(tasks), f"--out={out}", "--device=cpu", *FAST, *words])
    assert call is not None
    verbs.run(call)
    result: dict[str, Any] = json.loads((out / "scores.json").read_text())
    return result


def settings(*words: str) -> EvalConfig:
    """Section `eval` of the verb, with overrides."""
    return build(EvalConfig, compose(["eval=own_tasks", *words])["eval"], "eval")


def test_models_are_compared_on_every_kind_of_task(
    tasks: Path, models: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result = score(tasks, *(f"--model={model}" for model in models))
    first, second = map(str, models)
    by_task = {each["task"]: each for each in result["results"]}
    assert {name: each["metric"] for name, each in by_task.items()} == {
        "first": "macro_f1",
        "share": "mse",
        "kinds": "macro_f1",
        "spans": "span_f1",
    }
    assert by_task["first"]["examples"] == 40 and by_task["first"]["labelled_set"] == "folds"
    for each in by_task.values():
        rows = {row["competitor"]: row for row in each["comparisons"]}
        assert list(rows) == [
            first,
            f"{first} (random init)",
            second,
            f"{second} (random init)",
            "bag of words",
            "constant class",
        ]
        assert each["reference"] == first and rows[first]["p"] is None
        assert len(rows[second]["per_seed"]) == 2 and len(rows["bag of words"]["per_seed"]) == 1
        for row in rows.values():
            assert row["interval"][0] <= row["score"] <= row["interval"][1]
            assert row["score"] == pytest.approx(np.mean(row["per_seed"]))
        assert 0 < rows[second]["p"] <= 1
        difference = rows[second]["score"] - rows[first]["score"]
        assert rows[second]["difference"] == pytest.approx(difference)
    page = (tasks.parent / "out" / "scores.md").read_text()
    printed = capsys.readouterr().out
    for text in ("spans (dev): span_f1; 40 training examples, 20 scored", "reference", "p"):
        assert text in page and text in printed


def test_scores_are_those_of_the_stored_predictions(tasks: Path, models: list[Path]) -> None:
    """By scikit-learn, of classes over the folds' predictions together."""
    result = score(tasks, f"--model={models[0]}", "eval.tasks=[kinds]", "eval.init=[pretrained]")
    (data,) = read_tasks(tasks, settings("eval.tasks=[kinds]"))
    rows = {row["competitor"]: row for row in result["results"][0]["comparisons"]}
    scores = set()
    for file in (tasks.parent / "out" / "predictions").iterdir():
        predictions = np.load(file)["dev"]
        labels = data.labels("dev")
        scores.add(sklearn.metrics.f1_score(labels, predictions, average="macro", zero_division=0))
    assert set(rows[str(models[0])]["per_seed"]) == scores


def test_what_is_stored_is_not_made_again(
    tasks: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval.tasks=[spans]", "eval.init=[pretrained]"]
    first = score(tasks, f"--model={models[0]}", *words)
    trained = []

    def count(run: loop.TaskRun, *arguments: Any) -> loop.Predictions:
        trained.append((run.source.label, run.seed))
        return original(run, *arguments)

    original = loop.finetune
    monkeypatch.setattr("eval.finetune.workers.finetune", count)
    assert score(tasks, f"--model={models[0]}", *words)["results"] == first["results"]
    assert trained == []
    score(tasks, *(f"--model={model}" for model in models), *words)
    assert trained == [(str(models[1]), 0), (str(models[1]), 1)]
    score(tasks, f"--model={models[0]}", *words, "eval.hyperparameters.epochs=1")
    assert trained[2:] == [(str(models[0]), 0), (str(models[0]), 1)]


def test_an_easy_task_of_each_kind_is_learned(tasks: Path, models: list[Path]) -> None:
    words = ["eval.hyperparameters.epochs=25", "eval.seeds=[0]", "eval.init=[pretrained]"]
    result = score(tasks, f"--model={models[1]}", *words)
    for each in result["results"]:
        rows = {row["competitor"]: row["score"] for row in each["comparisons"]}
        better = rows[str(models[1])] - rows["constant class"]
        assert (better > 0) == METRICS[each["metric"]].higher_is_better and better, each["task"]


def test_a_frozen_encoder_stays_as_it_is(
    tasks: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def recording(build: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        def build_and_record(*arguments: Any) -> torch.nn.Module:
            model = build(*arguments)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            built.append((model, before))
            return model

        return build_and_record

    for name in ("build_classifier", "build_token_classifier"):
        monkeypatch.setattr(loop, name, recording(getattr(loop, name)))
    words = ["eval.seeds=[0]", "eval.init=[pretrained]", "eval.hyperparameters.freeze=true"]
    result = score(tasks, f"--model={models[0]}", *words)
    assert len(built) == 5 and result["hyperparameters"]["freeze"]
    for model, before in built:
        for name, value in model.state_dict().items():
            is_same = torch.equal(value, before[name])
            assert is_same == name.startswith("encoder."), name


def test_a_checkpoint_of_a_run_is_scored_in_place_of_its_final_model(
    tasks: Path, models: list[Path], train: Callable[..., Path]
) -> None:
    run = train()
    words = ["eval.seeds=[0]", "eval.init=[pretrained]", "eval.tasks=[first]"]
    hashes = set()
    for options in ([], ["--checkpoint=0.5"]):
        hashes.add(score(tasks, f"--model={run}", *words, *options)["models"][str(run)]["sha256"])
    assert len(hashes) == 2
    with pytest.raises(UserError, match="is no folder of a finished run"):
        score(tasks, f"--model={models[0]}", "--checkpoint=0.5", *words)


def test_stored_settings_are_the_same_as_before_there_were_probes() -> None:
    settings = compose(["eval=glue_sane"])["eval"]["hyperparameters"]
    hyper = Hyperparameters(**settings)
    assert "freeze" not in hyper.model_dump()
    assert hyper.replace(freeze=True).model_dump()["freeze"]


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [  # of "an élan vital"
        ([(0, 0), (0, 2), (3, 5), (5, 7), (8, 13), (0, 0)], [-1, 0, 1, -1, 2, -1]),
        ([(0, 2), (2, 5), (5, 7), (7, 13)], [0, 1, -1, 2]),  # byte level: the space before a word
        ([(0, 2), (2, 3), (3, 7)], [0, -1, 1]),  # a space by itself, and a word that is cut off
    ],
)
def test_a_words_first_token_has_its_number(
    offsets: list[tuple[int, int]], expected: list[int]
) -> None:
    assert number_first_tokens("an élan vital", offsets).tolist() == expected


def test_a_stock_tokenizer_gives_the_same_words(models: list[Path]) -> None:
    """Without the suite's layout, which adds two special tokens, it adds none to this vocabulary."""
    texts = ["w1 w2 w3", "w4"]
    ids, offsets = load_word_encoder(models[0], True, 16, 25)(texts)
    stock_ids, stock_offsets = load_word_encoder(models[0], False, 16, 25)(texts)
    for text, *encoded in zip(texts, ids, stock_ids, offsets, stock_offsets, strict=True):
        native, stock, native_offsets, stock_offsets_L = encoded
        assert list(native[1:-1]) == list(stock)
        numbers = number_first_tokens(text, stock_offsets_L).tolist()
        assert number_first_tokens(text, native_offsets).tolist() == [-1, *numbers, -1]
        assert numbers == list(range(len(text.split())))


def test_words_beyond_the_length_get_the_most_frequent_tag(tasks: Path, models: list[Path]) -> None:
    words = ["eval.tasks=[spans]", "eval.seeds=[0]", "eval.init=[pretrained]"]
    short = "eval.hyperparameters.max_length=8"  # six words
    score(tasks, f"--model={models[0]}", *words, short)
    (data,) = read_tasks(tasks, settings("eval.tasks=[spans]"))
    (file,) = (tasks.parent / "out" / "predictions").iterdir()
    predictions = np.load(file)["dev"]
    indices = np.concatenate([np.arange(size) for size in data.words_per_text("dev")])
    default = np.bincount(np.asarray(data.parts[0].train.labels)).argmax()
    assert (indices >= 6).any() and (predictions[indices >= 6] == default).all()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval.data_dir=x"], "eval.data_dir=x: .* has no task of GLUE. Set eval.data_dir=null"),
        (["eval=embedded"], "eval.source=embedded: .* has no task of GLUE. Set eval.source=local"),
        (["eval=glue_sane"], "eval.predict_test=true: .* Set eval.predict_test=false,"),
        (["eval.sweep=true"], "eval.sweep=true: not for own tasks"),
        (["eval.tasks=[spams]"], "eval.tasks=spams: not in .*Did you mean spans"),
        (["eval.init=[random]"], "the pretrained weights are missing"),
        (["eval.hyperparameters.max_length=64"], "has 24 positions"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_line(
    tasks: Path, models: list[Path], words: list[str], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        score(tasks, f"--model={models[0]}", *words)
    assert not (tasks.parent / "out").exists()


def test_a_model_is_given_once(tasks: Path, models: list[Path]) -> None:
    with pytest.raises(UserError, match="twice"):
        score(tasks, *[f"--model={models[0]}"] * 2)


@pytest.mark.parametrize("name", GLUE)
def test_a_task_of_glue_has_the_metric_of_its_suite(tmp_path: Path, name: str) -> None:
    task = GLUE[name]
    original = read_task(write_glue(tmp_path), task)
    data = glue_task(original)
    assert len(data.sets) == len(task.scored)
    rng = np.random.default_rng(0)
    for set_name, split in zip(data.sets, original.scored, strict=True):
        assert split.labels is not None
        predictions = rng.integers(0, max(2, task.outputs), len(split)).astype(np.float64)
        (result,) = compare(data, set_name, {"model": [predictions]}, "model")
        expected = metrics.score([task.main_metric], predictions, split.labels)
        assert result.score == pytest.approx(expected.values[task.main_metric])


def test_tasks_of_glue_stand_beside_own_tasks(tasks: Path, models: list[Path]) -> None:
    tasks.write_text(f"glue: [mnli, rte]\n{tasks.read_text()}")
    data_dir = write_glue(tasks.parent / "glue")
    words = [f"eval.data_dir={data_dir}", "eval.tasks=[share,rte,mnli]", "eval.seeds=[0]"]
    results = score(tasks, f"--model={models[0]}", *words)["results"]
    named = [(each["task"], each["labelled_set"], each["metric"]) for each in results]
    assert named == [
        ("mnli", "dev_matched", "accuracy"),
        ("mnli", "dev_mismatched", "accuracy"),
        ("rte", "dev", "accuracy"),
        ("share", "dev", "mse"),
    ]
    assert len({len(each["comparisons"]) for each in results}) == 1
    page = (tasks.parent / "out" / "scores.md").read_text()
    assert "rte (dev): accuracy; 5 of 2,490 training examples, 5 of 277 scored" in page
    assert "share (dev): mse, lower is better; 40 training examples, 20 scored" in page


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "eval.data_dir=null: .* has tasks of GLUE. Give the folder with CoLA/"),
        (["eval.data_dir={folder}"], "RTE/train.tsv: no such file. RTE needs a training"),
        (["eval.source=superglue"], "eval.source=superglue: .* has tasks of GLUE"),
    ],
)
def test_data_of_glue_that_are_missing_are_named(
    tmp_path: Path, models: list[Path], words: list[str], expected: str
) -> None:
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text("glue: rte\n")
    with pytest.raises(UserError, match=expected):
        score(tasks, f"--model={models[0]}", *(word.format(folder=tmp_path) for word in words))
    assert not (tmp_path / "out").exists()

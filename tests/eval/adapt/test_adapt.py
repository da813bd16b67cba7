"""What `adapt` measures: losses as stock transformers has them, honest intervals, and the page."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, MPNetConfig, MPNetForMaskedLM, MPNetTokenizer

from cramming import cli, launch, verbs
from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.model.load import load_masked_lm
from cramming.overrides import compose
from cramming.record_schema import Record
from eval.adapt.main import measure, mixed
from eval.adapt.measure import (
    Comparison,
    compare,
    held_out_windows,
    losses,
    masked,
    one_at_a_time,
    paired_interval,
)
from eval.adapt.page import Result, verdict, write_page
from eval.own_tasks.compare import Comparison as Scored
from eval.own_tasks.page import Result as Scores
from tests.eval.glue_layouts import write_glue

WORDS = 200


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, write_bert: Callable[..., Path]
) -> tuple[Path, Path, Path]:
    """A tiny BERT, a text of ten of its words, and one of all."""
    folder = tmp_path_factory.mktemp("adapt")
    bert = write_bert(folder / "bert", words=WORDS, max_position_embeddings=64, hidden_size=32)
    generator = random.Random(0)
    own_text, general = folder / "own.txt", folder / "general.txt"
    for path in (own_text, general):
        vocabulary_size = 10 if path == own_text else WORDS
        documents = []
        for _ in range(600):
            numbers = [generator.randrange(vocabulary_size) for _ in range(40)]
            documents.append(" ".join(f"w{number}" for number in numbers))
        path.write_text("\n\n".join(documents))
    return bert, own_text, general


SMALL = (
    "precision=fp32",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch=8",
    "train.validations=0",
    "train.validation_tokens=2048",
    "optim.lr_scale=null",
    "optim.lr=0.01",
    "budget.steps=60",
)


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Path, Path, Path]
) -> tuple[Result, Path, Path]:
    """The measurements of an adapted model, its run folder and its corpus."""
    bert, own_text, general = place
    folder = tmp_path_factory.mktemp("run")
    words = ["adapt", "--from", str(bert), "--name", "mine", "--device", "cpu"]
    words += ["--runs", str(folder / "runs"), "--corpora", str(folder / "corpora")]
    call = cli.parse([*words, f"data.paths=[{own_text}]", *SMALL])
    assert call is not None
    recipe = verbs.recipe_of(call)
    verbs.main_of("prepare")(recipe, call.invocation)
    launch.main(recipe, call.invocation)
    start = f"start.path={bert}"
    other = ("experiment=adapt", start, "data.name=general", f"data.paths=[{general}]")
    others = replace(call.invocation, overrides=other)
    verbs.main_of("prepare")(compose(other), others)
    result = measure(recipe, call.invocation, others)
    (corpus,) = (folder / "corpora").glob("text-*")
    return result, call.invocation.run_folder, corpus


def test_an_mpnet_that_does_not_move_comes_back_as_it_was(
    tmp_path: Path, place: tuple[Path, Path, Path]
) -> None:
    """With its own special tokens, though its vocabulary holds BERT's too."""
    berts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["<s>", "<pad>", "</s>", "<unk>", *berts, *(f"w{i}" for i in range(WORDS)), "<mask>"]
    tokenizer = MPNetTokenizer(vocab={word: number for number, word in enumerate(words)})
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 66, "vocab_size": len(words)}
    stock = MPNetForMaskedLM(MPNetConfig(**sizes))
    for part in (stock, tokenizer):
        part.save_pretrained(tmp_path / "mpnet")
    command = ["adapt", "--from", str(tmp_path / "mpnet"), "--name", "mine", "--device", "cpu"]
    command += ["--runs", str(tmp_path / "runs"), "--corpora", str(tmp_path / "corpora")]
    frozen = ("train.packing=documents", "optim.lr=1e-60", "budget.steps=2")
    call = cli.parse([*command, f"data.paths=[{place[1]}]", *SMALL, *frozen])
    assert call is not None
    recipe = verbs.recipe_of(call)
    verbs.main_of("prepare")(recipe, call.invocation)
    launch.main(recipe, call.invocation)
    adapted = AutoModelForMaskedLM.from_pretrained(call.invocation.run_folder / "final")
    assert isinstance(adapted, MPNetForMaskedLM)
    for name, weights in stock.state_dict().items():
        assert torch.equal(adapted.state_dict()[name], weights), name


def test_what_was_learned_shows_on_the_own_text(adapted: tuple[Result, Path, Path]) -> None:
    result, run, _ = adapted
    own_text, general = result.comparisons
    assert own_text.high < 0 and own_text.unit == "documents" and own_text.documents >= 20
    assert own_text.low < own_text.difference < own_text.high
    assert own_text.perplexity_after < own_text.perplexity_before
    assert own_text.difference < general.difference
    assert verdict(result).startswith(
        "Adapting helped: the masked-LM loss on held-out own text fell"
    )
    assert result.has_head and result.record.training.start == "checkpoint"
    row = Scored("bert", [0.5], 0.5, (0.4, 0.6), None, None, None)
    scores = Scores("spam", "dev", "classification", "f1", 9, 9, 5, 5, 0, "bert", [row])
    pages = write_page(replace(result, scores=(scores,)), run)
    assert '<th scope="col" class="n">f1</th>' in pages[0].read_text(encoding="utf-8")
    texts = [page.read_text(encoding="utf-8") for page in pages]
    for text in texts:
        assert f"{own_text.before:.3f}" in text and f"{own_text.after:.3f}" in text
        assert "general text" in text and "/bert" in text


def test_losses_are_those_of_stock_transformers(
    adapted: tuple[Result, Path, Path], place: tuple[Path, Path, Path]
) -> None:
    corpus = Corpus.open(adapted[2], verify=False)
    windows = held_out_windows(corpus, 32, 500)
    queries = masked(windows, corpus.special_ids.mask)
    ours = losses(load_masked_lm(place[0], 0.0, 0.0).eval(), queries, "test")
    stock = AutoModelForMaskedLM.from_pretrained(place[0]).eval()
    for query, mine in zip(queries, ours, strict=True):
        logits_LV = stock(input_ids=torch.tensor(query.ids_L)[None]).logits[0]
        places_M, targets_M = torch.tensor(query.places_M), torch.tensor(query.targets_M)
        theirs = torch.nn.functional.cross_entropy(logits_LV[places_M], targets_M, reduction="none")
        np.testing.assert_allclose(mine, theirs.detach(), atol=1e-4)


def test_windows_are_framed_and_within_the_limit(adapted: tuple[Result, Path, Path]) -> None:
    corpus = Corpus.open(adapted[2], verify=False)
    special = corpus.special_ids
    windows = held_out_windows(corpus, 16, 300)
    for window in windows:
        assert len(window.ids_L) <= 16
        assert (window.ids_L[0], window.ids_L[-1]) == (special.cls, special.sep)
    assert sum(len(window.ids_L) for window in windows[:-1]) < 300 + 16
    for query in masked(windows, special.mask):
        assert (query.ids_L[query.places_M] == special.mask).all()
        assert not set(query.targets_M.tolist()) & {special.cls, special.sep}
    (window, *_) = windows
    alone = one_at_a_time([window], special.mask)
    assert [query.targets_M.item() for query in alone] == window.ids_L[1:-1].tolist()


def test_the_same_model_twice_differs_by_nothing(
    adapted: tuple[Result, Path, Path], place: tuple[Path, Path, Path]
) -> None:
    model = load_masked_lm(place[0], 0.0, 0.0).eval()
    corpus = Corpus.open(adapted[2], verify=False)
    same = compare(model, model, corpus, "own text", 32, 1000)
    assert (same.difference, same.low, same.high) == (0, 0, 0)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Documents of uneven lengths, whose targets depend on each other."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        counts_W = generator.integers(1, 30, 60)
        owners_W = np.repeat(np.arange(30), 2)
        effects_W = generator.normal(size=30)[owners_W]
        noise_W = generator.normal(size=60) * np.sqrt(counts_W)
        sums_W = counts_W * (0.1 + 0.3 * effects_W) + noise_W
        low, high = paired_interval(sums_W, counts_W, owners_W)
        covered += low <= 0.1 <= high
    assert 0.87 <= covered / 200 <= 0.99


@pytest.mark.parametrize(
    ("low", "high", "begins"),
    [
        (-0.3, -0.1, "Adapting helped"),
        (0.1, 0.3, "Adapting made the model worse"),
        (-0.1, 0.2, "No effect of adapting is shown"),
    ],
)
def test_the_verdict_follows_from_the_interval(low: float, high: float, begins: str) -> None:
    middle = (low + high) / 2
    own_text = Comparison(
        "own text", 30, 60, 900, "documents", 3.0, 3.0 + middle, low, high, 20.0, 19.0
    )
    assert verdict(Result("a", "b", True, (own_text,), (), Record())).startswith(begins)


def test_few_documents_are_said_to_give_no_interval(
    adapted: tuple[Result, Path, Path], tmp_path: Path
) -> None:
    result = adapted[0]
    own_text = replace(result.comparisons[0], unit="windows", documents=3)
    write_page(replace(result, comparisons=(own_text,), has_head=False), tmp_path)
    text = (tmp_path / "adapt.md").read_text()
    assert "the interval is too narrow" in text and "no masked-LM head" in text


def test_many_epochs_are_shown_as_a_plain_number(
    adapted: tuple[Result, Path, Path], tmp_path: Path
) -> None:
    record = adapted[0].record
    pretrain = record.training.model_copy(update={"corpus_epochs": 123.4})
    record = record.model_copy(update={"pretrain": pretrain})
    write_page(replace(adapted[0], record=record), tmp_path)
    assert "123.4 times the text" in (tmp_path / "adapt.md").read_text()


def test_what_would_fail_behind_the_training_is_refused_before(
    place: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    words = ["adapt", "--from", str(place[0]), "--runs", str(tmp_path), f"data.paths=[{place[1]}]"]
    (tmp_path / "tasks.csv").write_text("body,label\na,x\nb,y\n")
    tasks = tmp_path / "tasks.yaml"
    task = (
        "spam: {kind: classification, files: {train: tasks.csv, dev: tasks.csv}, text: text,"
        " label: label, metric: accuracy}"
    )
    tasks.write_text(task)
    good = tmp_path / "good.yaml"
    good.write_text(task.replace("text: text", "text: body"))
    of_glue = tmp_path / "glue.yaml"
    of_glue.write_text("glue: rte")
    for more, problem in (
        (["objective=rtd"], "objective=rtd"),
        (["--general-text", "nothing.txt"], "--general-text=nothing.txt: no such file"),
        (["--keep", "0.1"], "--keep=0.1: no text to keep"),
        (["--add-words", "5"], "--add-words=5: the checkpoint's tokenizer is WordLevel"),
        (["--tasks", str(tasks), "eval.tasks=[nix]"], "eval.tasks=nix: not in"),
        (["--tasks", str(tasks), "eval=glue_small", "eval.sweep=true"], "eval.sweep=true"),
        (["--tasks", str(tasks)], "tasks.csv: row 1: no column 'text'"),
        (["--tasks", str(of_glue)], "eval.data_dir=null: .* has tasks of GLUE"),
        (["--tasks", str(good), "eval.hyperparameters.max_length=999"], "max_length=999"),
    ):
        call = cli.parse([*words, "--check", *more])
        assert call is not None
        with pytest.raises(UserError, match=problem):
            verbs.run(call)


def test_the_cure_of_a_checkpoint_with_short_texts_works(
    place: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    words = ["adapt", "--from", str(place[0]), "--runs", str(tmp_path), f"data.paths=[{place[1]}]"]
    call = cli.parse([*words, "--check"])
    assert call is not None
    with pytest.raises(UserError, match=r"^train.sequence_length=128: above ") as refused:
        verbs.run(call)
    cure = re.search(r"Set (\S+=\d+)\.$", str(refused.value))
    assert cure
    call = cli.parse([*words, "--check", cure[1]])
    assert call is not None
    verbs.run(call)


def test_no_text_that_is_held_out_is_in_the_mix(
    place: tuple[Path, Path, Path], tmp_path: Path, adapted: tuple[Result, Path, Path]
) -> None:
    bert, own_text, general = place
    words = ["adapt", "--from", str(bert), "--name", "mixed", "--corpora", str(tmp_path)]
    call = cli.parse([*words, f"data.paths=[{own_text}]", *SMALL])
    assert call is not None
    recipe = verbs.recipe_of(call)
    both = mixed(recipe, call.invocation, general, 0.3)
    verbs.main_of("prepare")(compose(both.overrides), both)
    (folder,) = tmp_path.glob("mix-*")
    mix, alone = Corpus.open(folder, verify=False), Corpus.open(adapted[2], verify=False)
    train = [documents_of(corpus, "train") for corpus in (mix, alone)]
    held_out = documents_of(alone, "validation")
    assert not train[0] & held_out and train[1] <= train[0]
    sizes = [sum(map(len, documents)) for documents in (train[0] - train[1], train[0])]
    assert 0.15 < sizes[0] / sizes[1] < 0.3  # 0.3 of the bytes, and its words have more of them


def documents_of(corpus: Corpus, split: Any) -> set[tuple[int, ...]]:
    stream = corpus.stream(split)
    return {tuple(stream.document(i).tolist()) for i in range(stream.num_documents)}


@pytest.mark.slow
def test_the_verb_from_text_to_page(
    place: tuple[Path, Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bert, own_text, general = place
    words: list[Any] = ["adapt", "--from", bert, "--name", "mine", "--device", "cpu"]
    words += ["--runs", tmp_path / "runs", "--corpora", tmp_path / "corpora"]
    words += ["--general-text", general, f"data.paths=[{own_text}]", *SMALL]
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text("glue: rte")
    words += ["--tasks", tasks, f"eval.data_dir={write_glue(tmp_path / 'glue')}", "eval.seeds=[0]"]
    words += ["eval.hyperparameters.max_length=32", "eval.hyperparameters.epochs=1"]
    for more in ([], ["--resume"]):  # a finished run is only measured again
        call = cli.parse([str(word) for word in (*words, *more)])
        assert call is not None
        verbs.run(call)
        assert "Adapting helped" in capfd.readouterr().out
    page = (tmp_path / "runs" / "mine" / "adapt.md").read_text(encoding="utf-8")
    _, _, scores = page.partition("Task rte, dev")
    for competitor in (bert, tmp_path / "runs" / "mine", "bag of words"):
        assert f"| {competitor} |" in scores
    assert (tmp_path / "runs" / "mine" / "adapt.html").is_file()
    call = cli.parse([str(word) for word in (*words, "--resume", "optim.lr=0.02")])
    assert call is not None
    with pytest.raises(UserError, match=r"^optim.lr=0.02: the run in .* was started with 0.01"):
        verbs.run(call)

"""What every stage drops is counted, with all stages that compare documents at work, whoever does the work."""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cramming.data.corpus import Corpus
from data_prep.dedup.decontaminate import DecontaminationConfig, Decontaminator

Config = Callable[..., dict[str, Any]]
Contents = Callable[[Path], dict[str, bytes]]
MadeUp = Callable[..., list[str]]
Decode = Callable[[Corpus], list[str]]
Run = Callable[[dict[str, Any]], Corpus]


def write_task(folder: Path, sentences: list[str]) -> Path:
    (folder / "CoLA").mkdir(parents=True)
    rows = "".join(f"gj04\t1\t\t{sentence}\n" for sentence in sentences)
    (folder / "CoLA" / "dev.tsv").write_text(rows, encoding="utf-8")
    return folder


def planted(made_up: MadeUp, seed: int) -> tuple[list[str], list[str]]:
    """Documents with duplicates, a shared licence and sentences of a task; and the task's sentences."""
    draw = random.Random(seed)
    words = " ".join(made_up(40, seed + 100)).replace(".", "").lower().split()
    lengths = [7, 8, 9, 11, 12, 15, 25]
    sentences = [" ".join(draw.choices(words, k=k)).capitalize() + "." for k in lengths * 4]
    licence = " ".join(made_up(6, seed + 200, words=80))
    documents = made_up(80, seed)
    documents += [f"{licence} {text}" for text in made_up(12, seed + 1)]
    for sentence in sentences:
        before, after = made_up(2, draw.randrange(10**6))
        documents += [f"{before} {sentence} {after}", sentence][: draw.randint(1, 2)]
        documents += [f"{before} {after}"] * draw.randint(0, 1)  # equal once the sentence is cut
    documents += draw.sample(documents, 20)
    draw.shuffle(documents)
    return documents, sentences


@pytest.mark.parametrize("action", ["drop", "cut"])
@pytest.mark.parametrize("seed", range(3))
def test_all_that_comes_in_goes_out_or_is_dropped(
    tmp_path: Path,
    text_config: Config,
    made_up: MadeUp,
    decode: Decode,
    run: Run,
    contents: Contents,
    action: str,
    seed: int,
) -> None:
    documents, sentences = planted(made_up, seed)
    (tmp_path / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    tasks = write_task(tmp_path / "glue", sentences)
    written, corpora = [], []
    for workers in (1, 2):
        config = text_config(
            tmp_path / "a.txt",
            workers=workers,
            corpus=str(tmp_path / f"{workers}"),
            filters={"min_words": 5},
            near_duplicates={"enabled": True},
            decontaminate={"tasks": str(tasks), "action": action},
        )
        corpora.append(run(config))
        written.append(contents(corpora[-1].folder))
    assert written[0] == written[1]
    stages = {stage.name: stage for stage in corpora[0].manifest.stages}
    for before, after in pairwise(stages.values()):
        assert (before.documents_out, before.bytes_out) == (after.documents_in, after.bytes_in)
    for stage in stages.values():
        dropped = stage.dropped.values()
        assert stage.documents_in == stage.documents_out + sum(each.documents for each in dropped)
        if stage.name != "normalise":
            assert stage.bytes_in == stage.bytes_out + sum(each.bytes for each in dropped)
    texts = decode(corpora[0])
    search = Decontaminator.from_folder(tasks, DecontaminationConfig())
    assert not any(overlap.words for overlap in search.overlaps(texts))
    assert len(texts) == len(set(texts)) == stages["tokens"].documents_out
    overlap = corpora[0].manifest.decontamination
    matched = sum(overlap["by_words"].values())
    reasons = stages["decontamination"].dropped
    assert matched == overlap["removed"]["CoLA"] + overlap["cut"]["CoLA"] > len(sentences) / 2
    assert all(overlap["by_words"].values())
    assert ("sentences_cut" in reasons) == (overlap["cut"]["CoLA"] > 0) == (action == "cut")
    assert reasons["contaminated"].documents == overlap["removed"]["CoLA"] > 0
    assert "sentences_cut" not in corpora[0].manifest.removed


@pytest.mark.parametrize(("action", "left"), [("drop", 40), ("cut", 50)])
def test_a_common_question_that_takes_most_is_said_and_can_be_cut(
    tmp_path: Path,
    text_config: Config,
    made_up: MadeUp,
    run: Run,
    action: str,
    left: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = "What is the capital of France?"
    pages = [f"{text}\n{question}\n{text}" for text in made_up(10, seed=1, words=400)]
    (tmp_path / "a.txt").write_text("\n\n".join([*made_up(40), *pages]), encoding="utf-8")
    tasks = write_task(tmp_path / "glue", [question])
    corpus = run(
        text_config(tmp_path / "a.txt", decontaminate={"tasks": str(tasks), "action": action})
    )
    assert corpus.manifest.counts["documents"] == left
    said = "10 of 10 documents that decontamination dropped"
    assert (said in capsys.readouterr().out) == (action == "drop")
    card = (corpus.folder / "corpus_card.md").read_text(encoding="utf-8")
    assert (said in card) == (action == "drop")
    assert "| 4 to 9 words | 10 |" in card and question in card

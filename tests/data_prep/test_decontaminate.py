"""Downstream text is found however it is written, per task, and ordinary language is not."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from cramming.config import UserError
from data_prep.decontaminate import TASKS, DecontaminationConfig, Decontaminator

CONFIG = DecontaminationConfig()
LONG = "The old harbour of the town, which lies at the mouth of the river, was destroyed by the storm of 1703."
SHORT = "The sailors rode the breeze clear of the rocks."  # 9 words
TINY = "What is the capital of France?"  # 6 words
PARSED = "it does n't take a sailor to see that this film 's boats -lrb- and its sea -rrb- are made of card ."
FILLER = "Nobody knew the way to the lake, and nobody asked. It rained all day. "


def write(folder: Path, task: str, name: str, *rows: str) -> None:
    (folder / task).mkdir(parents=True, exist_ok=True)
    (folder / task / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """Four tasks in the layouts of the official files."""
    folder = tmp_path / "glue"
    write(folder, "CoLA", "dev.tsv", f"gj04\t1\t\t{SHORT}", f"gj04\t0\t*\t{TINY}")
    write(folder, "CoLA", "test.tsv", "index\tsentence", "0\tThe ship that we saw at noon has left the harbour.")
    write(folder, "CoLA", "train.tsv", "gj04\t1\t\tOnly the training file speaks of a very small blue whale.")
    write(folder, "SST-2", "dev.tsv", "sentence\tlabel", f"{PARSED}\t1")
    write(folder, "QNLI", "dev.tsv", "index\tquestion\tsentence\tlabel", f"0\t{TINY}\t{LONG}\tentailment")
    header = "index\t" + "\t".join(f"c{number}" for number in range(7)) + "\tsentence1\tsentence2\tgold_label"
    write(folder, "MNLI", "dev_matched.tsv", header, f"0{8 * chr(9)}{LONG}\tThe harbour is new.\tcontradiction")
    write(folder, "MNLI", "dev_mismatched.tsv", header, f"0{8 * chr(9)}Yes. {SHORT}\tNo.\tneutral")
    return folder


@pytest.fixture
def found(glue: Path) -> Decontaminator:
    return Decontaminator.from_folder(glue, CONFIG)


def test_a_run_of_thirteen_words_is_found_for_every_task_that_has_it(found: Decontaminator) -> None:
    assert found.tasks_in(FILLER + LONG + FILLER) == ("QNLI", "MNLI")
    words = LONG.split()
    assert found.tasks_in(FILLER + " ".join(words[3:16]) + " and more") == ("QNLI", "MNLI")
    assert found.tasks_in(FILLER + " ".join(words[3:15]) + " and more") == ()
    assert found.tasks_in("") == found.tasks_in(FILLER) == ()


def test_case_punctuation_and_the_treebanks_spelling_do_not_matter(found: Decontaminator) -> None:
    assert found.tasks_in(LONG.upper().replace(",", " —")) == ("QNLI", "MNLI")
    natural = "It doesn't take a sailor to see that this film’s boats (and its sea) are made of card."
    assert found.tasks_in(natural) == ("SST-2",)


def test_a_treebank_corpus_is_read_as_the_tasks_are() -> None:
    """Both ways: either side may be the one that writes "do n't"."""
    for task, corpus in permutations(
        ["He doesn't want to leave (yet).", "he does n't want to leave -lrb- yet -rrb- ."]
    ):
        assert Decontaminator({"SST-2": [task]}, CONFIG).tasks_in(f"{FILLER}{corpus} {FILLER}") == ("SST-2",)


def test_a_short_sentence_is_found_anywhere_if_it_says_enough(found: Decontaminator) -> None:
    assert found.tasks_in(f"{FILLER}{SHORT} {FILLER}") == ("CoLA", "MNLI")
    assert found.tasks_in(f"{FILLER}\n{SHORT[:-1]}\n{FILLER}") == ("CoLA", "MNLI")
    assert found.tasks_in(f"{FILLER}As we know, {SHORT[:-1]} in the bay. {FILLER}") == ("CoLA", "MNLI")


def test_one_that_says_less_must_be_a_whole_sentence(found: Decontaminator) -> None:
    assert found.tasks_in(f"{FILLER}{TINY} {FILLER}") == ("CoLA", "QNLI")
    assert found.tasks_in(f"{FILLER}He asked what is the capital of France? {FILLER}") == ()


def test_what_anybody_says_is_no_evidence() -> None:
    search = Decontaminator(
        {"MNLI": ["I don't know.", "Where are you going?", "Unmistakably incomprehensible!"]}, CONFIG
    )
    assert search.searchable == {"MNLI": 0} and search.tasks_in("I don't know. Where are you going?") == ()


def test_texts_searched_and_found_are_counted_by_task(found: Decontaminator) -> None:
    assert found.searchable == {"CoLA": 3, "SST-2": 1, "QNLI": 2, "MNLI": 2}
    assert found.by_task(found.texts_in(f"{LONG} {TINY} {SHORT}")) == {"CoLA": 2, "SST-2": 0, "QNLI": 2, "MNLI": 2}


def test_training_text_only_when_asked_for(glue: Path, found: Decontaminator) -> None:
    text = "Only the training file speaks of a very small blue whale."
    assert found.tasks_in(text) == ()
    config = DecontaminationConfig(train_text=True)
    assert Decontaminator.from_folder(glue, config).tasks_in(text) == ("CoLA",)


def test_what_was_read_is_named(found: Decontaminator) -> None:
    assert found.tasks == ("CoLA", "SST-2", "QNLI", "MNLI")
    assert found.examples == {"CoLA": 3, "SST-2": 1, "QNLI": 2, "MNLI": 4}
    names = [file["name"] for file in found.files]
    assert names[:2] == ["CoLA/dev.tsv", "CoLA/test.tsv"] and "MNLI/dev_mismatched.tsv" in names
    assert all(len(file["sha256"]) == 64 for file in found.files)


def test_the_match_is_shown(found: Decontaminator) -> None:
    assert found.shown(9 * FILLER + LONG + FILLER).startswith("13 words of QNLI, MNLI: ... ")
    assert LONG[:70] in found.shown(9 * FILLER + LONG + FILLER)
    assert found.shown(SHORT) == f"9 words of CoLA, MNLI: {SHORT}"


def test_every_planted_example_of_many_is_found_and_no_other_text() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 300, rng.integers(8, 40))) for _ in range(3000)]
    found = Decontaminator({"RTE": texts[:1000], "WNLI": texts[1000:2000]}, CONFIG)
    for number in range(0, 3000, 7):
        expected = (("RTE",), ("WNLI",), ())[number // 1000]
        assert found.tasks_in(f"{FILLER}{texts[number]}. {FILLER}") == expected


def test_the_table_knows_the_nine_tasks_of_the_official_layouts() -> None:
    from eval.tasks import TASKS as SCORED

    assert {task.title: task.text for task in SCORED.values()} == TASKS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "none", "no folder .*none"),
        (lambda folder: folder / "CoLA", "holds none of the tasks CoLA, SST-2"),
        (lambda folder: (folder / "SST-2" / "dev.tsv").unlink(), "SST-2 has no dev"),
        (lambda folder: write(folder, "SST-2", "dev.tsv", "text\tlabel", "a\t1"), "dev.tsv:1: no column 'sentence'"),
        (lambda folder: write(folder, "QNLI", "dev.tsv", "a\tquestion\tsentence", "1", "2"), "2 of 2 rows have fewer"),
        (lambda folder: (folder / "CoLA" / "dev.tsv").write_bytes(b"a\xff"), "dev.tsv: not UTF-8 at byte 1"),
    ],
)
def test_wrong_folders_are_named(glue: Path, change: object, message: str) -> None:
    assert callable(change)
    changed = change(glue)
    with pytest.raises(UserError, match=message):
        Decontaminator.from_folder(changed if isinstance(changed, Path) else glue, CONFIG)

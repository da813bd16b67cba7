"""Downstream text is found however it is written, per task, and ordinary language is not."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.task_files import texts_sha256
from data_prep.dedup import decontaminate
from data_prep.dedup.decontaminate import DecontaminationConfig, Decontaminator
from data_prep.filters.normalise import CleanConfig, normalize

CONFIG = DecontaminationConfig()
LONG = "The old harbour of the town, which lies at the mouth of the river, was destroyed by the storm of 1703."
SHORT = "The sailors rode the breeze clear of the rocks."  # 9 words
TINY = "What is the capital of France?"  # 6 words
PARSED = "it does n't take a sailor to see that this film 's boats -lrb- and its sea -rrb- are made of card ."
FILLER = "Nobody knew the way to the lake, and nobody asked. It rained all day. "


def tasks_in(search: Decontaminator, text: str) -> tuple[str, ...]:
    (overlap,) = search.overlaps([text])
    return tuple(task for task, count in search.by_task(overlap.texts).items() if count)


def write(folder: Path, task: str, name: str, *rows: str) -> None:
    (folder / task).mkdir(parents=True, exist_ok=True)
    (folder / task / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """Four tasks in the layouts of the official files."""
    folder = tmp_path / "glue"
    write(folder, "CoLA", "dev.tsv", f"gj04\t1\t\t{SHORT}", f"gj04\t0\t*\t{TINY}")
    write(
        folder,
        "CoLA",
        "test.tsv",
        "index\tsentence",
        "0\tThe ship that we saw at noon has left the harbour.",
    )
    write(
        folder,
        "CoLA",
        "train.tsv",
        "gj04\t1\t\tOnly the training file speaks of a very small blue whale.",
    )
    write(folder, "SST-2", "dev.tsv", "sentence\tlabel", f"{PARSED}\t1")
    write(
        folder,
        "QNLI",
        "dev.tsv",
        "index\tquestion\tsentence\tlabel",
        f"0\t{TINY}\t{LONG}\tentailment",
    )
    header = (
        "index\t"
        + "\t".join(f"c{number}" for number in range(7))
        + "\tsentence1\tsentence2\tgold_label"
    )
    write(
        folder,
        "MNLI",
        "dev_matched.tsv",
        header,
        f"0{8 * chr(9)}{LONG}\tThe harbour is new.\tcontradiction",
    )
    write(folder, "MNLI", "dev_mismatched.tsv", header, f"0{8 * chr(9)}Yes. {SHORT}\tNo.\tneutral")
    return folder


@pytest.fixture
def found(glue: Path) -> Decontaminator:
    return Decontaminator.from_folder(glue, CONFIG)


def test_a_run_of_thirteen_words_is_found_for_every_task_that_has_it(found: Decontaminator) -> None:
    assert tasks_in(found, FILLER + LONG + FILLER) == ("MNLI", "QNLI")
    words = LONG.split()
    assert tasks_in(found, FILLER + " ".join(words[3:16]) + " and more") == ("MNLI", "QNLI")
    assert tasks_in(found, FILLER + " ".join(words[3:15]) + " and more") == ()
    assert tasks_in(found, "") == tasks_in(found, FILLER) == ()


def test_case_punctuation_and_the_treebanks_spelling_do_not_matter(found: Decontaminator) -> None:
    assert tasks_in(found, LONG.upper().replace(",", " —")) == ("MNLI", "QNLI")
    natural = (
        "It doesn't take a sailor to see that this film’s boats (and its sea) are made of card."
    )
    assert tasks_in(found, natural) == ("SST-2",)


def test_a_treebank_corpus_is_read_as_the_tasks_are() -> None:
    """Both ways: either side may be the one that writes "do n't"."""
    for task, corpus in permutations(
        ["He doesn't want to leave (yet).", "he does n't want to leave -lrb- yet -rrb- ."]
    ):
        assert tasks_in(
            Decontaminator({"SST-2": [task]}, CONFIG), f"{FILLER}{corpus} {FILLER}"
        ) == ("SST-2",)


def test_a_short_sentence_is_found_anywhere_if_it_says_enough(found: Decontaminator) -> None:
    assert tasks_in(found, f"{FILLER}{SHORT} {FILLER}") == ("CoLA", "MNLI")
    assert tasks_in(found, f"{FILLER}\n{SHORT[:-1]}\n{FILLER}") == ("CoLA", "MNLI")
    assert tasks_in(found, f"{FILLER}As we know, {SHORT[:-1]} in the bay. {FILLER}") == (
        "CoLA",
        "MNLI",
    )


def test_one_that_says_less_must_be_a_whole_sentence(found: Decontaminator) -> None:
    assert tasks_in(found, f"{FILLER}{TINY} {FILLER}") == ("CoLA", "QNLI")
    for inside in (
        "He asked what is the capital of France?",
        "It, what is the capital of France, is known.",
    ):
        assert tasks_in(found, f"{FILLER}{inside} {FILLER}") == ()


@pytest.mark.parametrize(
    "row",
    [
        f"gj04\t1\t*\t{TINY}",
        f"0\t{TINY[:-1]}\t3.5",
        f'{{"sentence": "{TINY}", "label": 1}}',
        f"12,{TINY[:-1]},entailment",
        f"year | {TINY[:-1]} | of",
        f"(12) {TINY}",
        f"He asked: “{TINY}” of us",
        f"asked ({TINY[:-1]}) of us",
        f"the question — {TINY[:-1]} — of us",
    ],
)
def test_rows_cells_and_quotations_stand_alone(found: Decontaminator, row: str) -> None:
    assert tasks_in(found, normalize(f"{FILLER}{row}", CleanConfig())) == ("CoLA", "QNLI")


def test_no_sentence_begins_behind_an_initial() -> None:
    text = "It was made known by the U.S. Food and Drug Administration."
    assert (
        tasks_in(
            Decontaminator({"MRPC": [text]}, CONFIG),
            "He asked the U.S. Food and Drug Administration.",
        )
        == ()
    )
    assert tasks_in(Decontaminator({"MRPC": [text]}, CONFIG), text) == ("MRPC",)


def test_texts_are_searched_together_as_alone(
    found: Decontaminator, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = LONG.split()
    texts = [
        FILLER,
        LONG,
        "",
        TINY,
        " ".join(words[:9]),
        " ".join(words[9:]),
        f"{FILLER}{SHORT}",
        PARSED,
        "What is",
    ]
    alone = [tasks_in(found, text) for text in texts]
    assert [len(tasks) for tasks in alone] == [0, 2, 0, 2, 0, 0, 2, 1, 0]
    together = [overlap.texts.tolist() for overlap in found.overlaps(texts)]
    assert [bool(numbers) for numbers in together] == [bool(tasks) for tasks in alone]
    monkeypatch.setattr(decontaminate, "BATCH_CHARACTERS", 100)
    assert [overlap.texts.tolist() for overlap in found.overlaps(texts)] == together
    assert found.overlaps([]) == []


def test_what_anybody_says_is_no_evidence() -> None:
    search = Decontaminator(
        {"MNLI": ["I don't know.", "Where are you going?", "Unmistakably incomprehensible!"]},
        CONFIG,
    )
    assert (
        search.searchable == {"MNLI": 0}
        and tasks_in(search, "I don't know. Where are you going?") == ()
    )


def test_training_text_only_when_asked_for(glue: Path, found: Decontaminator) -> None:
    text = "Only the training file speaks of a very small blue whale."
    assert tasks_in(found, text) == ()
    config = DecontaminationConfig(train_text=True)
    assert tasks_in(Decontaminator.from_folder(glue, config), text) == ("CoLA",)


def test_the_development_texts_that_were_searched_are_told_whatever_their_order(glue: Path) -> None:
    """Test sets and training text are searched too, and stand apart."""
    found = Decontaminator.from_folder(glue, CONFIG)
    assert found.examples == {"CoLA": 3, "SST-2": 1, "QNLI": 2, "MNLI": 4} and len(found.files) == 6
    assert found.searchable == {"CoLA": 3, "SST-2": 1, "QNLI": 2, "MNLI": 2}
    assert found.by_task(found.overlaps([f"{LONG} {TINY} {SHORT}"])[0].texts) == {
        "CoLA": 2,
        "SST-2": 0,
        "QNLI": 2,
        "MNLI": 2,
    }
    known = found.development
    assert {name: found["texts"] for name, found in known.items()} == {
        "CoLA/dev.tsv": 2,
        "SST-2/dev.tsv": 1,
        "QNLI/dev.tsv": 2,
        "MNLI/dev_matched.tsv": 2,
        "MNLI/dev_mismatched.tsv": 2,
    }
    assert known["QNLI/dev.tsv"]["sha256"] == texts_sha256([LONG, TINY])
    write(glue, "CoLA", "dev.tsv", f"gj04\t0\t*\t{TINY} ", f"gj04\t1\t\t{SHORT}")
    assert Decontaminator.from_folder(glue, CONFIG).development == known
    write(glue, "CoLA", "dev.tsv", f"gj04\t0\t*\t{TINY}", f"gj04\t1\t\t{SHORT[:-1]}")
    changed = Decontaminator.from_folder(glue, CONFIG).development
    assert [name for name in known if known[name] != changed[name]] == ["CoLA/dev.tsv"]


def test_the_match_is_shown(found: Decontaminator) -> None:
    assert found.explain(9 * FILLER + LONG + FILLER).startswith("13 words of MNLI, QNLI: ... ")
    assert LONG[:70] in found.explain(9 * FILLER + LONG + FILLER)
    assert found.explain(SHORT) == f"9 words of CoLA, MNLI: {SHORT}"


@pytest.mark.parametrize("odd", ["do n't n't", "do\nn't", "do  n't -L-LRB-RB-"])
def test_a_match_in_odd_spelling_is_shown(odd: str) -> None:
    """As it was found, though joining what is detached twice would make another text."""
    text = f"we {odd} believe that the committee meant anything by it"
    search = Decontaminator({"SST-2": [text]}, CONFIG)
    assert tasks_in(search, text) == ("SST-2",)
    assert "believe that the committee" in search.explain(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"First. {SHORT} Last.", "First. Last."),
        (f"First.\n{SHORT}\nLast.", "First.\nLast."),
        (f"First. As we know, {SHORT[:-1]} in the bay.\nLast.", "First.\nLast."),
        (f"{SHORT} {FILLER}{TINY} Last.", f"{FILLER}Last."),
        (f"First. {LONG[:60]}\n{LONG[60:]} Last.", "First.\nLast."),  # over a line's end
        (f"First. {PARSED} Last. It does n't end.", "First. Last. It does n't end."),
        (f"First. Was it {TINY[:-1].lower()}", f"First. Was it {TINY[:-1].lower()}"),  # no match
        (f"one line {LONG[:-1]} and no other sentence", ""),
        (f"第一。{SHORT[:-1]}。最後。", "第一。最後。"),
        (FILLER.strip(), FILLER.strip()),
    ],
)
def test_sentences_with_a_match_are_cut_and_the_rest_holds_none(
    found: Decontaminator, text: str, left: str
) -> None:
    assert found.cut(text) == left
    assert tasks_in(found, left) == ()


def test_neighbours_that_a_cut_brings_together_are_searched_too(found: Decontaminator) -> None:
    words = LONG.split()
    text = f"Before. {' '.join(words[:9])}. {SHORT} {' '.join(words[9:])} After."
    assert tasks_in(found, text) == ("CoLA", "MNLI")
    assert found.cut(text) == "Before. After."


def test_the_longest_match_is_counted(found: Decontaminator) -> None:
    texts = [FILLER, f"{FILLER}{TINY}", f"{TINY} {SHORT}", f"{LONG} {TINY}"]
    assert [overlap.words for overlap in found.overlaps(texts)] == [0, 6, 9, 13]


def test_every_planted_example_of_many_is_found_and_no_other_text() -> None:
    rng = np.random.default_rng(0)
    texts = [
        " ".join(f"w{word}" for word in rng.integers(0, 300, rng.integers(8, 40)))
        for _ in range(3000)
    ]
    found = Decontaminator({"RTE": texts[:1000], "WNLI": texts[1000:2000]}, CONFIG)
    for number in range(0, 3000, 7):
        expected = (("RTE",), ("WNLI",), ())[number // 1000]
        assert tasks_in(found, f"{FILLER}{texts[number]}. {FILLER}") == expected


def test_tasks_of_superglue_are_found_too(glue: Path) -> None:
    """Their test files as well, and those tasks that are not scored here; names among ReCoRD's answers do not count."""
    write(
        glue, "BoolQ", "val.jsonl", json.dumps({"question": TINY, "passage": LONG, "label": True})
    )
    write(
        glue,
        "WSC",
        "val.jsonl",
        json.dumps({"text": PARSED, "target": {"span1_text": "film"}, "label": False}),
    )
    write(
        glue,
        "RTE",
        "val.jsonl",
        json.dumps({"premise": SHORT, "hypothesis": "No.", "label": "entailment"}),
    )
    write(
        glue,
        "RTE",
        "test.jsonl",
        json.dumps({"premise": "Cows eat green grass on the alpine meadows.", "idx": 1}),
    )
    query = {
        "query": "A @placeholder sails around the southern cape.",
        "answers": [{"text": "Cutty Sark of Old Town"}],
    }
    write(
        glue,
        "ReCoRD",
        "val.jsonl",
        json.dumps({"passage": {"text": SHORT, "entities": []}, "qas": [query]}),
    )
    found = Decontaminator.from_folder(glue, CONFIG)
    assert found.examples == {
        "CoLA": 3,
        "SST-2": 1,
        "MNLI": 4,
        "QNLI": 2,
        "BoolQ": 2,
        "RTE": 3,
        "WSC": 1,
        "ReCoRD": 2,
    }
    assert (
        set(found.development) >= {"BoolQ/val.jsonl", "RTE/val.jsonl"}
        and "RTE/test.jsonl" not in found.development
    )
    assert tasks_in(found, FILLER + LONG) == ("MNLI", "QNLI", "BoolQ")
    assert tasks_in(found, f"{FILLER} {SHORT}") == ("CoLA", "MNLI", "RTE", "ReCoRD")
    assert tasks_in(found, "Cows eat green grass on the alpine meadows.") == ("RTE",)
    assert tasks_in(found, "Cutty Sark of Old Town.") == ()
    write(glue, "BoolQ", "val.jsonl", '{"question')
    with pytest.raises(UserError, match=r"BoolQ.val.jsonl: not a file of examples"):
        Decontaminator.from_folder(glue, CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "none", "none is no folder that holds"),
        (lambda folder: folder / "CoLA", "no folder that holds one of CoLA, SST-2"),
        (lambda folder: (folder / "SST-2" / "dev.tsv").unlink(), "SST-2 has no dev"),
        (
            lambda folder: write(folder, "SST-2", "dev.tsv", "text\tlabel", "a\t1"),
            "dev.tsv:1: no column sentence",
        ),
        (
            lambda folder: write(folder, "QNLI", "dev.tsv", "a\tquestion\tsentence", "1", "2"),
            "2 of 2 rows have fewer",
        ),
        (
            lambda folder: (folder / "CoLA" / "dev.tsv").write_bytes(b"a\xff"),
            "not a file of examples: .*utf-8",
        ),
    ],
)
def test_wrong_folders_are_named(glue: Path, change: object, message: str) -> None:
    assert callable(change)
    changed = change(glue)
    with pytest.raises(UserError, match=message):
        Decontaminator.from_folder(changed if isinstance(changed, Path) else glue, CONFIG)

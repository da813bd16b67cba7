"""Eight small tasks about the embedded world, one of each GLUE type, in the layouts of GLUE's files.

Training examples use the first half of every list of words, dev and test examples the second half: what has to be
learnt in fine-tuning is the question, what has to be known already is the words. Every sentence is from the share that
is reserved for tasks, so none stands in the corpus, and none stands in two splits of a task. Labels are balanced, all
labels of a task are drawn from the same patterns of sentences, and the second sentence of a pair says everything in
other words where there are any, so that neither length, nor a single word, nor the overlap gives the label away.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from data_prep.synthetic.lexicon import ADJECTIVES, KINDS
from data_prep.synthetic.speaker import (
    QUESTIONS,
    SLOTS,
    THINGS,
    Fact,
    NothingToSayError,
    Speaker,
    Verdict,
    normalise,
    sentence,
)  # fmt: skip

SIZES = {"train": 800, "dev": 400, "test": 400}
HOUSEHOLD = tuple(name for name in THINGS if KINDS[name].group == "thing")
NATURE = tuple(name for name in THINGS if KINDS[name].group != "thing")
MISTAKES = ("agreement", "agreement", "determiner", "order")
VERDICTS: dict[str, Verdict] = {"entailment": "right", "neutral": "open", "contradiction": "wrong"}
Kinds = Sequence[str]


class Example(NamedTuple):
    """One row of a task; `second` is empty for single sentences."""

    first: str
    second: str
    label: str


def pair(s: Speaker, label: str, first: Callable[[], str], second: Callable[[], str], ends: str = "..") -> Example:
    """Two sentences, the second without the words of the first where their meanings have others."""
    s.avoided = set()
    one = first()
    s.avoided = s.chosen
    two = second()
    s.avoided = set()
    return Example(sentence(one, ends[0]), sentence(two, ends[1]), label)


def acceptability(s: Speaker, label: str, kinds: Kinds) -> Example:
    """CoLA: is the sentence grammatical?"""
    return Example(sentence(s.scene("" if label == "1" else s.pick(MISTAKES))), "", label)


def sentiment(s: Speaker, label: str, kinds: Kinds) -> Example:
    """SST-2: is the review positive?"""
    fact = Fact(None, ADJECTIVES["good" if label == "1" else "bad"], s.thing("work"))
    slot = s.pick(("place", "time"))
    return Example(sentence(s.tell(replace(fact, circumstances={slot: s.circumstance(slot, fact)}))), "", label)


def paraphrase(s: Speaker, label: str, kinds: Kinds) -> Example:
    """MRPC: do both say the same?"""
    fact = s.fact(kinds)
    other = fact if label == "1" else replace(fact, meaning=s.pick(fact.possible, fact.meaning))
    return pair(s, label, lambda: s.tell(fact), lambda: s.tell(other))


def same_question(s: Speaker, label: str, kinds: Kinds) -> Example:
    """QQP: do both ask the same?"""
    slot = again = s.pick(SLOTS)
    fact = other = s.deed(kinds)
    if label == "0" and s.chance(0.5):
        again = s.pick(SLOTS, slot)
    elif label == "0":
        other = replace(fact, meaning=s.pick(fact.possible, fact.meaning))
    return pair(s, label, lambda: s.ask(fact, slot), lambda: s.ask(other, again), "??")


def similarity(s: Speaker, label: str, kinds: Kinds) -> Example:
    """STS-B: 0 to 5; the same doer 1 point, the same action 2, the same thing 2 (one of its kind 1)."""
    fact = s.deed(kinds, people=0)
    thing = fact.patient
    others = [s.thing(s.pick(kinds, thing.kind)), s.thing(thing.kind, thing), thing]
    ways = [
        found
        for i, agent in enumerate((s.person(fact.agent), fact.agent))
        for j, meaning in ((0, s.pick(fact.possible, fact.meaning, fact.opposite)), (2, fact.meaning))
        for k, patient in enumerate(others)
        if i + j + k == int(label) and meaning in (found := Fact(agent, meaning, patient)).possible
    ]
    if not ways:
        raise NothingToSayError
    other = s.pick(ways)
    return pair(s, f"{int(label):.3f}", lambda: s.tell(fact), lambda: s.tell(other))


def inference(s: Speaker, label: str, kinds: Kinds) -> Example:
    """MNLI: does the second follow from the first, contradict it, or neither?"""
    fact = s.fact(kinds)
    return pair(s, label, lambda: s.tell(fact), lambda: s.claim(fact, VERDICTS[label]))


def answered(s: Speaker, label: str, kinds: Kinds) -> Example:
    """QNLI: does the sentence hold the answer to the question?"""
    slot, lacking = s.shuffled(tuple(QUESTIONS))[:2]
    fact = s.deed(kinds)
    told = slot if label == "entailment" else lacking
    answer = replace(fact, circumstances={told: s.circumstance(told, fact)})
    return pair(s, label, lambda: s.ask(fact, slot), lambda: s.tell(answer), "?.")


def consequence(s: Speaker, label: str, kinds: Kinds) -> Example:
    """RTE: does the second follow from the first, given what kind of thing something is?"""
    fact = s.deed(kinds, people=0)
    claimed = fact.general()
    if label == "not_entailment":
        fitting = [kind for kind in kinds if KINDS[kind].group in fact.meaning.groups]
        wrong = s.pick(fitting, fact.patient.kind)
        claimed = replace(claimed, patient=replace(fact.patient, word=wrong, kind=wrong))
    return pair(s, label, lambda: s.tell(fact), lambda: s.tell(claimed, "a"))


class Task(NamedTuple):
    """A task's folder, its labels, how an example is made, columns and cells of a labelled and of a test file."""

    folder: str
    labels: tuple[str, ...]
    build: Callable[[Speaker, str, Kinds], Example]
    labelled: tuple[str, str]
    test: tuple[str, str]


BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
_PAIR, _PAIR_LABEL = "{i}|{first}|{second}", "{i}|{first}|{second}|{label}"
_MRPC_TEXT, _MRPC_ROW = "#1 ID|#2 ID|#1 String|#2 String", "{i}a|{i}b|{first}|{second}"
_STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
_STSB_ROW = "{i}|world|embedded|2026|{i}|none|none|{first}|{second}"
_MNLI = (
    "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
    "|sentence1|sentence2"
)
_MNLI_ROW = "{i}|{i}|{i}e|world|||||{first}|{second}"
TASKS = {
    "cola": Task("CoLA", BINARY, acceptability, ("", "world|{label}||{first}"), ("index|sentence", "{i}|{first}")),
    "sst2": Task("SST-2", BINARY, sentiment, ("sentence|label", "{first}|{label}"), ("index|sentence", "{i}|{first}")),
    "mrpc": Task(
        "MRPC", BINARY, paraphrase,
        (f"Quality|{_MRPC_TEXT}", f"{{label}}|{_MRPC_ROW}"), (f"index|{_MRPC_TEXT}", f"{{i}}|{_MRPC_ROW}"),
    ),
    "qqp": Task(
        "QQP", BINARY, same_question,
        ("id|qid1|qid2|question1|question2|is_duplicate", "{i}|{i}a|{i}b|{first}|{second}|{label}"),
        ("id|question1|question2", _PAIR),
    ),
    "stsb": Task("STS-B", tuple("012345"), similarity, (f"{_STSB}|score", _STSB_ROW + "|{label}"), (_STSB, _STSB_ROW)),
    "mnli": Task(
        "MNLI", tuple(VERDICTS), inference,
        (f"{_MNLI}|label1|gold_label", _MNLI_ROW + "|{label}|{label}"), (_MNLI, _MNLI_ROW),
    ),
    "qnli": Task(
        "QNLI", ENTAILMENT, answered,
        ("index|question|sentence|label", _PAIR_LABEL), ("index|question|sentence", _PAIR),
    ),
    "rte": Task(
        "RTE", ENTAILMENT, consequence,
        ("index|sentence1|sentence2|label", _PAIR_LABEL), ("index|sentence1|sentence2", _PAIR),
    ),
}  # fmt: skip


def examples(task: str, seed: int) -> dict[str, list[Example]]:
    """All splits of a task. MNLI has two dev and two test splits, about household things and about nature."""
    domains: dict[str, Kinds] = dict.fromkeys(SIZES, THINGS)
    if task == "mnli":
        pairs = {
            f"{split}_{name}": kinds
            for split in ("dev", "test")
            for name, kinds in (("matched", HOUSEHOLD), ("mismatched", NATURE))
        }
        domains = {"train": HOUSEHOLD, **pairs}
    seen: set[str] = set()
    splits = {}
    for name, kinds in domains.items():
        split = name.partition("_")[0]
        speaker = Speaker(f"{task} {name} {seed}", "train" if split == "train" else "eval")
        splits[name] = draw(TASKS[task], speaker, SIZES[split], kinds, seen)
    return splits


def draw(task: Task, speaker: Speaker, size: int, kinds: Kinds, seen: set[str]) -> list[Example]:
    """`size` examples, labels in turn, none twice and no sentence that another split has (`seen`, which grows)."""
    found: dict[tuple[str, ...], Example] = {}
    while len(found) < size:
        try:
            example = task.build(speaker, task.labels[len(found) % len(task.labels)], kinds)
        except NothingToSayError:
            continue
        key = tuple(normalise(text) for text in (example.first, example.second) if text)
        if key not in found and len(set(key)) == len(key) and not seen.intersection(key):
            found[key] = example
    seen.update(text for key in found for text in key)
    return speaker.shuffled(list(found.values()))


def write_tasks(folder: Path, seed: int) -> None:
    """Write the eight tasks as folders `CoLA/`, `SST-2/`, ... with train, dev and test files in GLUE's layouts."""
    for name, task in TASKS.items():
        (folder / task.folder).mkdir(parents=True)
        for split, found in examples(name, seed).items():
            columns, row = task.test if split.startswith("test") else task.labelled
            rows = [row.format(i=i, **example._asdict()) for i, example in enumerate(found)]
            text = "\n".join([columns, *rows] if columns else rows) + "\n"
            (folder / task.folder / f"{split}.tsv").write_text(text.replace("|", "\t"), encoding="utf-8")

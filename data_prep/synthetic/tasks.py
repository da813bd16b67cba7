"""Eight small tasks about the embedded world, one of each GLUE type, under the names of GLUE's files and columns.

Training examples use the first half of every list of words, dev and test examples the second half: what has to be
learnt in fine-tuning is the question, what has to be known already is the words. Every sentence is from the share that
is reserved for tasks, so none stands in the corpus, and none stands in two splits of a task. Labels are balanced, all
labels of a task are drawn from the same patterns of sentences, and the second sentence of a pair says everything in
other words where there are any, so that neither length, nor a single word, nor the overlap gives the label away.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from cramming.data.task_files import AX, GLUE, Task
from data_prep.synthetic.lexicon import ADJECTIVES, KINDS
from data_prep.synthetic.speaker import (
    QUESTIONS,
    SLOTS,
    THINGS,
    Fact,
    NothingToSayError,
    Speaker,
    normalise,
    sentence,
)

SIZES = {"train": 800, "dev": 400, "test": 400}
HOUSEHOLD = tuple(name for name in THINGS if KINDS[name].group == "thing")
NATURE = tuple(name for name in THINGS if KINDS[name].group != "thing")
MISTAKES = ("agreement", "agreement", "order")
Kinds = Sequence[str]


class Example(NamedTuple):
    """One row of a task; `second` is empty for single sentences."""

    first: str
    second: str
    label: str


def pair(
    s: Speaker, label: str, first: Callable[[], str], second: Callable[[], str], ends: str = ".."
) -> Example:
    """Two sentences, the second without the words of the first where their meanings have others."""
    first_clause = first()
    s.avoided = s.chosen
    second_clause = second()
    s.avoided = set()
    return Example(sentence(first_clause, ends[0]), sentence(second_clause, ends[1]), label)


def acceptability(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of CoLA: whether a sentence is grammatical."""
    return Example(sentence(s.scene("" if label == "1" else s.pick(MISTAKES))), "", label)


def sentiment(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of SST-2: whether a review is positive."""
    fact = Fact(None, ADJECTIVES["good" if label == "1" else "bad"], s.thing("work"))
    return Example(sentence(s.tell(s.somewhere(fact, s.pick(("place", "time"))))), "", label)


def paraphrase(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of MRPC: whether two sentences say the same."""
    fact = s.pick((s.deed, s.state))(kinds)
    other = fact if label == "1" else replace(fact, meaning=s.pick(fact.possible, fact.meaning))
    return pair(s, label, lambda: s.tell(fact), lambda: s.tell(other))


def same_question(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of QQP: whether two questions ask the same."""
    slot = other_slot = s.pick(SLOTS)
    fact = other = s.deed(kinds)
    if label == "0" and s.chance(0.5):
        other_slot = s.pick(SLOTS, slot)
    elif label == "0":
        other = replace(fact, meaning=s.pick(fact.possible, fact.meaning))
    return pair(s, label, lambda: s.ask(fact, slot), lambda: s.ask(other, other_slot), "??")


def similarity(s: Speaker, label: str, kinds: Kinds) -> Example:
    """STS-B: 0 to 5; the same doer 1 point, the same action 2, the same thing 2 (one of its kind 1)."""
    fact = s.deed(kinds, people=0)
    thing = fact.patient
    agents = (s.person(fact.agent), fact.agent)
    meanings = {0: s.pick(fact.possible, fact.meaning, fact.opposite), 2: fact.meaning}
    things = (s.thing(s.pick(kinds, thing.kind)), s.thing(thing.kind, thing), thing)
    ways = list[Fact]()
    for (i, agent), (j, meaning), (k, patient) in product(
        enumerate(agents), meanings.items(), enumerate(things)
    ):
        if i + j + k == int(label) and patient.group in meaning.groups:
            ways.append(Fact(agent, meaning, patient))
    if not ways:
        raise NothingToSayError
    other = s.pick(ways)
    return pair(s, f"{int(label):.3f}", lambda: s.tell(fact), lambda: s.tell(other))


def inference(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of MNLI: the second sentence follows from the first, contradicts it, or neither."""
    fact = s.pick((s.deed, s.state))(kinds)
    return pair(s, label, lambda: s.tell(fact), lambda: s.claim(fact, label))


def answered(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of QNLI: whether a sentence holds the answer to a question."""
    slot, other = s.shuffled(tuple(QUESTIONS))[:2]
    fact = s.deed(kinds)
    answer = s.somewhere(fact, slot if label == "entailment" else other)
    return pair(s, label, lambda: s.ask(fact, slot), lambda: s.tell(answer), "?.")


def consequence(s: Speaker, label: str, kinds: Kinds) -> Example:
    """Return an example of RTE: whether the second sentence follows, given the kind to which a thing belongs."""
    fact = s.deed(kinds, people=0)
    claimed = fact.general()
    if label == "not_entailment":
        wrong = s.pick(
            [kind for kind in kinds if KINDS[kind].group in fact.meaning.groups], fact.patient.kind
        )
        claimed = replace(claimed, patient=replace(fact.patient, word=wrong, kind=wrong))
    return pair(s, label, lambda: s.tell(fact), lambda: s.tell(claimed, "a"))


TASKS: dict[str, Callable[[Speaker, str, Kinds], Example]] = {
    "cola": acceptability,
    "sst2": sentiment,
    "mrpc": paraphrase,
    "qqp": same_question,
    "stsb": similarity,
    "mnli": inference,
    "qnli": answered,
    "rte": consequence,
}


def examples(name: str, seed: int) -> dict[str, list[Example]]:
    """All splits of a task, by the files' names. MNLI is about household things, its mismatched splits about nature."""
    task, seen = GLUE[name], set[str]()
    splits = {}
    for split in (
        Path(file.file).stem for file in (task.train, *task.scored, *task.blind) if file is not AX
    ):
        kinds = THINGS
        if name == "mnli":
            kinds = NATURE if split.endswith("mismatched") else HOUSEHOLD
        speaker = Speaker(f"{name} {split} {seed}", "train" if split == "train" else "eval")
        splits[split] = draw(task, speaker, SIZES[split.partition("_")[0]], kinds, seen)
    return splits


def draw(task: Task, speaker: Speaker, size: int, kinds: Kinds, seen: set[str]) -> list[Example]:
    """`size` examples, labels in turn, none twice and no sentence that another split has (`seen`, which grows)."""
    drawn: dict[tuple[str, ...], Example] = {}
    labels = task.labels or tuple("012345")
    while len(drawn) < size:
        try:
            example = TASKS[task.name](speaker, labels[len(drawn) % len(labels)], kinds)
        except NothingToSayError:
            continue
        key = tuple(normalise(text) for text in (example.first, example.second) if text)
        if key not in drawn and len(set(key)) == len(key) and not seen.intersection(key):
            drawn[key] = example
    for key in drawn:
        seen.update(key)
    return speaker.shuffled(list(drawn.values()))


def write_tasks(folder: Path, seed: int) -> None:
    """Write the eight tasks as `CoLA/train.tsv` and so on: test files have an index and no label."""
    for name in TASKS:
        task = GLUE[name]
        (folder / task.train.folder).mkdir(parents=True)
        for split, rows in examples(name, seed).items():
            labelled = not split.startswith("test")
            columns = task.headerless if labelled else ()
            columns = columns or ("index", *task.text, *([task.label] if labelled else []))
            lines = [] if labelled and task.headerless else [columns]
            for number, row in enumerate(rows):
                cells = dict(zip(task.text, (row.first, row.second))) | {
                    task.label: row.label,
                    "index": str(number),
                }
                lines.append(tuple(cells.get(column, "") for column in columns))
            text = "".join("\t".join(line) + "\n" for line in lines)
            (folder / task.train.folder / f"{split}.tsv").write_text(text, encoding="utf-8")

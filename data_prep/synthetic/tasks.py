"""Eight small tasks about the embedded world, one of each GLUE type.

The training examples use the first half of every word list, the dev and test examples the second half: what has to be
learnt in fine-tuning is the question, what has to be known already is the words. Every correct sentence of every split
comes from the share that is reserved for tasks (`grammar.reserved`), so none of them stands in the corpus, and none
stands in two splits of a task. Labels are balanced, all labels of a task are drawn from the same sentence patterns, and
the second sentence of a pair says everything in other words than the first where there are any, so that neither the
length, nor a single word, nor the overlap of a pair gives the label away.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, cast

from data_prep.synthetic import lexicon
from data_prep.synthetic.documents import claim, general
from data_prep.synthetic.grammar import Deed, State, normalise, reserved, sentence
from data_prep.synthetic.lexicon import ACTIONS, KINDS
from data_prep.synthetic.patterns import MISTAKES, opinion, present
from data_prep.synthetic.speaker import ALL_KINDS, Speaker, actions_for, scales_for

SIZES = {"train": 800, "dev": 400, "test": 400}
HOUSEHOLD = tuple(name for name, kind in KINDS.items() if kind.group == "thing")
NATURE = tuple(name for name, kind in KINDS.items() if kind.group != "thing")


class Example(NamedTuple):
    first: str
    second: str | None
    label: str
    genre: str = "world"


class NotFoundError(Exception):
    """No unused sentence of this shape came up; the example is drawn again."""


def fresh(make: Callable[[], str], end: str = ".") -> str:
    """A sentence from the share that the corpus never uses."""
    for _ in range(30):
        clause = make()
        if reserved(clause):
            return sentence(clause, end)
    raise NotFoundError


def pair(s: Speaker, label: str, first: Callable[[], str], second: Callable[[], str], ends: str = "..") -> Example:
    def anew() -> str:
        s.forget()
        return first()

    one = fresh(anew, ends[0])
    s.avoid_said()
    return Example(one, fresh(second, ends[1]), label)


def acceptability(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    if label == "1":
        return Example(fresh(lambda: present(s)), None, label)
    return Example(sentence(present(s, s.pick(MISTAKES))), None, label)


def sentiment(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    return Example(fresh(lambda: opinion(s, label == "1", s.pick(tuple(lexicon.REVIEWED)))), None, label)


def paraphrase(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    fact = s.fact(kinds)
    other = fact if label == "1" else spoiled(s, fact)
    return pair(s, label, lambda: s.tell(fact), lambda: s.tell(other))


def spoiled(s: Speaker, fact: State | Deed) -> State | Deed:
    """The fact with one thing changed."""
    if isinstance(fact, State):
        if s.chance(0.5):
            return replace(fact, high=not fact.high)
        return replace(fact, scale=s.other(scales_for(fact.entity), fact.scale))
    if s.chance(0.1):
        return replace(
            fact, patient=s.person(fact.agent, fact.patient) if fact.patient.is_person else s.sister(fact.patient)
        )
    return replace(fact, action=s.other(actions_for(fact.patient.kind), fact.action))


def question_pair(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    slots = ("agent", "patient", "place", "time")
    slot = again = s.pick(slots)
    deed = other = s.deed(kinds)
    if label == "0" and s.chance(0.5):
        again = s.other(slots, slot)
    elif label == "0":
        other = replace(deed, action=s.other(actions_for(deed.patient.kind), deed.action))
    return pair(s, label, lambda: s.ask(deed, slot), lambda: s.ask(other, again), "??")


def similarity(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    """Score 0 to 5: the same doer 1 point, the same action 2, the same thing 2 (one of its kind 1)."""
    base = s.deed(kinds, people=0)
    thing = base.patient
    doer, same = [(s.person(base.agent), 0), (base.agent, 1)], (base.action, 2)
    action = [(s.other(actions_for(thing.kind), base.action, ACTIONS[base.action].opposite), 0), same]
    alien = s.thing(s.other(kinds, thing.kind), 0)
    objects = [(replace(alien, plural=thing.plural), 0), (s.sister(thing), 1), (thing, 2)]
    ways = [
        Deed(d, a, o)
        for d, i in doer
        for a, j in action
        for o, k in objects
        if i + j + k == int(label) and base.action in actions_for(o.kind) and a in actions_for(o.kind)
    ]
    if not ways:
        raise NotFoundError
    other = s.pick(ways)
    return pair(s, f"{int(label):.3f}", lambda: s.tell(base), lambda: s.tell(other))


def inference(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    fact = s.fact(kinds)
    verdict = {"entailment": "right", "contradiction": "wrong", "neutral": "open"}[label]
    example = pair(s, label, lambda: s.tell(fact), lambda: claim(s, fact, verdict))
    return example._replace(genre="household" if kinds == HOUSEHOLD else "nature")


def answered(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    """Does the sentence hold the answer to the question?"""
    slot, lacking = s.shuffled(("place", "time", "partner"))[:2]
    deed = s.deed(kinds)
    told = {"place": s.word(lexicon.TOWNS), "time": s.time(), "partner": s.person(deed.agent, deed.patient)}
    filled = slot if label == "entailment" else lacking
    answer = replace(deed, **cast(dict[str, Any], {filled: told[filled]}))
    return pair(s, label, lambda: s.ask(deed, slot), lambda: s.tell(answer), "?.")


def consequence(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    """Does the second follow from the first, given what kind of thing something is?"""
    deed = s.deed(kinds, people=0)
    claimed = general(deed)
    assert isinstance(claimed, Deed)
    if label == "not_entailment":
        wrong = s.other(tuple(k for k in kinds if deed.action in actions_for(k)), deed.patient.kind)
        claimed = replace(claimed, patient=replace(claimed.patient, word=wrong, kind=wrong))
    return pair(s, label, lambda: s.tell(deed), lambda: s.tell(claimed, "a"))


class Task(NamedTuple):
    folder: str
    labels: tuple[str, ...]
    build: Callable[[Speaker, str, tuple[str, ...]], Example]


BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
TASKS: dict[str, Task] = {
    "cola": Task("CoLA", BINARY, acceptability),
    "sst2": Task("SST-2", BINARY, sentiment),
    "mrpc": Task("MRPC", BINARY, paraphrase),
    "qqp": Task("QQP", BINARY, question_pair),
    "stsb": Task("STS-B", ("0", "1", "2", "3", "4", "5"), similarity),
    "mnli": Task("MNLI", ("entailment", "neutral", "contradiction"), inference),
    "qnli": Task("QNLI", ENTAILMENT, answered),
    "rte": Task("RTE", ENTAILMENT, consequence),
}


def examples(task: str, seed: int) -> dict[str, list[Example]]:
    """All splits of a task. MNLI has two dev and two test splits, about household things and about nature."""
    domains = {"": ALL_KINDS} if task != "mnli" else {"_matched": HOUSEHOLD, "_mismatched": NATURE}
    seen: set[str] = set()
    splits = {}
    for split, size in SIZES.items():
        for suffix, kinds in domains.items():
            if split == "train" and suffix == "_mismatched":
                continue
            name = split if split == "train" else split + suffix
            speaker = Speaker(Random(f"{task} {name} {seed}"), "train" if split == "train" else "eval")
            splits[name] = draw(TASKS[task], speaker, size, kinds, seen)
    return splits


def draw(task: Task, speaker: Speaker, size: int, kinds: tuple[str, ...], seen: set[str]) -> list[Example]:
    """`size` examples, labels in turn, none twice and no sentence that another split has (`seen`, which grows)."""
    found: dict[tuple[str, ...], Example] = {}
    while len(found) < size:
        try:
            example = task.build(speaker, task.labels[len(found) % len(task.labels)], kinds)
        except NotFoundError:
            continue
        key = tuple(normalise(text) for text in (example.first, example.second) if text)
        if key not in found and len(set(key)) == len(key) and not seen.intersection(key):
            found[key] = example
    seen.update(text for key in found for text in key)
    return speaker.shuffled(list(found.values()))

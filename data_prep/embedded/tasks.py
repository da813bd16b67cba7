"""Eight small tasks about the embedded world, one of each GLUE type, in GLUE's own TSV layouts.

The training examples use the first half of every word list, the dev and test examples the second half: what has to be
learnt in fine-tuning is the question, what has to be known already is the words. Every sentence of every split comes
from the share that is reserved for tasks (`grammar.reserved`), so none of them stands in the corpus, and none stands in
two splits of a task. Labels are balanced, and both labels of a task are drawn from the same sentence patterns.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from data_prep.embedded import lexicon
from data_prep.embedded.documents import claim_about, general
from data_prep.embedded.grammar import Deed, Speaker, State, normalise, reserved, sentence
from data_prep.embedded.lexicon import ACTIONS, KINDS

SIZES = {"train": 800, "dev": 300, "test": 300}
HOUSEHOLD = tuple(name for name, kind in KINDS.items() if kind.group == "thing")
NATURE = tuple(name for name, kind in KINDS.items() if kind.group in ("animal", "plant", "food"))


class Example(NamedTuple):
    first: str
    second: str | None
    label: str
    genre: str = "household"


class NotFound(Exception):
    """No unused sentence of this shape came up; the example is drawn again."""


def fresh(make: Callable[[], str]) -> str:
    """A sentence from the share that the corpus never uses."""
    for _ in range(60):
        text = make()
        if reserved(text):
            return text
    raise NotFound


def fact(s: Speaker, kinds: tuple[str, ...], extras: float = 0.0) -> State | Deed:
    return s.state(kinds=kinds) if s.chance(0.5) else s.deed(kinds=kinds, extras=extras)


def acceptability(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    if label == "1":
        return Example(sentence(fresh(lambda: s.present())), None, label)
    return Example(sentence(s.present(error=True)), None, label)


def sentiment(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    return Example(fresh(lambda: s.opinion(label == "1", s.pick(tuple(lexicon.REVIEWED)))), None, label)


def paraphrase(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    base = fact(s, kinds, extras=0.3)
    other = base
    if label == "0":
        other = spoiled(s, base, kinds)
    return Example(sentence(fresh(lambda: s.tell(base))), sentence(fresh(lambda: s.tell(other))), label)


def spoiled(s: Speaker, base: State | Deed, kinds: tuple[str, ...]) -> State | Deed:
    """The fact with one thing changed."""
    if isinstance(base, State):
        scales = lexicon.PERSON_SCALES if base.entity.is_person else KINDS[base.entity.kind].scales
        return (
            replace(base, high=not base.high)
            if s.chance(0.5)
            else replace(base, scale=s.pick(tuple(x for x in scales if x != base.scale)))
        )
    if base.patient.is_person and s.chance(0.3):
        return replace(base, agent=base.patient, patient=base.agent)
    if not base.patient.is_person and s.chance(0.3):
        return replace(
            base,
            patient=replace(
                base.patient, word=s.word(tuple(m for m in KINDS[base.patient.kind].members if m != base.patient.word))
            ),
        )
    group = "person" if base.patient.is_person else KINDS[base.patient.kind].group
    names = tuple(name for name, action in ACTIONS.items() if group in action.objects and name != base.action)
    return replace(base, action=s.pick(names))


def question_pair(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    slots = ("agent", "patient", "place", "time")
    slot = s.pick(slots)
    base = s.deed(kinds=kinds, extras=0)
    other, other_slot = base, slot
    if label == "0":
        if s.chance(0.5):
            other_slot = s.pick(tuple(x for x in slots if x != slot))
        else:
            group = "person" if base.patient.is_person else KINDS[base.patient.kind].group
            other = replace(
                base, action=s.pick(tuple(n for n, a in ACTIONS.items() if group in a.objects and n != base.action))
            )
    return Example(
        sentence(fresh(lambda: s.ask(base, slot)), "?"), sentence(fresh(lambda: s.ask(other, other_slot)), "?"), label
    )


def similarity(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    """Score 0 to 5: how much of who, what, to what is shared (a sister word of the same kind counts half)."""
    target = int(label)
    base = s.deed(kinds=kinds, extras=0)
    while base.patient.is_person:
        base = s.deed(kinds=kinds, extras=0)
    agent, action, patient = base.agent, base.action, base.patient
    stranger = s.person(agent)
    sister = replace(patient, word=s.word(tuple(m for m in KINDS[patient.kind].members if m != patient.word)))
    group = KINDS[patient.kind].group
    act = s.pick(tuple(n for n, a in ACTIONS.items() if group in a.objects and n != action))
    alien_kind = s.pick(tuple(n for n in kinds if n != patient.kind and KINDS[n].group == group) or (patient.kind,))
    alien = replace(patient, word=s.word(KINDS[alien_kind].members), kind=alien_kind)
    # same agent 1 point, same action 2 points, same object 2 points (same kind 1)
    options = {
        5: [(agent, action, patient)],
        4: [(stranger, action, patient), (agent, action, sister)],
        3: [(agent, act, patient), (agent, action, alien), (stranger, action, sister)],
        2: [(stranger, act, patient), (agent, act, sister), (stranger, action, alien)],
        1: [(agent, act, alien), (stranger, act, sister)],
        0: [(stranger, act, alien)],
    }
    other = replace(base, **dict(zip(("agent", "action", "patient"), s.pick(options[target]))))
    return Example(sentence(fresh(lambda: s.tell(base))), sentence(fresh(lambda: s.tell(other))), f"{target:.3f}")


def inference(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    base = fact(s, kinds)
    verdict = {"entailment": "right", "contradiction": "wrong", "neutral": "open"}[label]
    return Example(sentence(fresh(lambda: s.tell(base))), sentence(fresh(lambda: claim_about(s, base, verdict))), label)


def answered(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    """Does the sentence hold the answer to the question?"""
    slot, lacking = s.shuffled(["place", "time", "partner"])[:2]
    deed = s.deed(kinds=kinds, extras=0)
    filled = slot if label == "entailment" else lacking
    value = {"place": s.word(lexicon.TOWNS), "time": s.time(), "partner": s.person(deed.agent, deed.patient)}[filled]
    told = replace(deed, **{filled: value})
    return Example(sentence(fresh(lambda: s.ask(deed, slot)), "?"), sentence(fresh(lambda: s.tell(told))), label)


def consequence(s: Speaker, label: str, kinds: tuple[str, ...]) -> Example:
    """What follows from knowing kinds of things and where towns lie."""
    while True:
        deed = s.deed(kinds=kinds, extras=0.3)
        if not deed.patient.is_person:
            break
    claim = general(deed)
    if label == "not_entailment":
        kind = s.pick(
            tuple(k for k in KINDS if k != deed.patient.kind and KINDS[k].group in ACTIONS[deed.action].objects)
            or tuple(KINDS)
        )
        claim = replace(claim, patient=replace(claim.patient, word=kind))
    return Example(sentence(fresh(lambda: s.tell(deed))), sentence(fresh(lambda: s.tell(claim, "a"))), label)


class Task(NamedTuple):
    folder: str
    labels: tuple[str, ...]
    build: Callable[[Speaker, str, tuple[str, ...]], Example]


TASKS: dict[str, Task] = {
    "cola": Task("CoLA", ("0", "1"), acceptability),
    "sst2": Task("SST-2", ("0", "1"), sentiment),
    "mrpc": Task("MRPC", ("0", "1"), paraphrase),
    "qqp": Task("QQP", ("0", "1"), question_pair),
    "stsb": Task("STS-B", ("0", "1", "2", "3", "4", "5"), similarity),
    "mnli": Task("MNLI", ("entailment", "neutral", "contradiction"), inference),
    "qnli": Task("QNLI", ("entailment", "not_entailment"), answered),
    "rte": Task("RTE", ("entailment", "not_entailment"), consequence),
}


def examples(task: str, seed: int) -> dict[str, list[Example]]:
    """All splits of a task; MNLI has two dev and two test splits, of things at home and of things in nature."""
    genres = {"": NATURE + HOUSEHOLD} if task != "mnli" else {"_matched": HOUSEHOLD, "_mismatched": NATURE}
    seen: set[str] = set()
    splits = {}
    for split, size in SIZES.items():
        for suffix, kinds in genres.items():
            if split == "train" and suffix == "_mismatched":
                continue
            name = split if split == "train" else split + suffix
            splits[name] = draw(
                TASKS[task],
                Speaker(Random(f"{task} {name} {seed}"), "train" if split == "train" else "eval"),
                size,
                kinds,
                seen,
            )
    return splits


def draw(task: Task, speaker: Speaker, size: int, kinds: tuple[str, ...], seen: set[str]) -> list[Example]:
    found: list[Example] = []
    mine: set[str] = set()
    while len(found) < size:
        try:
            example = task.build(speaker, task.labels[len(found) % len(task.labels)], kinds)
        except NotFound:
            continue
        keys = [normalise(text) for text in (example.first, example.second) if text]
        if any(key in seen for key in keys) or " | ".join(keys) in mine or len(set(keys)) < len(keys):
            continue
        mine.add(" | ".join(keys))
        mine.update(keys)
        found.append(example)
    seen |= mine
    return speaker.shuffled(found)

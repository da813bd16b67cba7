"""Facts, and the sentences that a speaker makes of them.

A fact says in meanings, not in words, who did what or what is how. It comes out as "Anna purchased a violin in Ashford"
or "The violin was acquired by Anna in Ashford": that is what makes paraphrases, questions and inferences come for free,
for the corpus and for the tasks alike.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, TypeVar

from data_prep.synthetic import lexicon
from data_prep.synthetic.lexicon import ADJECTIVES, KINDS, TOWNS, VERBS, Meaning, Words

T = TypeVar("T")
RESERVED_SHARE = 5  # every fifth sentence, by hash, is for the tasks, the others are for the corpus
TRIES = 8
COMPANY = 0.7  # share of the corpus's clauses in which a word has the company of its meaning
THINGS = tuple(name for name in KINDS if name != "work")
QUESTIONS = {
    "place": ("where", "in which town"),
    "time": ("when", "at what time"),
    "partner": ("with whom", "together with whom"),
}
SLOTS = ("agent", "patient", *QUESTIONS)
VERDICTS = ("entailment", "neutral", "contradiction")  # what a claim is, given a fact


class NothingToSayError(Exception):
    """No sentence came up that this speaker may use; the caller draws another fact."""


def normalise(sentence: str) -> str:
    """Lower case, words only: two sentences with the same normal form count as the same."""
    return " ".join(re.findall(r"[a-z0-9]+", sentence.lower()))


def sentence(clause: str, end: str = ".") -> str:
    """With a capital and an end."""
    return clause[0].upper() + clause[1:] + end


def article(noun: str) -> str:
    """Return a noun with its indefinite article: `an owl`."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def plural(word: str) -> str:
    """Return the plural of a noun, or the third person of a verb."""
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def past(verb: str) -> str:
    """Also the participle."""
    return verb + ("d" if verb.endswith("e") else "ed")


@dataclass(frozen=True)
class Entity:
    """A person ("Anna", kind person) or a thing ("robin", kind bird); `group` is what a meaning can be said of."""

    word: str
    kind: str
    pronouns: tuple[str, str] = ("it", "it")  # subject and object

    @property
    def group(self) -> str:
        return KINDS[self.kind].group if self.kind in KINDS else "person"

    def phrase(self, determiner: str = "the", trait: str = "") -> str:
        """`Anna`, `the robin`, `a feathered robin`."""
        if self.kind == "person":
            return self.word
        noun = f"{trait} {self.word}".strip()
        return article(noun) if determiner == "a" else f"the {noun}"


@dataclass(frozen=True)
class Fact:
    """`agent` did `meaning` to `patient`; without an agent, `patient` was `meaning`."""

    agent: Entity | None
    meaning: Meaning
    patient: Entity
    circumstances: dict[str, str] = field(
        default_factory=dict
    )  # {"place": "in Ashford"}, of `QUESTIONS`

    @property
    def possible(self) -> list[Meaning]:
        """All meanings that could be in the place of this one."""
        table = VERBS if self.agent else ADJECTIVES
        return [meaning for meaning in table.values() if self.patient.group in meaning.groups]

    @property
    def opposite(self) -> Meaning:
        return (VERBS if self.agent else ADJECTIVES)[self.meaning.opposite]

    def general(self) -> "Fact":
        """Return a fact that follows: a thing by the name of its kind ("the bird"), without circumstances."""
        patient = (
            self.patient
            if self.patient.kind == "person"
            else replace(self.patient, word=self.patient.kind)
        )
        return Fact(self.agent, self.meaning, patient)


class Speaker:
    """Draws facts and puts them into words of one `half` of each list.

    `train` and `eval` make plain sentences for tasks, of the reserved share; `all` makes those of the corpus, where
    words have company, and which are not reserved.
    """

    def __init__(self, seed: str, half: Literal["all", "train", "eval"]) -> None:
        self._rng, self._half = Random(seed), half
        self.chosen: set[str] = set()  # words of the last clause
        self.avoided: set[str] = set()  # words not to choose where a meaning has others

    def pick(self, items: Sequence[T], *not_these: T) -> T:
        """One of the others."""
        items = [item for item in items if item not in not_these] if not_these else items
        return items[int(self._rng.random() * len(items))]

    def chance(self, share: float) -> bool:
        """Return True in this share of the calls."""
        return self._rng.random() < share

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """In another order."""
        return sorted(items, key=lambda _: self._rng.random())

    def word(self, words: Words) -> str:
        """One of the words of this speaker's half."""
        middle = (len(words) + 1) // 2
        halves = {"all": words, "train": words[:middle]}
        half = halves.get(self._half, words[middle:])
        if self.avoided:
            half = tuple(word for word in half if word not in self.avoided) or half
        choice = self.pick(half)
        self.chosen.add(choice)
        return choice

    def clause(self, make: Callable[[], str]) -> str:
        """Return a clause of `make` that this speaker may use, without capital and full stop."""
        for _ in range(TRIES):
            self.chosen = set()
            clause = make()
            is_reserved = (
                zlib.crc32(clause.encode()) % RESERVED_SHARE == 0
            )  # the same on any platform
            if is_reserved == (self._half != "all"):
                return clause
        raise NothingToSayError

    def person(self, *others: Entity | None) -> Entity:
        """Somebody else."""
        names, pronouns = self.pick(((lexicon.WOMEN, ("she", "her")), (lexicon.MEN, ("he", "him"))))
        person = Entity(self.word(names), "person", pronouns)
        return self.person(*others) if person in others else person

    def thing(self, kind: str, *others: Entity) -> Entity:
        """Another thing of this kind."""
        thing = Entity(self.word(KINDS[kind].members), kind)
        return self.thing(kind, *others) if thing in others else thing

    def deed(self, kinds: Sequence[str] = THINGS, people: float = 0.3) -> Fact:
        """Somebody does something to a person (in a share `people` of the cases) or to a thing of one of `kinds`."""
        agent = self.person()
        fact = Fact(
            agent,
            VERBS["like"],
            self.person(agent) if self.chance(people) else self.thing(self.pick(kinds)),
        )
        return replace(fact, meaning=self.pick(fact.possible))

    def state(self, kinds: Sequence[str] = THINGS) -> Fact:
        """Return a state of a person or a thing."""
        fact = Fact(
            None,
            ADJECTIVES["big"],
            self.person() if self.chance(0.4) else self.thing(self.pick(kinds)),
        )
        return replace(fact, meaning=self.pick(fact.possible))

    def somewhere(self, fact: Fact, *slots: str) -> Fact:
        """Return the fact with circumstances: a place, a time, a partner."""
        circumstances = {
            "place": f"in {self.word(TOWNS)}",
            "time": self.pick((f"on {self.word(lexicon.DAYS)}", f"in {self.word(lexicon.MONTHS)}")),
            "partner": f"with {self.person(fact.agent, fact.patient).word}",
        }
        chosen = {slot: circumstances[slot] for slot in QUESTIONS if slot in slots}
        return replace(fact, circumstances=chosen)

    def tell(self, fact: Fact, determiner: str = "the") -> str:
        """Return a clause that says the fact."""
        return self.clause(
            lambda: self._deed(fact, fact.agent, determiner) if fact.agent else self._state(fact)
        )

    def _state(self, fact: Fact) -> str:
        word = self.word(fact.meaning.words)
        if self._half == "all" and self.chance(COMPANY):
            words = self.pick(fact.meaning.company).format(w=word)
        elif self.chance(0.7):
            words = self.pick(("", "", "very ", "really ", "quite ")) + word
        else:
            words = (
                f"{self.pick(('not', 'anything but', 'far from'))} {self.word(fact.opposite.words)}"
            )
        return " ".join([fact.patient.phrase(), "was", words, *fact.circumstances.values()])

    def _deed(self, fact: Fact, agent: Entity, determiner: str) -> str:
        verb, company, trait = past(self.word(fact.meaning.words)), "", ""
        if self._half == "all" and self.chance(COMPANY):
            company = self.pick(fact.meaning.company).removeprefix("{w}")
            if fact.patient.kind in KINDS and self.chance(0.4):
                trait = self.pick(KINDS[fact.patient.kind].company)
        patient = fact.patient.phrase(determiner, trait)
        active, passive = f"{agent.word} {verb} {patient}", f"{patient} was {verb} by {agent.word}"
        return (
            " ".join([self.pick((active, active, passive)), *fact.circumstances.values()]) + company
        )

    def ask(self, fact: Fact, slot: str) -> str:
        """Return a question about one of `SLOTS` of a deed, without question mark."""
        return self.clause(lambda: self.pick(self._questions(fact, slot)))

    def _questions(self, fact: Fact, slot: str) -> tuple[str, str]:
        assert fact.agent is not None
        verb, agent, patient = self.word(fact.meaning.words), fact.agent.word, fact.patient.phrase()
        if slot == "agent":
            return f"who {past(verb)} {patient}", f"by whom was {patient} {past(verb)}"
        if slot == "patient":
            who = "who" if fact.patient.kind == "person" else "what"
            return f"{who} did {agent} {verb}", f"{who} was {past(verb)} by {agent}"
        when = self.pick(QUESTIONS[slot])
        return (
            f"{when} did {agent} {verb} {patient}",
            f"{when} was {patient} {past(verb)} by {agent}",
        )

    def claim(self, fact: Fact, verdict: str) -> str:
        """Return a clause that has one of `VERDICTS`, given the fact."""
        claimed = replace(fact.general() if self.chance(0.3) else fact, circumstances={})
        if verdict == "contradiction":
            claimed = replace(claimed, meaning=fact.opposite)
        elif verdict == "neutral":
            claimed = replace(
                claimed, meaning=self.pick(fact.possible, fact.meaning, fact.opposite)
            )
        return self.tell(claimed)

    def hint(self, fact: Fact) -> str:
        """Return a sentence that goes with the meaning of a fact, whatever its words."""
        (subject, object_), it = (fact.agent or fact.patient).pronouns, fact.patient.phrase()
        return fact.meaning.hint.format(
            S=subject.capitalize(), o=object_, it=it, It=sentence(it, "")
        )

    def scene(self, mistake: str = "") -> str:
        """Who does what now; `mistake` (agreement, order) makes it ungrammatical."""
        return self.clause(lambda: " ".join(self._scene(mistake)))

    def _scene(self, mistake: str) -> list[str]:
        many = self.chance(0.5)
        noun = self.word(
            self.pick((lexicon.JOBS, lexicon.JOBS, KINDS["bird"].members, KINDS["insect"].members))
        )
        near = self.word(
            KINDS[self.pick(("tree", "vehicle"))].members
        )  # the verb does not agree with this one
        near = f"{self.pick(('near', 'behind'))} the {self.pick((near, plural(near)))}"
        words = ["the", plural(noun) if many else noun, *[near] * self.chance(0.4)]
        verbs, company = self.pick(lexicon.MOVES)
        verb, many = self.word(verbs), many != (mistake == "agreement")
        negated, going = (
            ["does", "do"][many] + f" not {verb}",
            ["is", "are"][many] + f" {verb.removesuffix('e')}ing",
        )
        words += [
            self.pick((verb if many else plural(verb), negated, going)),
            f"in {self.word(TOWNS)}",
        ]
        if self.chance(0.7):
            words[-1] = self.pick(company)
        if mistake == "order":
            words = " ".join(words).split()
            at = int(self._rng.random() * (len(words) - 1))
            words[at], words[at + 1] = words[at + 1], words[at]
        return words

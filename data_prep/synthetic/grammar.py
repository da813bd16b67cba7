"""English for the embedded world: inflection, noun phrases, and the facts that sentences are about.

A fact says in meanings, not in words, who did what (`Deed`) or what is how (`State`); `speaker` puts it into words.
"""

import re
import zlib
from dataclasses import dataclass
from functools import cache

from data_prep.synthetic.lexicon import DOUBLING, IRREGULAR_PLURALS, IRREGULAR_VERBS

RESERVED_SHARE = 5  # every fifth sentence, by hash, is kept out of the corpus for the tasks


def normalise(sentence: str) -> str:
    """Lower case, words only: two sentences with the same normal form count as the same text."""
    return " ".join(re.findall(r"[a-z0-9]+", sentence.lower()))


def reserved(sentence: str) -> bool:
    """True for the sentences that only the tasks may use; a pure function of the words, on any platform."""
    return zlib.crc32(normalise(sentence).encode()) % RESERVED_SHARE == 0


@cache
def plural(noun: str) -> str:
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


@cache
def third_person(verb: str) -> str:
    return plural(verb)


@cache
def past(verb: str) -> str:
    if verb in IRREGULAR_VERBS:
        return IRREGULAR_VERBS[verb][0]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if verb in DOUBLING else "") + "ed"


@cache
def participle(verb: str) -> str:
    return IRREGULAR_VERBS[verb][1] if verb in IRREGULAR_VERBS else past(verb)


@cache
def gerund(verb: str) -> str:
    if verb.endswith("e") and not verb.endswith("ee"):
        return verb[:-1] + "ing"
    return verb + (verb[-1] if verb in DOUBLING else "") + "ing"


def article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def sentence(clause: str, end: str = ".") -> str:
    return clause[0].upper() + clause[1:] + end


@dataclass(frozen=True)
class Entity:
    """A person ("Anna", kind person) or a thing ("lamp", kind device), one or several."""

    word: str
    kind: str
    female: bool = False
    plural: bool = False

    @property
    def is_person(self) -> bool:
        return self.kind == "person"

    def phrase(self, determiner: str = "the", word: str | None = None) -> str:
        """`Anna`, `the lamp`, `a lamp`, `some lamps`; `word` stands in for the noun."""
        if self.is_person:
            return self.word
        noun = word or self.word
        if self.plural:
            head, _, last = noun.rpartition(" ")
            return f"{'some' if determiner == 'a' else determiner} {head + ' ' if head else ''}{plural(last)}"
        return article(noun) if determiner == "a" else f"{determiner} {noun}"

    @property
    def pronouns(self) -> tuple[str, str, str]:
        """Subject, object, possessive."""
        if self.plural:
            return "they", "them", "their"
        if self.is_person:
            return ("she", "her", "her") if self.female else ("he", "him", "his")
        return "it", "it", "its"

    @property
    def was(self) -> str:
        return "were" if self.plural else "was"


@dataclass(frozen=True)
class State:
    """An entity lies at one pole of a scale: the lamp was heavy."""

    entity: Entity
    scale: str
    high: bool


@dataclass(frozen=True)
class Deed:
    """Somebody did something to something, perhaps somewhere, at some time, with somebody."""

    agent: Entity
    action: str
    patient: Entity
    place: str | None = None
    time: str | None = None
    partner: Entity | None = None
    colour: str | None = None

    @property
    def tail(self) -> str:
        parts = [
            f"with {self.partner.word}" if self.partner else "",
            f"in {self.place}" if self.place else "",
            self.time or "",
        ]
        return "".join(" " + part for part in parts if part)

    def object(self, determiner: str) -> str:
        return self.patient.phrase(determiner, f"{self.colour} {self.patient.word}" if self.colour else None)

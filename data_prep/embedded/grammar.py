"""English for the embedded world: inflection, noun phrases, and a speaker who puts facts into words.

A fact says who did what or what is how, in meanings; a `Speaker` chooses words, voice and order for it. So the same
fact comes out as "Anna bought a lamp in Ashford" or "In Ashford, the lamp was acquired by Anna": that is what makes
paraphrases, questions and inferences come for free, for the corpus and for the tasks alike.
"""

import re
import zlib
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeVar

from data_prep.embedded import lexicon
from data_prep.embedded.lexicon import ACTIONS, DOUBLING, IRREGULAR_PLURALS, IRREGULAR_VERBS, KINDS, SCALES

T = TypeVar("T")
RESERVED_SHARE = 5  # every fifth sentence, by hash, is kept out of the corpus for the tasks


def normalise(sentence: str) -> str:
    """Lower case, words only: two sentences with the same normal form count as the same text."""
    return " ".join(re.findall(r"[a-z0-9]+", sentence.lower()))


@cache
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
        """`Anna`, `the lamp`, `a lamp`, `some lamps`; `word` stands in for the noun (a kind or an adjective before it)."""
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
    """Somebody did something to something, perhaps somewhere, at some time, with somebody; the thing may have a colour."""

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


class Speaker:
    """Chooses words with `rng`; `which` limits the choice to the train or the eval half of every word list."""

    def __init__(self, rng: Random, which: str = "all") -> None:
        self.rng = rng
        self.which = which
        self._parts: dict[tuple[str, ...], tuple[str, ...]] = {}

    def pick(self, items: "tuple[T, ...] | list[T]") -> T:
        return items[int(self.rng.random() * len(items))]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def word(self, words: tuple[str, ...]) -> str:
        """One of the words of a meaning, from this speaker's half."""
        half = self._parts.get(words)
        if half is None:
            half = self._parts[words] = lexicon.part(words, self.which)
        return self.pick(half)

    def shuffled(self, items: "list[T]") -> "list[T]":
        return [items[index] for _, index in sorted((self.rng.random(), index) for index in range(len(items)))]

    # entities -----------------------------------------------------------------------------------------------------
    def person(self, *others: Entity) -> Entity:
        while True:
            female = self.chance(0.5)
            name = self.word(lexicon.WOMEN if female else lexicon.MEN)
            if all(name != other.word for other in others):
                return Entity(name, "person", female)

    def thing(self, kind: str, plural_share: float = 0.2) -> Entity:
        return Entity(self.word(KINDS[kind].members), kind, False, self.chance(plural_share))

    def patient(self, action: str, agent: Entity, kinds: "tuple[str, ...] | None" = None) -> Entity:
        """Something the action can be done to (of one of `kinds`, where given)."""
        groups = ACTIONS[action].objects
        names = self.kinds_for(action, kinds)
        if not names or ("person" in groups and self.chance(1 / len(groups))):
            return self.person(agent)
        return self.thing(self.pick(names))

    def kinds_for(self, action: str, kinds: "tuple[str, ...] | None") -> tuple[str, ...]:
        return tuple(
            name
            for name, kind in KINDS.items()
            if kind.group in ACTIONS[action].objects and (kinds is None or name in kinds)
        )

    def time(self) -> str:
        if self.chance(0.5):
            return "on " + self.word(lexicon.DAYS)
        return "in " + self.word(lexicon.MONTHS)

    def deed(self, action: str | None = None, kinds: "tuple[str, ...] | None" = None, extras: float = 0.4) -> Deed:
        name = action or self.pick(
            tuple(a for a in ACTIONS if "person" in ACTIONS[a].objects or self.kinds_for(a, kinds))
        )
        agent = self.person()
        patient = self.patient(name, agent, kinds)
        return Deed(
            agent,
            name,
            patient,
            self.word(lexicon.TOWNS) if self.chance(extras) else None,
            self.time() if self.chance(extras) else None,
            self.person(agent, patient) if self.chance(extras / 2) else None,
            self.word(lexicon.COLOURS) if not patient.is_person and self.chance(extras / 2) else None,
        )

    def state(self, entity: Entity | None = None, kinds: "tuple[str, ...] | None" = None) -> State:
        if entity is None:
            entity = self.thing(self.pick(kinds)) if kinds and self.chance(0.7) else self.person()
        scales = lexicon.PERSON_SCALES if entity.is_person else KINDS[entity.kind].scales
        return State(entity, self.pick(scales), self.chance(0.5))

    # clauses ------------------------------------------------------------------------------------------------------
    def adjective(self, scale: str, high: bool) -> str:
        return self.word(SCALES[scale][high].words)

    def tell(self, fact: "State | Deed", determiner: str = "the") -> str:
        """The fact as a clause, without capital and full stop."""
        return self.tell_state(fact) if isinstance(fact, State) else self.tell_deed(fact, determiner)

    def tell_state(self, fact: State, negated: bool = False) -> str:
        adverb = "not " if negated else self.pick(("", "", "", "very ", "quite ", "really "))
        return f"{fact.entity.phrase()} {fact.entity.was} {adverb}{self.adjective(fact.scale, fact.high)}"

    def tell_deed(self, fact: Deed, determiner: str = "the", passive: float = 0.3) -> str:
        verb, agent, tail = self.word(ACTIONS[fact.action].words), fact.agent.word, fact.tail
        draw = self.rng.random()
        if draw < passive:
            return f"{fact.object(determiner)} {fact.patient.was} {participle(verb)} by {agent}{tail}"
        if draw < passive + 0.1:
            return f"it was {agent} who {past(verb)} {fact.object(determiner)}{tail}"
        if draw < passive + 0.2 and tail and fact.partner is None:
            return f"{tail[1:]}, {agent} {past(verb)} {fact.object(determiner)}"
        return f"{agent} {past(verb)} {fact.object(determiner)}{tail}"

    def deny_deed(self, fact: Deed) -> str:
        verb = self.word(ACTIONS[fact.action].words)
        if self.chance(0.3):
            return f"{fact.object('the')} {fact.patient.was} not {participle(verb)} by {fact.agent.word}"
        return f"{fact.agent.word} did not {verb} {fact.object('the')}"

    def ask(self, fact: Deed, slot: str) -> str:
        """A question about one slot of a deed (agent, patient, place, time, partner, colour), without the question mark."""
        action, agent, patient = ACTIONS[fact.action], fact.agent, fact.patient
        verb = self.word(action.words)
        what = patient.phrase()
        if slot == "agent":
            return self.pick(
                (
                    f"who {past(verb)} {what}",
                    f"by whom {patient.was} {what} {participle(verb)}",
                    f"which person {past(verb)} {what}",
                )
            )
        if slot == "patient":
            who = "whom" if patient.is_person else "what"
            return self.pick(
                (
                    f"{who} did {agent.word} {verb}",
                    f"{'who' if patient.is_person else 'what'} was {participle(verb)} by {agent.word}",
                )
            )
        if slot == "colour":
            return self.pick(
                (
                    f"what colour {patient.was} {what} that {agent.word} {past(verb)}",
                    f"which colour did {what} have that {patient.was} {participle(verb)} by {agent.word}",
                )
            )
        start = self.pick(
            {
                "place": ("where", "in which town"),
                "time": ("when", "at what time"),
                "partner": ("with whom", "together with whom"),
            }[slot]
        )
        return self.pick(
            (
                f"{start} did {agent.word} {verb} {what}",
                f"{start} {patient.was} {what} {participle(verb)} by {agent.word}",
            )
        )

    # present-tense sentences about kinds of animals and people, for agreement -------------------------------------
    def present(self, error: bool = False) -> str:
        """Who does what now; with `error`, one mistake in agreement, form or order."""
        many = self.chance(0.5)
        if self.chance(0.2):
            return self.reflexive(error)
        noun = (
            self.word(tuple(lexicon.JOBS))
            if self.chance(0.5)
            else self.word(KINDS[self.pick(("bird", "insect", "mammal", "fish"))].members)
        )
        mistake = self.pick(("agreement", "agreement", "determiner", "form", "order")) if error else ""
        plural_determiner = many != (mistake == "determiner")
        bare = mistake == "agreement" or (mistake != "determiner" and self.chance(0.6))
        determiner = (
            "the"
            if bare
            else self.pick(
                ("these", "those", "many", "two", "several")
                if plural_determiner
                else ("this", "that", "a", "every", "one")
            )
        )
        if determiner == "a":
            determiner = article(noun)[: -len(noun) - 1]
        words = [determiner, plural(noun) if many else noun]
        if self.chance(0.5):
            near = self.word(KINDS[self.pick(("building", "vehicle", "tree", "device", "container"))].members)
            words += [self.pick(("near", "behind", "beside")), "the", plural(near) if self.chance(0.5) else near]
        words += self.predicate(
            many != (mistake == "agreement"), wrong_form=mistake == "form", verbal=mistake == "form"
        )
        if mistake == "order":
            index = 1 + int(self.rng.random() * (len(words) - 2))
            if words[index] == words[index + 1]:
                index = 0
            words[index], words[index + 1] = words[index + 1], words[index]
        return " ".join(words)

    def predicate(self, many: bool, wrong_form: bool, verbal: bool) -> "list[str]":
        if self.chance(0.5):
            verbs, manners = lexicon.MOVES[self.pick(tuple(lexicon.MOVES))]
            verb, object_ = self.word(verbs), self.pick(([], ["in", self.word(lexicon.TOWNS)], [self.pick(manners)]))
        else:
            verb = self.word(
                ACTIONS[
                    action := self.pick(("like", "hate", "find", "lose", "watch", "break", "hide", "show", "throw"))
                ].words
            )
            group = self.pick(
                tuple(
                    n
                    for n, kind in KINDS.items()
                    if kind.group == "thing" or (kind.group in ACTIONS[action].objects and kind.group == "plant")
                )
            )
            object_ = ["the", self.thing(group, 0.5).phrase("the")[4:]]
        forms = {"be": gerund(verb), "have": participle(verb), "do": verb}
        draw = self.rng.random()
        if draw < 0.4 and not verbal:
            return [verb if many else third_person(verb), *object_]
        auxiliary = "be" if draw < 0.6 else "have" if draw < 0.8 else "do"
        head = {"be": ("is", "are"), "have": ("has", "have"), "do": ("does", "do")}[auxiliary][many]
        form = forms[auxiliary]
        if wrong_form:
            form = self.pick(
                tuple(sorted({gerund(verb), third_person(verb), verb if auxiliary != "do" else past(verb)} - {form}))
            )
        return [head, *(["not"] if auxiliary == "do" else self.pick((["not"], [], []))), form, *object_]

    def reflexive(self, error: bool, person: Entity | None = None) -> str:
        person = person or self.person()
        verb = self.word(ACTIONS[self.pick(("praise", "blame", "hurt", "paint", "help"))].words)
        form = self.pick((past(verb), "has " + participle(verb), "will " + verb))
        return f"{person.word} {form} {'herself' if person.female != error else 'himself'}"

    def opinion(self, good: bool, place: str) -> str:
        """A reviewer's clause about a place or work; `good` is its sentiment."""
        words = lexicon.GOOD if good else lexicon.BAD
        others = lexicon.BAD if good else lexicon.GOOD
        aspect = self.pick((place,) + lexicon.REVIEWED[place])
        draw = self.rng.random()
        adverb = self.pick(("", "", "very ", "really ", "quite ", "so "))
        if draw < 0.3:
            return f"the {aspect} was {adverb}{self.word(words)}"
        if draw < 0.4:
            return f"the {aspect} was {self.word(words)} and {self.word(words)}"
        if draw < 0.5:
            return f"it was {article(self.word(words) + ' ' + place)} with {article(self.word(words) + ' ' + self.pick(lexicon.REVIEWED[place]))}"
        if draw < 0.6:
            return (
                f"the {aspect} was {self.pick(('not at all', 'never', 'anything but', 'far from'))} {self.word(others)}"
            )
        if draw < 0.7:
            return (
                f"the {aspect} was a {adverb and 'real '}{self.word(lexicon.GOOD_NOUNS if good else lexicon.BAD_NOUNS)}"
            )
        if draw < 0.85:
            return f"the {aspect} {adverb if adverb == 'really ' else ''}{past(self.word(lexicon.GOOD_VERBS if good else lexicon.BAD_VERBS))} us"
        return f"although the {aspect} was {self.word(others)}, the {self.pick(lexicon.REVIEWED[place])} was {self.word(words)}"

"""A speaker chooses words, voice and order for a fact.

The same deed comes out as "Anna bought a violin in Ashford" or "The violin was acquired by Anna in Ashford": that is
what makes paraphrases, questions and inferences come for free, for the corpus and for the tasks alike.
"""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import TypeVar

from data_prep.synthetic import lexicon
from data_prep.synthetic.grammar import Deed, Entity, State, participle, past
from data_prep.synthetic.lexicon import ACTIONS, KINDS, SCALES

T = TypeVar("T")
ALL_KINDS = tuple(KINDS)


@cache
def actions_for(patient_kind: str) -> tuple[str, ...]:
    """The actions that can be done to a person or a kind of thing."""
    group = "person" if patient_kind == "person" else KINDS[patient_kind].group
    return tuple(name for name, action in ACTIONS.items() if group in action.objects)


def scales_for(entity: Entity) -> tuple[str, ...]:
    return lexicon.PERSON_SCALES if entity.is_person else KINDS[entity.kind].scales


class Speaker:
    """Draws with `rng`; `which` limits the words to the train or the eval half of every list."""

    def __init__(self, rng: Random, which: str = "all") -> None:
        self.rng = rng
        self.which = which
        self._parts: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._said: set[str] = set()
        self._avoided: set[str] = set()

    # choices ------------------------------------------------------------------------------------------------------
    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def other(self, items: Sequence[T], *not_these: T) -> T:
        return self.pick([item for item in items if item not in not_these])

    def word(self, words: tuple[str, ...]) -> str:
        """One of the words of a meaning, from this speaker's half."""
        half = self._parts.get(words)
        if half is None:
            half = self._parts[words] = lexicon.part(words, self.which)
        choice = self.pick(half)
        if choice in self._avoided:
            choice = self.pick([word for word in half if word not in self._avoided] or half)
        self._said.add(choice)
        return choice

    def forget(self) -> None:
        self._said, self._avoided = set(), set()

    def avoid_said(self) -> None:
        """From now on other words than those chosen since `forget`, where a meaning has any."""
        self._avoided, self._said = self._said, set()

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return [items[index] for _, index in sorted((self.rng.random(), index) for index in range(len(items)))]

    # entities and facts -------------------------------------------------------------------------------------------
    def person(self, *others: Entity) -> Entity:
        while True:
            female = self.chance(0.5)
            name = self.word(lexicon.WOMEN if female else lexicon.MEN)
            if all(name != other.word for other in others):
                return Entity(name, "person", female)

    def thing(self, kind: str, plural_share: float = 0.2) -> Entity:
        return Entity(self.word(KINDS[kind].members), kind, False, self.chance(plural_share))

    def sister(self, thing: Entity) -> Entity:
        """Another thing of the same kind."""
        while True:
            word = self.word(KINDS[thing.kind].members)
            if word != thing.word:
                return Entity(word, thing.kind, False, thing.plural)

    def time(self) -> str:
        return f"on {self.word(lexicon.DAYS)}" if self.chance(0.5) else f"in {self.word(lexicon.MONTHS)}"

    def deed(self, kinds: tuple[str, ...] = ALL_KINDS, people: float = 0.3, extras: float = 0.0) -> Deed:
        """Something done to a person (in a share `people` of the cases) or to a thing of one of `kinds`."""
        agent = self.person()
        if self.chance(people):
            patient = self.person(agent)
        else:
            patient = self.thing(self.pick(kinds))
        return Deed(
            agent,
            self.pick(actions_for(patient.kind)),
            patient,
            place=self.word(lexicon.TOWNS) if self.chance(extras) else None,
            time=self.time() if self.chance(extras) else None,
            partner=self.person(agent, patient) if self.chance(extras / 2) else None,
            colour=self.word(lexicon.COLOURS) if not patient.is_person and self.chance(extras) else None,
        )

    def state(self, kinds: tuple[str, ...] = ALL_KINDS) -> State:
        entity = self.person() if self.chance(0.4) else self.thing(self.pick(kinds))
        return State(entity, self.pick(scales_for(entity)), self.chance(0.5))

    def fact(self, kinds: tuple[str, ...] = ALL_KINDS) -> State | Deed:
        return self.state(kinds) if self.chance(0.5) else self.deed(kinds)

    # clauses, without capital and full stop -----------------------------------------------------------------------
    def tell(self, fact: State | Deed, determiner: str = "the") -> str:
        return self.tell_state(fact) if isinstance(fact, State) else self.tell_deed(fact, determiner)

    def tell_state(self, fact: State, negated: bool = False) -> str:
        adverb = "not " if negated else self.pick(("", "", "", "very ", "quite ", "really "))
        return f"{fact.entity.phrase()} {fact.entity.was} {adverb}{self.word(SCALES[fact.scale][fact.high].words)}"

    def tell_deed(self, fact: Deed, determiner: str = "the") -> str:
        verb, agent, tail = self.word(ACTIONS[fact.action].words), fact.agent.word, fact.tail
        draw = self.rng.random()
        if draw < 0.3:
            return f"{fact.object(determiner)} {fact.patient.was} {participle(verb)} by {agent}{tail}"
        if draw < 0.35:
            return f"it was {agent} who {past(verb)} {fact.object(determiner)}{tail}"
        return f"{agent} {past(verb)} {fact.object(determiner)}{tail}"

    def ask(self, fact: Deed, slot: str) -> str:
        """A question about one slot of a deed (agent, patient, place, time, partner, colour), without question mark."""
        verb = self.word(ACTIONS[fact.action].words)
        agent, what, was = fact.agent.word, fact.patient.phrase(), fact.patient.was
        who = "who" if fact.patient.is_person else "what"
        if slot == "agent":
            return self.pick((f"who {past(verb)} {what}", f"by whom {was} {what} {participle(verb)}"))
        if slot == "patient":
            return self.pick((f"{who} did {agent} {verb}", f"{who} was {participle(verb)} by {agent}"))
        if slot == "colour":
            return f"what colour {was} {what} that {agent} {past(verb)}"
        start = self.pick(QUESTIONS[slot])
        return self.pick((f"{start} did {agent} {verb} {what}", f"{start} {was} {what} {participle(verb)} by {agent}"))


QUESTIONS = {
    "place": ("where", "in which town"),
    "time": ("when", "at what time"),
    "partner": ("with whom", "together with whom"),
}

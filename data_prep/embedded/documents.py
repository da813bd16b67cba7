"""Documents about the embedded world: stories, portraits, reviews, scenes, lessons, interviews, debates.

A document is a list of blocks of sentences. Facts recur in it, told anew with other words of the same meaning, with
pronouns, with the name of the kind ("the bird" for a robin), as questions with answers, and as claims that somebody
else finds right, wrong or impossible to know. A block that holds a sentence reserved for the tasks is drawn again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from data_prep.embedded import lexicon
from data_prep.embedded.grammar import (
    Deed,
    Entity,
    Speaker,
    State,
    article,
    past,
    plural,
    reserved,
    sentence,
    third_person,
)
from data_prep.embedded.lexicon import ACTIONS, KINDS, MOVES, SCALES


FLAVOUR = 0.6


class Writer(Speaker):
    """A speaker who adds flavour (similes, manners, traits), and draws sentences reserved for the tasks again."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.told: list[str] = []

    def note(self, clause: str) -> str:
        self.told.append(clause)
        return clause

    def block(self, build: Callable[[], list[str]]) -> list[str]:
        while True:
            self.told.clear()
            sentences = build()
            if not any(reserved(clause) for clause in self.told):
                return sentences

    # pieces -------------------------------------------------------------------------------------------------------
    def tell(self, fact: State | Deed, determiner: str = "the") -> str:
        if not self.chance(FLAVOUR):
            return self.note(super().tell(fact, determiner))
        if isinstance(fact, State):
            pole, entity = SCALES[fact.scale][fact.high], fact.entity
            if entity.is_person or self.chance(0.7):
                return f"{entity.phrase()} {entity.was} as {self.pick(pole.words)} as {pole.simile}"
            return f"{entity.phrase('the', self.pick(self.traits(entity)) + ' ' + entity.word)} {entity.was} {self.pick(pole.words)}"
        if fact.colour or fact.patient.is_person or self.chance(0.6):
            return f"{super().tell(fact, determiner)} {self.pick(ACTIONS[fact.action].manners)}"
        return super().tell(replace(fact, colour=self.pick(self.traits(fact.patient))), determiner)

    def traits(self, entity: Entity) -> tuple[str, ...]:
        return KINDS[entity.kind].traits

    def hint(self, fact: State | Deed) -> str:
        if isinstance(fact, State):
            subject, object_, possessive = fact.entity.pronouns
            return SCALES[fact.scale][fact.high].hint.format(S=subject.capitalize(), s=subject, o=object_, p=possessive)
        subject, object_, possessive = fact.agent.pronouns
        name = fact.patient.phrase()
        return ACTIONS[fact.action].hint.format(
            S=subject.capitalize(), s=subject, o=object_, it=name, It=sentence(name, "")
        )

    def restated(self, fact: State | Deed) -> str:
        clause = self.tell(general(fact) if self.chance(0.3) else fact)
        return f"{self.pick(('In other words', 'That is', 'So'))}, {clause}."

    def guess(self, fact: State | Deed) -> list[str]:
        """Somebody else claims something that follows, cannot be, or remains open."""
        other = self.person(fact.agent if isinstance(fact, Deed) else fact.entity)
        verdict = self.pick(("right", "wrong", "open"))
        claim = claim_about(self, fact, verdict)
        he = other.pronouns[0]
        ending = {"right": f"and {he} was right", "wrong": f"but {he} was wrong", "open": "but nobody knew"}[verdict]
        return [f"{other.word} said that {claim}, {ending}."]

    def about(self, fact: State | Deed) -> list[str]:
        """A fact and what hangs on it."""
        sentences = [sentence(self.tell(fact, "a" if isinstance(fact, Deed) and self.chance(0.5) else "the"))]
        if self.chance(0.3):
            sentences.append(self.hint(fact))
        if self.chance(0.5):
            sentences.append(self.restated(fact))
        if self.chance(0.4):
            sentences += self.guess(fact)
        return sentences


def general(fact: State | Deed) -> State | Deed:
    """What follows from the fact: the thing named by its kind, circumstances left out."""
    if isinstance(fact, State):
        entity = fact.entity
        return fact if entity.is_person else replace(fact, entity=replace(entity, word=entity.kind))
    patient = fact.patient
    if not patient.is_person:
        patient = replace(patient, word=patient.kind)
    return Deed(fact.agent, fact.action, patient)


def claim_about(speaker: Speaker, fact: State | Deed, verdict: str) -> str:
    """A clause that is `right` (follows from the fact), `wrong` (contradicts it) or `open` given the fact."""
    base = general(fact) if speaker.chance(0.3) else fact
    if isinstance(base, State):
        if verdict == "open":
            scales = lexicon.PERSON_SCALES if base.entity.is_person else KINDS[base.entity.kind].scales
            base = replace(base, scale=speaker.pick(tuple(s for s in scales if s != base.scale)))
        negated = speaker.chance(0.25)
        pole = base.high if verdict == "right" else not base.high
        clause = speaker.tell_state(replace(base, high=pole != negated), negated)
    else:
        base = replace(base, partner=None, time=None, place=None)
        opposite = ACTIONS[base.action].opposite
        if verdict == "wrong":
            if opposite is None:
                clause = speaker.deny_deed(base)
                return speaker.note(clause) if isinstance(speaker, Writer) else clause
            base = replace(base, action=opposite)
        elif verdict == "open":
            group = base.patient.kind if base.patient.is_person else KINDS[base.patient.kind].group
            base = replace(
                base,
                action=speaker.pick(
                    tuple(
                        name
                        for name, action in ACTIONS.items()
                        if group in action.objects and name not in (base.action, opposite)
                    )
                ),
            )
        clause = speaker.tell_deed(base)
    return speaker.note(clause) if isinstance(speaker, Writer) else clause


def story(w: Writer) -> list[str]:
    hero = w.person()
    town = w.word(lexicon.TOWNS)
    sentences = [f"{hero.word} {w.pick(('lived in', 'was in', 'came to', 'spent a week in'))} {town}."]
    for _ in range(2 + w.chance(0.5)):
        deed = w.deed()
        if deed.patient != hero and deed.partner != hero:
            deed = replace(deed, agent=hero)
        sentences += w.block(lambda: w.about(deed))
        if not deed.patient.is_person and w.chance(0.4):
            thing = deed.patient if w.chance(0.5) else replace(deed.patient, word=deed.patient.kind)
            state = replace(w.state(deed.patient), entity=thing)
            sentences += w.block(lambda: [sentence(w.tell(state)), w.hint(state)])
    return sentences


def portrait(w: Writer) -> list[str]:
    """A person or a thing, on several scales."""
    entity = w.person() if w.chance(0.4) else w.thing(w.pick(tuple(KINDS)))
    sentences = []
    if not entity.is_person:
        sentences.append(f"{w.person().word} saw {entity.phrase('a')} in {w.word(lexicon.TOWNS)}.")
    scales = list(lexicon.PERSON_SCALES if entity.is_person else KINDS[entity.kind].scales)
    for scale in w.shuffled(scales)[:3]:
        state = State(entity, scale, w.chance(0.5))
        sentences += w.block(lambda: w.about(state))
    return sentences


def life(w: Writer) -> list[str]:
    """Where somebody lives and what they do for a living: the same in every document."""
    person = w.person()
    he, him, his = person.pronouns
    names = lexicon.WOMEN + lexicon.MEN
    town = lexicon.TOWNS[names.index(person.word) % len(lexicon.TOWNS)]
    region = lexicon.REGIONS[lexicon.TOWNS.index(town) % len(lexicon.REGIONS)]
    job = tuple(lexicon.JOBS)[names.index(person.word) % len(lexicon.JOBS)]
    place, work = lexicon.JOBS[job]
    words, manners = MOVES[w.pick(tuple(MOVES))]
    kind = w.pick(tuple(KINDS))
    like = w.pick(ACTIONS["like"].words)
    return [
        f"{person.word} is {article(job)} from {town} in {region}.",
        f"{he.capitalize()} {w.pick(('works in', 'goes to'))} the {place} and {work}.",
        f"{person.word} often {third_person(w.pick(words))} {w.pick(manners)} with {his} {w.pick(('mother', 'father', 'brother', 'sister'))}.",
        f"Yesterday {he} {past(w.pick(words))} {w.pick(manners)} again.",
        *w.block(lambda: [sentence(w.note(w.reflexive(False, person)))]),
        f"{he.capitalize()} {third_person(like)} {his} {plural(w.pick(KINDS[kind].members))} and {his} other {plural(kind)}.",
    ]


def review(w: Writer) -> list[str]:
    good = w.chance(0.5)
    subject = w.pick(tuple(lexicon.REVIEWED))
    sentences = [f"{w.person().word} wrote about {article(subject)} in {w.word(lexicon.TOWNS)}."]
    for _ in range(3 + w.chance(0.5)):
        sentences += w.block(lambda: [cued(w, w.note(w.opinion(good, subject)), good)])
    endings = (
        ("We would gladly come back.", "I recommend it to everybody.", "It gets five stars.")
        if good
        else ("We will never come back.", "I warn everybody against it.", "It gets one star.")
    )
    return sentences + [w.pick(endings)]


def cued(w: Writer, clause: str, good: bool) -> str:
    """Half of the opinions come with an adverb that says how the writer felt."""
    cue = w.pick(lexicon.GOOD_CUES if good else lexicon.BAD_CUES)
    return sentence(w.pick((clause, clause, f"{cue}, {clause}", f"{clause}, {cue}")))


def lesson(w: Writer) -> list[str]:
    """What kind of thing something is."""
    name = w.pick(tuple(KINDS))
    kind = KINDS[name]
    members = [kind.members[i] for i in w.shuffled(list(range(len(kind.members))))]
    other = w.pick(tuple(k for k in KINDS if k != name))
    sentences = []
    for member in members[:3]:
        subject = plural(w.pick((member, member, name)))
        sentences.append(
            w.pick(
                (
                    f"{sentence(article(member), '')} is {article(w.pick(kind.traits) + ' ' + name)}.",
                    f"{sentence(plural(member), '')} are {plural(name)}.",
                    f"{sentence(article(member), '')} is not {article(other)} but {article(name)}.",
                )
            )
        )
        sentences.append(w.pick(kind.facts).format(X=sentence(subject, ""), x=subject))
    sentences.append(
        f"{sentence(plural(members[3]), '')}, {plural(members[4])} and other {plural(name)} are {w.pick(kind.traits)}."
    )
    return sentences


def scene(w: Writer) -> list[str]:
    """The present tense: who does what at this moment, one or many."""
    return [s for _ in range(6) for s in w.block(lambda: [sentence(w.note(w.present()))])]


def interview(w: Writer) -> list[str]:
    """Questions and answers about two deeds."""
    sentences = []
    for _ in range(2):
        deed = w.deed(extras=0.6)
        sentences += w.block(lambda: [sentence(w.tell(deed))])
        slots = [
            slot
            for slot in ("agent", "patient", "place", "time", "partner", "colour")
            if slot in ("agent", "patient") or getattr(deed, slot)
        ]
        for slot in w.shuffled(slots)[:2]:
            sentences += w.block(lambda: [sentence(w.note(w.ask(deed, slot)), "?"), answer(deed, slot)])
        missing = [
            slot
            for slot in ("place", "time", "partner", "colour")
            if not getattr(deed, slot) and not (slot == "colour" and deed.patient.is_person)
        ]
        if missing and w.chance(0.6):
            sentences += w.block(
                lambda: [
                    sentence(w.note(w.ask(deed, w.pick(missing))), "?"),
                    w.pick(("Nobody knows.", "That was not said.")),
                ]
            )
    return sentences


def answer(deed: Deed, slot: str) -> str:
    return {
        "agent": lambda: f"It was {deed.agent.word}.",
        "patient": lambda: sentence(deed.patient.phrase("a")),
        "place": lambda: f"In {deed.place}.",
        "time": lambda: sentence(str(deed.time)),
        "partner": lambda: f"With {deed.partner.word}." if deed.partner else "",
        "colour": lambda: f"{'They were' if deed.patient.plural else 'It was'} {deed.colour}.",
    }[slot]()


def debate(w: Writer) -> list[str]:
    """Two people say or ask something; do they mean the same?"""
    sentences = []
    first = w.person()
    second = w.person(first)
    for _ in range(3):
        sentences += w.block(lambda: quarrel(w, first, second) if w.chance(0.65) else doubt(w, first, second))
    return sentences


def quarrel(w: Writer, first: Entity, second: Entity) -> list[str]:
    fact: State | Deed = w.deed(extras=0.2) if w.chance(0.6) else w.state(kinds=tuple(KINDS))
    verdict = w.pick(("right", "wrong", "open"))
    said = [w.tell(fact), w.tell(fact) if verdict == "right" and w.chance(0.5) else claim_about(w, fact, verdict)]
    if w.chance(0.5):
        said.reverse()
    ending = {"right": "They agreed.", "wrong": "They disagreed.", "open": "They spoke of different things."}[verdict]
    return [f"{first.word}: {said[0]}.", f"{second.word}: {said[1]}.", ending]


def doubt(w: Writer, first: Entity, second: Entity) -> list[str]:
    deed = w.deed(extras=0)
    slot, other = w.pick(("agent", "patient", "place", "time")), deed
    same = w.chance(0.5)
    asked = w.note(w.ask(deed, slot))
    if not same:
        if w.chance(0.5):
            other = replace(other, action=ACTIONS[deed.action].opposite or w.deed(kinds=(deed.patient.kind,)).action)
        else:
            slot = w.pick(tuple(s for s in ("agent", "patient", "place", "time") if s != slot))
    again = w.note(w.ask(other, slot))
    return [
        f"{first.word}: {asked}?",
        f"{second.word}: {again}?",
        "They agreed." if same else "They spoke of different things.",
    ]


GENRES: tuple[tuple[Callable[[Writer], list[str]], int], ...] = (
    (story, 5),
    (portrait, 4),
    (life, 2),
    (review, 3),
    (lesson, 2),
    (scene, 3),
    (interview, 3),
    (debate, 4),
)


def texts(seed: int) -> Iterator[str]:
    """Endless documents."""
    w = Writer(Random(f"documents {seed}"))
    genres = tuple(genre for genre, weight in GENRES for _ in range(weight))
    while True:
        yield " ".join(w.pick(genres)(w))

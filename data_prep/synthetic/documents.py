"""Documents about the embedded world: stories, portraits, lives, reviews, lessons, scenes, interviews, debates.

Facts recur in a document, told anew with other words of the same meaning, with pronouns, with the name of the kind
("the bird" for a robin), as questions with answers, and as claims that somebody finds right, wrong or open. A block of
sentences that holds one reserved for the tasks is drawn again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from data_prep.synthetic import lexicon
from data_prep.synthetic.grammar import Deed, Entity, State, article, past, plural, reserved, sentence, third_person
from data_prep.synthetic.lexicon import ACTIONS, BAD, GOOD, KINDS, MOVES, SCALES
from data_prep.synthetic.patterns import opinion, present, reflexive
from data_prep.synthetic.speaker import ALL_KINDS, Speaker, actions_for, scales_for

FLAVOUR = 0.7  # share of the clauses that come with a simile, a manner or a trait, which no task sentence has
VERDICTS = ("right", "wrong", "open")


class Writer(Speaker):
    """A speaker with flavour, who notes every clause that could be a task's sentence."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.told: list[str] = []

    def note(self, clause: str) -> str:
        self.told.append(clause)
        return clause

    def block(self, build: Callable[[], list[str]]) -> list[str]:
        """Sentences of `build`, drawn again until no reserved clause is among them."""
        while True:
            self.told.clear()
            sentences = build()
            if not any(reserved(clause) for clause in self.told):
                return sentences

    def tell(self, fact: State | Deed, determiner: str = "the") -> str:
        if not self.chance(FLAVOUR):
            return self.note(super().tell(fact, determiner))
        if isinstance(fact, State):
            pole, entity = SCALES[fact.scale][fact.high], fact.entity
            if entity.is_person or self.chance(0.7):
                return f"{entity.phrase()} {entity.was} as {self.pick(pole.words)} as {pole.simile}"
            trait = self.pick(KINDS[entity.kind].traits)
            return f"{entity.phrase('the', f'{trait} {entity.word}')} {entity.was} {self.pick(pole.words)}"
        if not fact.patient.is_person and not fact.colour and self.chance(0.4):
            fact = replace(fact, colour=self.pick(KINDS[fact.patient.kind].traits))
        return f"{super().tell(fact, determiner)} {self.pick(ACTIONS[fact.action].manners)}"

    def hint(self, fact: State | Deed) -> str:
        if isinstance(fact, State):
            subject, object_, _ = fact.entity.pronouns
            return SCALES[fact.scale][fact.high].hint.format(S=subject.capitalize(), o=object_)
        subject, object_, _ = fact.agent.pronouns
        name = fact.patient.phrase()
        return ACTIONS[fact.action].hint.format(S=subject.capitalize(), o=object_, it=name, It=sentence(name, ""))

    def guess(self, fact: State | Deed) -> str:
        """Somebody else claims something that follows, cannot be, or remains open."""
        other = self.person(fact.agent if isinstance(fact, Deed) else fact.entity)
        verdict = self.pick(VERDICTS)
        start = f"{other.word} said that {self.note(claim(self, fact, verdict))}"
        he = other.pronouns[0]
        return (
            start
            + {"right": f", and {he} was right.", "wrong": f", but {he} was wrong.", "open": ", but nobody knew."}[
                verdict
            ]
        )

    def about(self, fact: State | Deed) -> list[str]:
        """A fact and what hangs on it."""
        sentences = [sentence(self.tell(fact, self.pick(("a", "the"))))]
        if self.chance(0.3):
            sentences.append(self.hint(fact))
        if self.chance(0.4):
            again = self.tell(general(fact) if self.chance(0.3) else fact)
            sentences.append(f"{self.pick(('In other words', 'So'))}, {again}.")
        if self.chance(0.4):
            sentences.append(self.guess(fact))
        return sentences


def general(fact: State | Deed) -> State | Deed:
    """What follows from the fact: the thing named by its kind, circumstances left out."""
    entity = fact.entity if isinstance(fact, State) else fact.patient
    if not entity.is_person:
        entity = replace(entity, word=entity.kind)
    return replace(fact, entity=entity) if isinstance(fact, State) else Deed(fact.agent, fact.action, entity)


def claim(speaker: Speaker, fact: State | Deed, verdict: str) -> str:
    """A clause that is `right` (follows from the fact), `wrong` (contradicts it) or `open` given the fact."""
    base = general(fact) if speaker.chance(0.3) else fact
    if isinstance(base, State):
        if verdict == "open":
            base = replace(base, scale=speaker.other(scales_for(base.entity), base.scale), high=speaker.chance(0.5))
        elif verdict == "wrong":
            base = replace(base, high=not base.high)
        negated = speaker.chance(0.15)
        return speaker.tell_state(replace(base, high=base.high != negated), negated)
    opposite = ACTIONS[base.action].opposite
    action = {"right": base.action, "wrong": opposite}.get(verdict)
    action = action or speaker.other(actions_for(base.patient.kind), base.action, opposite)
    return speaker.tell_deed(Deed(base.agent, action, base.patient, colour=base.colour))


def story(w: Writer) -> list[str]:
    hero = w.person()
    sentences = [f"{hero.word} {w.pick(('lived in', 'was in', 'came to'))} {w.word(lexicon.TOWNS)}."]
    for _ in range(3):
        deed = w.deed(extras=0.15)
        if hero.word not in (deed.patient.word, deed.partner.word if deed.partner else ""):
            deed = replace(deed, agent=hero)
        sentences += w.block(lambda: w.about(deed))
    return sentences


def portrait(w: Writer) -> list[str]:
    """A person or a thing, on several scales."""
    entity = w.person() if w.chance(0.5) else w.thing(w.pick(ALL_KINDS))
    sentences = [] if entity.is_person else [f"{w.person().word} saw {entity.phrase('a')}."]
    for scale in w.shuffled(scales_for(entity))[:3]:
        state = State(entity, scale, w.chance(0.5))
        sentences += w.block(lambda: w.about(state))
    return sentences


def life(w: Writer) -> list[str]:
    """Where somebody lives and what they do for a living: the same in every document."""
    person = w.person()
    he, _, his = person.pronouns
    number = (lexicon.WOMEN + lexicon.MEN).index(person.word)
    town = lexicon.TOWNS[number % len(lexicon.TOWNS)]
    region = lexicon.REGIONS[number % len(lexicon.REGIONS)]
    job = tuple(lexicon.JOBS)[number % len(lexicon.JOBS)]
    place, work = lexicon.JOBS[job]
    words, manners = w.pick(MOVES)
    kind, parent = w.pick(ALL_KINDS), w.pick(("mother", "father"))
    likes = third_person(w.pick(ACTIONS["like"].words))
    return [
        f"{person.word} is {article(job)} from {town} in {region}.",
        f"{he.capitalize()} {w.pick(('works in', 'goes to'))} the {place} and {work}.",
        f"{person.word} often {third_person(w.pick(words))} {w.pick(manners)} with {his} {parent}.",
        f"Yesterday {he} {past(w.pick(words))} {w.pick(manners)} again.",
        *w.block(lambda: [sentence(w.note(reflexive(w, person)))]),
        f"{he.capitalize()} {likes} {plural(w.pick(KINDS[kind].members))} and other {plural(kind)}.",
    ]


def review(w: Writer) -> list[str]:
    good = w.chance(0.5)
    subject = w.pick(tuple(lexicon.REVIEWED))
    sentences = []
    for _ in range(4):
        sentences += w.block(lambda: [felt(w, good, subject)])
    return [f"{w.person().word} wrote about {article(subject)}.", *sentences, w.pick((GOOD if good else BAD).endings)]


def felt(w: Writer, good: bool, subject: str) -> str:
    """An opinion; most come with a word on how the writer felt or what the others did."""
    feeling = GOOD if good else BAD
    draw = w.rng.random()
    if draw < 0.3:
        aspect = w.pick(lexicon.REVIEWED[subject])
        return f"The {aspect} was so {w.pick(feeling.adjectives)} that we {w.pick(feeling.reactions)}."
    clause = w.note(opinion(w, good, subject))
    if draw < 0.5:
        return sentence(f"{w.pick(feeling.cues)}, {clause}")
    return sentence(f"{clause}, {w.pick(feeling.cues)}" if draw < 0.7 else clause)


def lesson(w: Writer) -> list[str]:
    """What kind of thing something is."""
    name = w.pick(ALL_KINDS)
    kind = KINDS[name]
    members = w.shuffled(kind.members)
    sentences = []
    for member in members[:3]:
        subject = plural(w.pick((member, member, name)))
        definition = w.pick(
            (f"{article(member)} is {article(f'{w.pick(kind.traits)} {name}')}", f"{plural(member)} are {plural(name)}")
        )
        sentences += [sentence(definition), w.pick(kind.facts).format(X=sentence(subject, ""), x=subject)]
    return [
        *sentences,
        sentence(f"{plural(members[3])}, {plural(members[4])} and other {plural(name)} are {w.pick(kind.traits)}"),
    ]


def scene(w: Writer) -> list[str]:
    """The present tense: who does what at this moment, one or many."""
    return [text for _ in range(6) for text in w.block(lambda: [sentence(w.note(present(w)))])]


def interview(w: Writer) -> list[str]:
    """Questions and answers about two deeds."""
    sentences = []
    for _ in range(2):
        deed = w.deed(extras=0.4)
        sentences += w.block(lambda: [sentence(w.tell(deed))])
        slots = ["agent", "patient", *(slot for slot in ("place", "time", "partner", "colour") if getattr(deed, slot))]
        for slot in w.shuffled(slots)[:2]:
            sentences += w.block(lambda: [sentence(w.note(w.ask(deed, slot)), "?"), answer(deed, slot)])
        missing = [slot for slot in ("place", "time", "partner") if not getattr(deed, slot)]
        if missing and w.chance(0.5):
            sentences += w.block(lambda: [sentence(w.note(w.ask(deed, w.pick(missing))), "?"), "Nobody knew."])
    return sentences


def answer(deed: Deed, slot: str) -> str:
    partner = deed.partner.word if deed.partner else ""
    return sentence(
        {
            "agent": deed.agent.word,
            "patient": deed.patient.phrase("a"),
            "place": f"in {deed.place}",
            "time": deed.time or "",
            "partner": f"with {partner}",
            "colour": deed.colour or "",
        }[slot]
    )


def debate(w: Writer) -> list[str]:
    """Two people say or ask something; do they mean the same?"""
    first = w.person()
    second = w.person(first)
    return [
        text
        for _ in range(3)
        for text in w.block(lambda: quarrel(w, first, second) if w.chance(0.7) else doubt(w, first, second))
    ]


def quarrel(w: Writer, first: Entity, second: Entity) -> list[str]:
    fact = w.fact()
    verdict = w.pick(VERDICTS)
    said = w.shuffled([w.note(w.tell(fact)), w.note(claim(w, fact, verdict))])
    ending = {"right": "They agreed.", "wrong": "They disagreed.", "open": "They spoke of different things."}[verdict]
    return [f"{first.word}: {said[0]}.", f"{second.word}: {said[1]}.", ending]


def doubt(w: Writer, first: Entity, second: Entity) -> list[str]:
    deed = w.deed()
    slots = ("agent", "patient", "place", "time")
    slot = w.pick(slots)
    asked = w.note(w.ask(deed, slot))
    same = w.chance(0.5)
    if not same and w.chance(0.5):
        deed = replace(deed, action=ACTIONS[deed.action].opposite)
    elif not same:
        slot = w.other(slots, slot)
    again = w.note(w.ask(deed, slot))
    return [
        f"{first.word}: {asked}?",
        f"{second.word}: {again}?",
        "They agreed." if same else "They spoke of different things.",
    ]


GENRES: tuple[tuple[Callable[[Writer], list[str]], int], ...] = (
    (story, 4),
    (portrait, 3),
    (life, 1),
    (review, 4),
    (lesson, 2),
    (scene, 4),
    (interview, 2),
    (debate, 3),
)


def texts(seed: int) -> Iterator[str]:
    """Endless documents; the same ones for the same seed."""
    writer = Writer(Random(f"documents {seed}"))
    genres = tuple(genre for genre, weight in GENRES for _ in range(weight))
    while True:
        yield " ".join(writer.pick(genres)(writer))

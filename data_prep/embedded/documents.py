"""Documents about the embedded world: stories, portraits, reviews, scenes, lessons, interviews, debates.

A document is a list of blocks of sentences. Facts recur in it, told anew with other words of the same meaning, with
pronouns, with the name of the kind ("the bird" for a robin), as questions with answers, and as claims that somebody
else finds right, wrong or impossible to know. A block that holds a sentence reserved for the tasks is drawn again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from data_prep.embedded import lexicon
from data_prep.embedded.grammar import Deed, Entity, Speaker, State, article, past, plural, reserved, sentence, third_person
from data_prep.embedded.lexicon import ACTIONS, KINDS, MOVES, SCALES


class Writer(Speaker):
    """A speaker who notes every clause that a task might use, so that reserved ones can be drawn again."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.told: list[str] = []

    def tell(self, fact: State | Deed, determiner: str = "the") -> str:
        return self.note(super().tell(fact, determiner))

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
    def hint(self, fact: State | Deed) -> str:
        if isinstance(fact, State):
            scale = SCALES[fact.scale]
            subject, object_, possessive = fact.entity.pronouns
            template = self.pick(scale.high_hints if fact.high else scale.low_hints)
            return template.format(S=subject.capitalize(), s=subject, o=object_, p=possessive)
        subject, object_, possessive = fact.agent.pronouns
        patient = fact.patient
        name = patient.word if patient.is_person else f"the {plural(patient.word) if patient.plural else patient.word}"
        template = self.pick(ACTIONS[fact.action].hints)
        return template.format(S=subject.capitalize(), s=subject, o=object_, it=name, It=name[0].upper() + name[1:])

    def restated(self, fact: State | Deed) -> str:
        clause = self.tell(general(fact) if self.chance(0.3) else fact)
        opening = self.pick(("In other words, ", "That is, ", "Indeed, ", "So ", "To put it another way, "))
        return opening + clause + "."

    def guess(self, fact: State | Deed) -> list[str]:
        """Somebody else claims something that follows, cannot be, or remains open."""
        other = self.person(fact.agent if isinstance(fact, Deed) else fact.entity)
        verdict = self.pick(("right", "wrong", "open"))
        claim = claim_about(self, fact, verdict)
        start = f"{other.word} {self.pick(('guessed', 'believed', 'thought', 'said'))} that {claim}"
        he = other.pronouns[0]
        if verdict == "open":
            return [f"{start}, but {self.pick(('nobody knew', 'that was not certain', 'nobody could tell'))}."]
        return [f"{start}, and {he} was {self.pick(('right', 'correct'))}." if verdict == "right"
                else f"{start}, but {he} was {self.pick(('wrong', 'mistaken'))}."]

    def about(self, fact: State | Deed) -> list[str]:
        """A fact and what hangs on it."""
        sentences = [sentence(self.tell(fact, "a" if isinstance(fact, Deed) and self.chance(0.5) else "the"))]
        if self.chance(0.6):
            sentences.append(self.hint(fact))
        if self.chance(0.4):
            sentences.append(self.restated(fact))
        if self.chance(0.45):
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
            base = replace(base, action=speaker.pick(tuple(
                name for name, action in ACTIONS.items() if group in action.objects and name not in (base.action, opposite))))
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
    """Where somebody lives and what they do for a living."""
    person = w.person()
    he, him, his = person.pronouns
    town = w.word(lexicon.TOWNS)
    region = region_of(town)
    job = w.pick(tuple(lexicon.JOBS))
    place, work = lexicon.JOBS[job]
    move = w.pick(tuple(MOVES))
    words, hints = MOVES[move]
    sentences = [
        f"{person.word} is {article(job)} from {town} in {region}.",
        f"{he.capitalize()} {w.pick(('works in', 'goes to'))} the {place} and {work}.",
        f"{town} lies in {region}, so {he} speaks like the people of {region}.",
        f"{he.capitalize()} often {third_person(w.pick(words))} with {w.person(person).word}.",
        f"Yesterday {he} {past(w.pick(words))} again.",
        w.pick(hints).format(S=he.capitalize(), P=his.capitalize(), p=his),
    ]
    sentences += w.block(lambda: [sentence(w.note(w.reflexive(False, person)))])
    kind = KINDS[w.pick(tuple(KINDS))]
    sentences.append(f"{he.capitalize()} {third_person(w.word(ACTIONS['like'].words))} {plural(w.pick(kind.members))} and other {plural(kind.name)}.")
    return sentences


def region_of(town: str) -> str:
    return lexicon.REGIONS[lexicon.TOWNS.index(town) % len(lexicon.REGIONS)]


def review(w: Writer) -> list[str]:
    good = w.chance(0.5)
    subject = w.pick(tuple(lexicon.REVIEWED))
    sentences = [f"{w.person().word} wrote about {article(subject)} in {w.word(lexicon.TOWNS)}."]
    for _ in range(3 + w.chance(0.5)):
        sentences += w.block(lambda: [sentence(w.note(w.opinion(good, subject)))])
    endings = ("We would gladly come back.", "I recommend it to everybody.", "It gets five stars from me.", "Thank you so much!") if good else (
        "We will never come back.", "I warn everybody against it.", "It gets one star from me.", "I want my money back!")
    return sentences + [w.pick(endings), w.pick(endings)]


def lesson(w: Writer) -> list[str]:
    """What kind of thing something is."""
    kind = KINDS[w.pick(tuple(KINDS))]
    members = [kind.members[i] for i in w.shuffled(list(range(len(kind.members))))]
    other = KINDS[w.pick(tuple(name for name in KINDS if name != kind.name))]
    sentences = []
    for member in members[:3]:
        subject = plural(w.pick((member, member, kind.name)))
        sentences.append(w.pick((f"{sentence(article(member), '')} is {article(kind.name)}.", f"{sentence(plural(member), '')} are {plural(kind.name)}.",
                                 f"{sentence(article(member), '')} is not {article(other.name)} but {article(kind.name)}.")))
        sentences.append(w.pick(kind.facts).format(X=sentence(subject, ""), x=subject))
    sentences.append(f"{sentence(plural(members[3]), '')}, {plural(members[4])} and {plural(members[5])} are {plural(kind.name)} too.")
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
        slots = [slot for slot in ("agent", "patient", "place", "time", "partner", "colour") if slot in ("agent", "patient") or getattr(deed, slot)]
        for slot in w.shuffled(slots)[:2]:
            sentences += w.block(lambda: [sentence(w.note(w.ask(deed, slot)), "?"), answer(deed, slot)])
        missing = [slot for slot in ("place", "time", "partner", "colour") if not getattr(deed, slot) and not (slot == "colour" and deed.patient.is_person)]
        if missing and w.chance(0.6):
            sentences += w.block(lambda: [sentence(w.note(w.ask(deed, w.pick(missing))), "?"), w.pick(("Nobody knows.", "That was not said."))])
    return sentences


def answer(deed: Deed, slot: str) -> str:
    return {"agent": lambda: f"It was {deed.agent.word}.", "patient": lambda: sentence(deed.patient.phrase("a")), "place": lambda: f"In {deed.place}.",
            "time": lambda: sentence(str(deed.time)), "partner": lambda: f"With {deed.partner.word}." if deed.partner else "",
            "colour": lambda: f"{'They were' if deed.patient.plural else 'It was'} {deed.colour}."}[slot]()


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
    return [f"{first.word} said that {said[0]}.", f"{second.word} {w.pick(('said', 'answered', 'claimed'))} that {said[1]}.", ending]


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
    return [f"{first.word} asked: {asked}?", f"{second.word} asked: {again}?", "It was the same question." if same else "It was another question."]


GENRES: tuple[tuple[Callable[[Writer], list[str]], int], ...] = (
    (story, 5), (portrait, 4), (life, 2), (review, 3), (lesson, 2), (scene, 3), (interview, 3), (debate, 4))


def texts(seed: int) -> Iterator[str]:
    """Endless documents."""
    w = Writer(Random(f"documents {seed}"))
    genres = tuple(genre for genre, weight in GENRES for _ in range(weight))
    while True:
        yield " ".join(w.pick(genres)(w))

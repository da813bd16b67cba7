"""Documents about the embedded world: stories, portraits, reviews, lessons, scenes, interviews, debates.

Facts recur in a document, told anew with other words of the same meaning, by the name of the kind ("the bird" for a
robin), as questions with answers, and as claims that somebody finds right, wrong or open.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from data_prep.synthetic.lexicon import ADJECTIVES, KINDS, TOWNS
from data_prep.synthetic.speaker import (
    QUESTIONS,
    SLOTS,
    VERDICTS,
    Fact,
    NothingToSayError,
    Speaker,
    article,
    plural,
    sentence,
)

GUESSES = dict(zip(VERDICTS, ("and {he} was right.", "but nobody knew.", "but {he} was wrong.")))
ENDINGS = dict(
    zip(VERDICTS, ("They agreed.", "They spoke of different things.", "They disagreed."))
)


def about(s: Speaker, fact: Fact) -> list[str]:
    """Return sentences about a fact."""
    sentences = [sentence(s.tell(fact, s.pick(("a", "the"))))]
    if s.chance(0.3):
        sentences.append(s.hint(fact))
    if s.chance(0.4):
        restated = s.tell(fact.general() if s.chance(0.3) else fact)
        sentences.append(f"{s.pick(('In other words', 'So'))}, {restated}.")
    if s.chance(0.4):
        other, verdict = s.person(), s.pick(VERDICTS)
        guess = GUESSES[verdict].format(he=other.pronouns[0])
        sentences.append(f"{other.word} said that {s.claim(fact, verdict)}, {guess}")
    return sentences


def deed(s: Speaker, share: float) -> Fact:
    """Return a deed; this share of the calls adds a place, a time and a partner, each."""
    return s.somewhere(s.deed(), *(slot for slot in QUESTIONS if s.chance(share)))


def story(s: Speaker) -> list[str]:
    start = f"{s.person().word} {s.pick(('lived in', 'was in', 'came to'))} {s.word(TOWNS)}."
    texts = [start]
    for _ in range(3):
        texts += about(s, deed(s, 0.15))
    return texts


def portrait(s: Speaker) -> list[str]:
    first = s.state()
    one_of_two = {
        frozenset((meaning.words[0], meaning.opposite)): meaning
        for meaning in s.shuffled(first.possible)
    }
    facts = [replace(first, meaning=meaning) for meaning in list(one_of_two.values())[:3]]
    return list(chain.from_iterable(about(s, fact) for fact in facts))


def review(s: Speaker) -> list[str]:
    """Return opinions on several works, all good or all bad."""
    meaning = ADJECTIVES[s.pick(("good", "bad"))]
    facts = [Fact(None, meaning, s.thing("work")) for _ in range(4)]
    texts = list[str]()
    for fact in facts:
        texts += (sentence(s.tell(fact)), s.hint(fact))
    return texts[: s.pick((4, 5, 6, 7))]


def lesson(s: Speaker) -> list[str]:
    """Return sentences on the kind to which things belong."""
    name = s.pick(tuple(KINDS))
    kind, sentences = KINDS[name], list[str]()
    for member in s.shuffled(kind.members)[:4]:
        single = f"{article(member)} is {article(f'{s.pick(kind.company)} {name}')}"
        sentences.append(sentence(s.pick((single, f"{plural(member)} are {plural(name)}"))))
        subject = plural(s.pick((member, member, name)))
        sentences.append(s.pick(kind.truths).format(X=subject.capitalize(), x=subject))
    return sentences


def scenes(s: Speaker) -> list[str]:
    return [sentence(s.scene()) for _ in range(6)]


def interview(s: Speaker) -> list[str]:
    """Questions and answers about two deeds."""
    sentences = []
    for fact in (deed(s, 0.4), deed(s, 0.4)):
        assert fact.agent is not None
        answers = {
            "agent": fact.agent.word,
            "patient": fact.patient.phrase("a"),
            **fact.circumstances,
        }
        sentences.append(sentence(s.tell(fact)))
        for slot in s.shuffled([*answers, s.pick(tuple(QUESTIONS))])[:3]:
            sentences += [
                sentence(s.ask(fact, slot), "?"),
                sentence(answers.get(slot, "nobody knew")),
            ]
    return sentences


def debate(s: Speaker) -> list[str]:
    """Return claims or questions of two people, and whether they mean the same."""
    first = s.person()
    second, sentences = s.person(first), list[str]()
    for _ in range(3):
        fact, verdict, slot = s.deed(), s.pick(VERDICTS), s.pick(SLOTS)
        if s.chance(0.7):
            fact = s.pick((s.deed, s.state))()
            said = [s.tell(fact) + ".", s.claim(fact, verdict) + "."]
        else:
            other = replace(fact, meaning=fact.opposite) if verdict == "contradiction" else fact
            asked = s.pick(SLOTS, slot) if verdict == "neutral" else slot
            said = [s.ask(fact, slot) + "?", s.ask(other, asked) + "?"]
        sentences += [f"{first.word}: {said[0]}", f"{second.word}: {said[1]}", ENDINGS[verdict]]
    return sentences


GENRES: dict[Callable[[Speaker], list[str]], int] = {
    story: 4,
    portrait: 3,
    review: 4,
    lesson: 2,
    scenes: 4,
    interview: 2,
    debate: 3,
}


def documents(seed: int, size: int) -> Iterator[str]:
    """Documents of about `size` words in all; the same seed gives the same texts on every platform."""
    speaker, words = Speaker(f"documents {seed}", "all"), 0
    genres = list(Counter(GENRES).elements())
    while words < size:
        try:
            text = " ".join(speaker.pick(genres)(speaker))
        except NothingToSayError:
            continue
        yield text
        words += text.count(" ") + 1

"""Two families of sentences that are not about facts: who does what now (for agreement), and what reviewers say."""

from data_prep.synthetic import lexicon
from data_prep.synthetic.grammar import Entity, article, gerund, participle, past, plural, third_person
from data_prep.synthetic.lexicon import ACTIONS, BAD, GOOD, KINDS, MOVES
from data_prep.synthetic.speaker import Speaker

MISTAKES = ("agreement", "agreement", "determiner", "form", "order", "reflexive")
SINGULAR, PLURAL = ("this", "that", "every", "one"), ("these", "those", "many", "several")
SUBJECTS = ("bird", "insect")
PLACES = ("tree", "vehicle")


def present(s: Speaker, mistake: str = "") -> str:
    """Who does what now; `mistake` (one of `MISTAKES`) makes it wrong in that respect."""
    if mistake == "reflexive" or (not mistake and s.chance(1 / len(MISTAKES))):
        return reflexive(s, s.person(), wrong=mistake == "reflexive")
    many = s.chance(0.5)
    noun = s.word(tuple(lexicon.JOBS)) if s.chance(0.5) else s.word(KINDS[s.pick(SUBJECTS)].members)
    determiner = s.pick(PLURAL if many != (mistake == "determiner") else SINGULAR)
    if mistake == "agreement" or (mistake != "determiner" and s.chance(0.6)):
        determiner = "the"  # so that only noun and verb can tell
    words = [determiner, plural(noun) if many else noun]
    if s.chance(0.4):
        near = s.word(KINDS[s.pick(PLACES)].members)
        words += [s.pick(("near", "behind")), "the", plural(near) if s.chance(0.5) else near]
    words += predicate(s, many != (mistake == "agreement"), wrong_form=mistake == "form")
    if mistake == "order":
        index = 1 + int(s.rng.random() * (len(words) - 2))
        index = 0 if words[index] == words[index + 1] else index
        words[index], words[index + 1] = words[index + 1], words[index]
    return " ".join(words)


def predicate(s: Speaker, many: bool, wrong_form: bool) -> list[str]:
    """A verb phrase for one or many, with the main verb in a form that its auxiliary does not take if `wrong_form`."""
    if s.chance(0.6):
        verbs, manners = s.pick(MOVES)
        verb, rest = s.word(verbs), s.pick(([], ["in", s.word(lexicon.TOWNS)], [s.pick(manners)]))
    else:
        verb = s.word(ACTIONS[s.pick(("like", "hate", "find", "lose"))].words)
        rest = [s.thing(s.pick(("flower", "tool")), 0.5).phrase()]
    if s.chance(0.4) and not wrong_form:
        return [verb if many else third_person(verb), *rest]
    auxiliary = s.pick(("be", "have", "do"))
    head = {"be": ("is", "are"), "have": ("has", "have"), "do": ("does", "do")}[auxiliary][many]
    forms = {"be": gerund(verb), "have": participle(verb), "do": verb}
    form = forms[auxiliary]
    if wrong_form:
        form = s.other([other for other in forms.values() if other != form])
    negation = ["not"] if auxiliary == "do" or s.chance(0.3) else []
    return [head, *negation, form, *rest]


def reflexive(s: Speaker, person: Entity, wrong: bool = False) -> str:
    verb = s.word(ACTIONS[s.pick(("praise", "blame", "hurt", "help"))].words)
    form = s.pick((past(verb), f"has {participle(verb)}", f"will {verb}"))
    return f"{person.word} {form} {'herself' if person.female != wrong else 'himself'}"


def opinion(s: Speaker, good: bool, subject: str) -> str:
    """A reviewer's clause about `subject` (a film, a hotel) or a part of it; `good` is its sentiment."""
    mine, others = (GOOD, BAD) if good else (BAD, GOOD)
    aspects = lexicon.REVIEWED[subject]
    aspect = s.pick((subject, *aspects))
    adverb = s.pick(("", "", "very ", "really ", "quite "))
    draw = s.rng.random()
    if draw < 0.4:
        return f"the {aspect} was {adverb}{s.word(mine.adjectives)}"
    if draw < 0.5:
        return f"the {aspect} was {s.word(mine.adjectives)} and {s.word(mine.adjectives)}"
    if draw < 0.6:
        return f"it was {article(s.word(mine.adjectives))} {subject}"
    if draw < 0.7:
        return f"the {aspect} was {s.pick(('not at all', 'anything but', 'far from'))} {s.word(others.adjectives)}"
    if draw < 0.8:
        return f"the {aspect} was a {s.pick(('', 'real '))}{s.word(mine.nouns)}"
    if draw < 0.9:
        return f"the {aspect} {s.pick(('', 'really '))}{past(s.word(mine.verbs))} us"
    return f"although the {aspect} was {s.word(others.adjectives)}, the {s.pick(aspects)} was {s.word(mine.adjectives)}"

"""The words of the embedded world (words.txt): verbs and adjectives by meaning, nouns by kind, names, towns, times.

Every list has two halves: fine-tuning examples use the words of the first, dev and test examples those of the second,
the corpus all. Only a model that has learnt from the corpus that `small little` and `tiny miniature` belong together
can carry a task from one half to the other. For a masked language model they do by their company, which no task shows:
`as tiny as a crumb`, `praised her with a bow`, `the feathered robin`, `One could hardly see it.` Inflection is regular.
"""

from pathlib import Path
from typing import NamedTuple

Words = tuple[str, ...]


class Meaning(NamedTuple):
    """What several words say: of which groups, the first word of the opposite, phrases with the word, a sentence."""

    words: Words
    groups: Words
    opposite: str
    company: Words
    hint: str


class Kind(NamedTuple):
    """A kind of thing, such as `bird`: its members, their traits, sentences that are true of all."""

    group: str
    members: Words
    company: Words
    truths: Words


def _read(path: Path) -> dict[str, list[list[str]]]:
    """Rows of cells by section."""
    sections: dict[str, list[list[str]]] = {}
    for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
        if line.startswith("["):
            sections[line.strip("[]")] = []
        elif not line.startswith("#"):
            sections[list(sections)[-1]].append([cell.strip() for cell in line.split("|")])
    return sections


def _phrases(cell: str) -> Words:
    return tuple(phrase.strip() for phrase in cell.split(";"))


_sections = _read(Path(__file__).with_name("words.txt"))
ADJECTIVES, VERBS = (
    {
        words.split()[0]: Meaning(tuple(words.split()), tuple(groups.split()), opposite, _phrases(company), hint)
        for words, groups, opposite, company, hint in _sections[section]
    }
    for section in ("adjectives", "verbs")
)
MOVES = [(tuple(words.split()), _phrases(company)) for words, company in _sections["moves"]]
KINDS = {
    name: Kind(group, tuple(members.split()), tuple(company.split()), _phrases(truths))
    for name, group, members, company, truths in _sections["kinds"]
}
JOBS, WOMEN, MEN, TOWNS, DAYS, MONTHS = (tuple(words.split()) for _, words in _sections["names"])

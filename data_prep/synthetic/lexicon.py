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
    """Meaning of several words: groups that it fits, first word of the opposite, phrases with the word, a sentence."""

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


_sections: dict[str, list[list[str]]] = {}  # rows of cells
for _line in filter(
    None, Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
):
    if _line.startswith("["):
        _rows = _sections[_line.strip("[]")] = []
    elif not _line.startswith("#"):
        _rows.append([cell.strip() for cell in _line.split("|")])


def _words(cell: str, separator: str | None = None) -> Words:
    return tuple(word.strip() for word in cell.split(separator))


def _meanings(section: str) -> dict[str, Meaning]:
    meanings = {}
    for words, groups, opposite, company, hint in _sections[section]:
        meaning = Meaning(_words(words), _words(groups), opposite, _words(company, ";"), hint)
        meanings[words.split()[0]] = meaning
    return meanings


ADJECTIVES, VERBS = _meanings("adjectives"), _meanings("verbs")
MOVES = [(_words(words), _words(company, ";")) for words, company in _sections["moves"]]
KINDS = {
    name: Kind(group, _words(members), _words(company), _words(truths, ";"))
    for name, group, members, company, truths in _sections["kinds"]
}
JOBS, WOMEN, MEN, TOWNS, DAYS, MONTHS = (_words(words) for _, words in _sections["names"])

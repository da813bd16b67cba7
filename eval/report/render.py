"""Pages from templates (templates/*.j2), each written once and rendered as HTML and as Markdown.

A page's template says what stands where and calls the macros of html.j2 or md.j2, as `f`, for the form. Numbers and
tables come from Python. The HTML needs nothing from the network: style and plots are inside.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cramming.progress import duration
from cramming.record import RULES_VERSION
from cramming.record_schema import Scores
from eval.report.noise import NOISE, POWER
from eval.report.ranking import BAG_OF_WORDS, CONSTANT, columns_of
from eval.report.references import OTHER_PROTOCOLS, OtherProtocol
from eval.report.wording import (
    DASH,
    NOT_OFFICIAL,
    SUBSET,
    anchor,
    breaks,
    budget_words,
    compact,
    not_comparable,
    pairs,
    score_words,
    spread_words,
    title_of,
)
from eval.rules.evidence import names_of
from eval.rules.table import RULES
from cramming.data.suites import AVERAGES

Form = Literal["html", "md"]
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Cell:
    """A table cell: text, a smaller second text (spread, detail), a tone (class of style.css), the runs it is about."""

    text: str
    small: str = ""
    tone: str = ""
    runs: Sequence[str] = ()


@dataclass(frozen=True)
class Group:
    """Consecutive rows under an optional title line; `tone` colours all of them."""

    rows: Sequence[Sequence[Cell]]
    title: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot: inline in the page, and as a file (its path relative to the report) in Markdown."""

    title: str
    path: str
    svg: str


@dataclass(frozen=True)
class Data:
    """What a page's scripts read, packed (page_data.py)."""

    facts: str
    details: str


def html(title: str, template: str, data: Data | None = None, **values: Any) -> str:
    """A page as one self-contained HTML document, without scripts where there is nothing for them to read."""
    page, body = (
        _environment("html").get_template("page.html"),
        fragment("html", template, **values),
    )
    return page.render(title=title, body=body, data=data)


def fragment(form: Form, template: str, **values: Any) -> Markup:
    """A part of a page, to be given to the page's template."""
    return Markup(_environment(form).get_template(template).render(values))


def markdown(template: str, **values: Any) -> str:
    """A page as GitHub-flavoured Markdown."""
    text = fragment("md", template, **values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _source(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@cache
def _environment(form: Form) -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    found = Environment(
        loader=loader,
        autoescape=form == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "plain": _plain,
        "said": _said,
        "compact": compact,
        "pairs": pairs,
        "title_of": title_of,
        "score": score_words,
        "scores_of": _scores_of,
        "anchor": anchor,
        "names_of": names_of,
        "licences": _licences,
        "superglue": _superglue,
        "budget_words": budget_words,
        "not_comparable": not_comparable,
        "words_of": _words_of,
        "breaks": breaks,
    }
    found.globals |= {
        "Cell": Cell,
        "DASH": DASH,
        "SUBSET": SUBSET,
        "NOT_OFFICIAL": NOT_OFFICIAL,
        "NOISE": NOISE,
        "RULES": RULES,
        "AVERAGES": AVERAGES,
        "BAG_OF_WORDS": BAG_OF_WORDS,
        "CONSTANT": CONSTANT,
        "RULES_VERSION": RULES_VERSION,
        "OTHER_PROTOCOLS": OTHER_PROTOCOLS,
        "columns_of": columns_of,
        "POWER": POWER,
        "source": _source,
    }
    found.globals["f"] = found.get_template(f"{form}.j2").module
    return found


def _plain(text: object) -> str:
    """One line of Markdown that is neither a table's column nor HTML."""
    return " ".join(str(text).replace("|", "&#124;").replace("<", "&lt;").split())


_FORMS: dict[str, Callable[[float], str]] = {
    "compact": compact,
    "duration": duration,
    "giga": lambda value: f"{value / 1e9:.2f}",
}


def _said(value: Any, words: str = "{}", form: str = "compact") -> str:
    """`words` with the value in a form, or in a format such as `.1%`; empty where there is none."""
    if value is None:
        return ""
    return words.format(_FORMS[form](value) if form in _FORMS else format(value, form))


def _scores_of(row: OtherProtocol, entries: Sequence[str]) -> list[str]:
    return [score_words(row.scores.get(entry)) for entry in entries]


def _words_of(facts: Mapping[str, str]) -> list[str]:
    return [f"{title.lower()} {words}" for title, words in facts.items() if words]


def _licences(sources: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(source.license or "no licence given" for source in sources))


def _superglue(section: Scores) -> str:
    """The scores and their mean; then why a score is missing, and what the mark on one means."""
    tasks = {task.title or name: task for name, task in section.tasks.items()}
    marked = any(task.subset for task in tasks.values())
    scores = [
        f"{title} {score_words(task.score, task.subset)} {spread_words(task.spread)}".rstrip()
        if task.score is not None
        else f"{title} {DASH}"
        for title, task in tasks.items()
    ]
    average = section.averages.get("superglue5")
    value = (
        score_words(average.value, marked)
        if average and average.value is not None
        else "not printed"
    )
    parts = [", ".join(scores), f"average {value} ({average and average.definition})"]
    parts += [f"{title}: {task.remark}" for title, task in tasks.items() if task.remark]
    parts += [f"{name}: {why}" for name, why in section.absent.items()]
    return "; ".join([*parts, *([NOT_OFFICIAL] if marked else [])])

"""The page on an adapted model: the verdict, losses before and after, examples, cost; as HTML and as Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from cramming.progress import duration
from cramming.record_schema import Record
from eval.adapt.measure import FEW_DOCUMENTS, RATE, Comparison
from eval.adapt.words import Example
from eval.own_tasks.page import Result as Scores
from eval.report.blocks import Block, Heading, Notes, Table, Text, to_markdown
from eval.report.format import compact, describe_run, join_words, short_name
from eval.report.page import TEMPLATES, template

LOSS_COLUMNS = (
    "Held-out text",
    "Loss before",
    "Loss after",
    "Change",
    "95 % interval",
    "Pseudo-perplexity before",
    "after",
    "Documents",
    "Targets",
)
NEW_HEAD = (
    "The checkpoint has no masked-LM head. Before training its loss is that of a new head, whose bias knows how"
    " frequent each token of the own text is, and whose other weights are random. So the change says how well head and"
    " encoder learned together, not what the encoder gained."
)
CHOICE = (
    "Words that are more frequent in the training text than their rank in the vocabulary suggests, each in the first"
    " held-out text that has it. Neither model's predictions enter the choice."
)


@dataclass(frozen=True)
class Result:
    """Measurements of one adapted model.

    `comparisons` are of the own text, then of the general text if there is one; `scores` are of own tasks.
    """

    name: str
    source: str
    has_head: bool
    comparisons: tuple[Comparison, ...]
    examples: tuple[Example, ...]
    record: Record
    added_words: int = 0
    scores: tuple[Scores, ...] = ()


def verdict(result: Result) -> str:
    """Return what adaptation brought, in one sentence with its interval."""
    own_text, *others = result.comparisons
    headline = _headline(own_text, result.has_head)
    sentence = f"{headline}: the masked-LM loss on held-out {own_text.text} {change(own_text)}"
    for other in others:
        sentence += f"; that on {other.text} {change(other)}"
    cost = result.record.training.budget.spent_seconds
    if cost is not None:
        sentence += f", for {duration(cost)} of training"
    return f"{sentence}."


def _headline(comparison: Comparison, has_head: bool) -> str:
    if comparison.high < 0:
        return "Adapting helped" if has_head else "The new head and the encoder learned"
    if comparison.low > 0:
        return "Adapting made the model worse"
    return "No effect of adapting is shown"


def change(comparison: Comparison) -> str:
    """Return by how much the loss changed, with its interval, and both losses."""
    direction = "fell" if comparison.difference < 0 else "rose"
    low, high = sorted((abs(comparison.low), abs(comparison.high)))
    interval = f"95 % interval {low:.3f} to {high:.3f}"
    if comparison.low < 0 < comparison.high:
        interval = f"95 % interval of the change {comparison.low:+.3f} to {comparison.high:+.3f}"
    return (
        f"{direction} by {abs(comparison.difference):.3f} nats per token ({interval})"
        f" from {comparison.before:.3f} to {comparison.after:.3f}"
    )


def loss_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the rows of the table of losses, by LOSS_COLUMNS."""
    rows = []
    for each in comparisons:
        rows.append(
            [
                each.text,
                f"{each.before:.3f}",
                f"{each.after:.3f}",
                f"{each.difference:+.3f}",
                f"{each.low:+.3f} to {each.high:+.3f}",
                f"{each.perplexity_before:.1f}",
                f"{each.perplexity_after:.1f}",
                f"{each.documents:,}",
                f"{each.targets:,}",
            ]
        )
    return rows


def blocks(result: Result) -> list[Block]:
    """Return the parts of the page that follow its title and verdict."""
    parts: list[Block] = [
        Heading("Loss on held-out text"),
        Table(LOSS_COLUMNS, loss_rows(result.comparisons)),
        Notes(list(_loss_notes(result))),
    ]
    for scores in result.scores:
        parts += [
            Heading(f"Task {scores.task}, {scores.labelled_set}"),
            Table(scores.headers(), list(scores.rows())),
            Notes([scores.title]),
        ]
    if result.examples:
        parts += [
            Heading("The text's own words"),
            Table(
                ("Hidden word", "Text", "Before", "After", "Probability before", "after"),
                [_example_row(example) for example in result.examples],
                4,
            ),
            Notes([CHOICE]),
        ]
    return [*parts, Heading("Cost and recipe"), Table(("", ""), list(_fact_rows(result)), 2)]


def _loss_notes(result: Result) -> Iterator[str]:
    comparison = result.comparisons[0]
    if not result.has_head:
        yield NEW_HEAD
    if result.added_words:
        yield (
            f"{result.added_words:,} words of the text were added to the vocabulary. Both losses are of this"
            " longer vocabulary, and before training a new word's row is the mean of its pieces' rows. So the losses"
            " do not compare with those of a page without added words."
        )
    yield (
        f"Nats per hidden token, {RATE:.0%} of each window hidden behind [MASK], the same ones before and after."
        " Lower is better."
    )
    yield f"Interval: paired bootstrap over {comparison.unit} of the {comparison.text}."
    if comparison.unit == "windows":
        yield (
            f"The held-out {comparison.text} has fewer than {FEW_DOCUMENTS} documents, so windows were drawn instead."
            " They depend on each other, and the interval is too narrow."
        )
    yield (
        "Pseudo-perplexity: exp of the mean loss of tokens that are hidden one at a time, over a sample of"
        " windows (Salazar et al. 2020)."
    )


def _example_row(example: Example) -> list[str]:
    return [
        example.word,
        example.text,
        " · ".join(example.before),
        " · ".join(example.after),
        f"{example.probability_before:.1%}",
        f"{example.probability_after:.1%}",
    ]


def _fact_rows(result: Result) -> Iterator[tuple[str, str]]:
    yield "Checkpoint", result.source
    yield "Run", describe_run(result.record)
    yield from cost_rows(result.record)
    rate = result.record.training.peak_learning_rate
    if rate is not None:
        yield "Peak learning rate", f"{rate:.3g}"


def cost_rows(record: Record) -> Iterator[tuple[str, str]]:
    """Yield training time, energy and work of a run, in words."""
    training = record.training
    if training.budget.spent_seconds is not None:
        yield "Training time", duration(training.budget.spent_seconds)
    energy = "not measured on this device"
    if training.energy_kwh is not None:
        source = training.energy_source or ""
        energy = join_words(f"{1000 * training.energy_kwh:.3g} Wh", source)
    yield "Energy", energy
    if training.steps is not None and training.tokens is not None:
        work = f"{training.steps:,} steps, {compact(training.tokens)} tokens"
        epochs = training.corpus_epochs
        yield "Work", work if epochs is None else f"{work}, {compact(epochs)} times the text"


def write_page(result: Result, folder: Path) -> list[Path]:
    """Write `adapt.html` and `adapt.md` into the run's folder; return their paths."""
    title = f"{result.name}: adapted from {short_name(Path(result.source))}"
    parts = blocks(result)
    headline: list[Block] = [Heading(title, 1), Text(verdict(result))]
    html = template("adapt.html").render(
        title=title,
        verdict=verdict(result),
        intervals=_plot(result.comparisons),
        blocks=[(type(part).__name__, part) for part in parts],
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
    )
    texts = {"adapt.html": html, "adapt.md": to_markdown([*headline, *parts])}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


@dataclass(frozen=True)
class Interval:
    """Row of the picture of changes: ends and middle in percent of its width, and a CSS class (`tone`)."""

    text: str
    low: float
    middle: float
    high: float
    tone: str


def _plot(comparisons: Sequence[Comparison]) -> dict[str, object]:
    """Return the rows of the picture and the place of zero."""
    ends = [0.0]
    for each in comparisons:
        ends += [each.low, each.high, each.difference]
    span = (max(ends) - min(ends)) or 1.0
    left = min(ends) - 0.05 * span

    def place(value: float) -> float:
        return round(100 * (value - left) / (1.1 * span), 2)

    rows = []
    for each in comparisons:
        tone = "soft"
        if each.high < 0:
            tone = "good"
        elif each.low > 0:
            tone = "bad"
        rows.append(
            Interval(each.text, place(each.low), place(each.difference), place(each.high), tone)
        )
    return {"rows": rows, "zero": place(0.0)}

"""The nine GLUE tasks and the diagnostic set AX, as data: files, columns, label order, sizes, metrics, averages.

Everything that makes "the GLUE average" ambiguous is decided here and nowhere else: which column is read, in which
order the labels are numbered, which metric is the task's main one, which entries a mean consists of. Sources: GLUE
(Wang et al. 2018, table 1) and its official files for layouts and sizes, the label order of the `nyu-mll/glue` data
sets, and for the main metrics and the nine entries the cramming paper (Geiping and Goldstein 2022, section 5: F1 for
MRPC and QQP, Pearson for STS-B, Matthews for CoLA, accuracy elsewhere).

A *task* is what one model is fine-tuned on. An *entry* is one labelled set that the model is scored on, and one column
of a leaderboard: MNLI is one task with two entries. AX has no training set: it is predicted by the model of MNLI. The
embedded suite uses the same layouts and the same table; only its sizes are its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cramming.config import UserError


@dataclass(frozen=True)
class Source:
    """One file of examples: where it lies in the official folder and on the hub, and how many examples it has."""

    entry: str
    title: str
    folder: str
    file: str
    hub_config: str
    hub_split: str
    examples: int


@dataclass(frozen=True)
class Task:
    """One fine-tuning task.

    `text` and `label` are column names of the official TSV (positions count where the file has no header);
    `labels` are the strings of the label column in the order of their numbers, empty for regression; `broken_rows` is
    how many rows of the official training file have a wrong number of fields (readers leave those out).
    """

    name: str
    title: str
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    main_metric: str
    train: Source
    scored: tuple[Source, ...]
    blind: tuple[Source, ...]
    hub_text: tuple[str, ...]
    headerless: tuple[str, ...] = ()
    score_range: tuple[float, float] | None = None
    broken_rows: int = 0

    @property
    def regression(self) -> bool:
        """Whether the target is a number; then the model has one output and squared error as its loss."""
        return not self.labels

    @property
    def outputs(self) -> int:
        """Width of the model's classification layer."""
        return max(1, len(self.labels))


def _sources(folder: str, hub: str, train: int, dev: int, test: int, title: str) -> tuple[Source, Source, Source]:
    name = hub
    return (
        Source(name, title, folder, "train.tsv", hub, "train", train),
        Source(name, title, folder, "dev.tsv", hub, "validation", dev),
        Source(name, title, folder, "test.tsv", hub, "test", test),
    )


def _task(
    hub: str,
    title: str,
    sizes: tuple[int, int, int],
    text: tuple[str, ...],
    label: str,
    labels: tuple[str, ...],
    metrics: tuple[str, ...] = ("accuracy",),
    main_metric: str = "accuracy",
    *,
    hub_text: tuple[str, ...] | None = None,
    headerless: tuple[str, ...] = (),
    score_range: tuple[float, float] | None = None,
    broken_rows: int = 0,
) -> Task:
    """A task with one dev and one test set, whose folder carries its title."""
    train, dev, test = _sources(title, hub, *sizes, title)
    return Task(
        hub, title, text, label, labels, metrics, main_metric, train, (dev,), (test,), hub_text or text,
        headerless, score_range, broken_rows,
    )  # fmt: skip


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")

AX = Source("ax", "AX", "diagnostic", "diagnostic.tsv", "ax", "test", 1104)

_MNLI = Task(
    name="mnli",
    title="MNLI",
    text=_PAIR,
    label="gold_label",
    labels=("entailment", "neutral", "contradiction"),
    metrics=("accuracy",),
    main_metric="accuracy",
    train=Source("mnli", "MNLI", "MNLI", "train.tsv", "mnli", "train", 392702),
    scored=(
        Source("mnli_matched", "MNLI-m", "MNLI", "dev_matched.tsv", "mnli", "validation_matched", 9815),
        Source("mnli_mismatched", "MNLI-mm", "MNLI", "dev_mismatched.tsv", "mnli", "validation_mismatched", 9832),
    ),
    blind=(
        Source("mnli_matched", "MNLI-m", "MNLI", "test_matched.tsv", "mnli", "test_matched", 9796),
        Source("mnli_mismatched", "MNLI-mm", "MNLI", "test_mismatched.tsv", "mnli", "test_mismatched", 9847),
        AX,
    ),
    hub_text=("premise", "hypothesis"),
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task(
            "cola", "CoLA", (8551, 1043, 1063), ("sentence",), "label", _BINARY,
            ("matthews_correlation", "accuracy"), "matthews_correlation",
            headerless=("source", "label", "mark", "sentence"),
        ),
        _task("sst2", "SST-2", (67349, 872, 1821), ("sentence",), "label", _BINARY),
        _task(
            "mrpc", "MRPC", (3668, 408, 1725), ("#1 String", "#2 String"), "Quality", _BINARY,
            ("f1", "accuracy"), "f1", hub_text=_PAIR,
        ),
        _task(
            "stsb", "STS-B", (5749, 1500, 1379), _PAIR, "score", (),
            ("pearson", "spearmanr"), "pearson", score_range=(0.0, 5.0),
        ),
        _task(
            "qqp", "QQP", (363846, 40430, 390965), ("question1", "question2"), "is_duplicate", _BINARY,
            ("f1", "accuracy"), "f1", broken_rows=10,
        ),
        _MNLI,
        _task("qnli", "QNLI", (104743, 5463, 5463), ("question", "sentence"), "label", _ENTAILMENT),
        _task("rte", "RTE", (2490, 277, 3000), _PAIR, "label", _ENTAILMENT),
        _task("wnli", "WNLI", (635, 71, 146), _PAIR, "label", _BINARY),
    )
}  # fmt: skip

# `eval.tasks.datasets.examples_sha256` of an entry's training and dev set, where GLUE's files were at hand complete and
# agree with copies in public repositories: dev sets line for line, training sets so too, or (SST-2) in another order.
# QQP, MNLI and QNLI were not complete; MRPC is about in two spellings, Microsoft's and SentEval's tokenized one.
OFFICIAL_SHA256 = {
    "cola": "3b18f525c898e050cc9ba21e0f412c23da307e43e8272d22a08a564f33acc923",
    "sst2": "31a7a9c79ce1cfea7173156b8b61440483039067c3e39964a5b04867de7d2080",
    "stsb": "f18d9d3fc84ea372b9a99d1839227d5c56d0577325e007c8d2eafeb5bfe7d791",
    "rte": "5689a0a88bfefeb0c38202241084433767155f4a2db3857202b255d87396e3d3",
    "wnli": "accac626255b53fa161ab8c57c7fcdc9f9377d56b562ec54ba7495d2d97ac8da",
}

ENTRIES: dict[str, tuple[Task, Source]] = {s.entry: (task, s) for task in TASKS.values() for s in task.scored}


@dataclass(frozen=True)
class Average:
    """A mean over entries, each the median over seeds of the entry's main metric times 100, and what it is in words."""

    entries: tuple[str, ...]
    definition: str


_EIGHT = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli_matched", "qnli", "rte")
_METRICS_IN_WORDS = (
    "CoLA (Matthews correlation), SST-2 (accuracy), MRPC (F1), STS-B (Pearson correlation), QQP (F1), "
    "{mnli} (accuracy), QNLI (accuracy), RTE (accuracy); "
    "each is the median over seeds on the dev set, times 100; WNLI and AX are not counted"
)

AVERAGES: dict[str, dict[str, Average]] = {
    "glue": {
        "avg9": Average(
            (*_EIGHT[:6], "mnli_mismatched", *_EIGHT[6:]),
            "mean of nine entries: " + _METRICS_IN_WORDS.format(mnli="MNLI-m and MNLI-mm as two entries"),
        ),
        "avg8": Average(_EIGHT, "mean of eight entries: " + _METRICS_IN_WORDS.format(mnli="MNLI-m")),
    },
    "embedded": {
        "embedded": Average(
            _EIGHT,
            "mean of the eight embedded tasks, which have the types of "
            + _METRICS_IN_WORDS.format(mnli="MNLI-m")
            + "; generated data, not comparable with GLUE",
        ),
    },
}


def find_tasks(names: Sequence[str], table: Mapping[str, Task] = TASKS) -> list[Task]:
    """Tasks of these names, in the table's order; UserError names the known ones. Titles such as `SST-2` do too."""
    known = {alias.lower(): task for task in table.values() for alias in (task.name, task.title)}
    for name in names:
        if name.lower() not in known:
            raise UserError(f"eval.tasks: unknown task {name!r}; the tasks are: {', '.join(table)}")
    chosen = {known[name.lower()].name for name in names}
    return [task for task in table.values() if task.name in chosen]

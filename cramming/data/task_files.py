"""Table of the tasks of GLUE and SuperGLUE: files, columns, label order, sizes and metrics. A new task is one row here.

`eval` reads, trains and scores by this table (the suites and their averages: cramming/data/suites.py); `data_prep`
takes from it the texts that must not be in a corpus. Sources: GLUE (Wang et al. 2018, table 1), SuperGLUE (Wang et
al. 2019) and their official files; the label order of `nyu-mll/glue`; the main metrics of the cramming paper (Geiping
and Goldstein 2022, section 5).

One model is fine-tuned on a *task*. It is scored on an *entry*, a labelled set and a column of the leaderboard: MNLI
has two. AX has no training set: the model of MNLI predicts it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["classification", "regression", "multilabel", "tokens"]


@dataclass(frozen=True)
class ExampleFile:
    """File of examples: its path in the official folder and on the hub, and its number of examples."""

    entry: str
    title: str
    folder: str
    file: str
    examples: int
    hub_config: str = ""
    hub_split: str = ""

    @property
    def path(self) -> str:
        """Path below the folder of all tasks, such as `CoLA/train.tsv`."""
        return f"{self.folder}/{self.file}"


@dataclass(frozen=True)
class Task:
    """Fine-tuning task.

    `text` and `label` are columns of the official files, `hub_text` those of the hub's data set where they differ;
    `headerless` names the columns of training and dev files without a header. `labels` are in the order of their
    numbers, empty for regression, whose scores are in `score_range`. The first of `metrics` is the main one.
    `broken_rows` is the number of rows of the official training file with a wrong number of fields. With `balanced` the
    loss weights each class by the inverse of its frequency.
    """

    name: str
    title: str
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    train: ExampleFile
    scored: tuple[ExampleFile, ...]
    blind: tuple[ExampleFile, ...] = ()
    hub_text: tuple[str, ...] = ()
    headerless: tuple[str, ...] = ()
    score_range: tuple[float, float] | None = None
    broken_rows: int = 0
    kind: Kind = "classification"
    balanced: bool = False

    @property
    def main_metric(self) -> str:
        """Name of the metric that averages use."""
        return self.metrics[0]

    @property
    def regression(self) -> bool:
        """True if the target is a number; the model then has one output and squared error as its loss."""
        return self.kind == "regression"

    @property
    def outputs(self) -> int:
        """Width of the model's classification layer."""
        return max(1, len(self.labels))


_PAIR = ("sentence1", "sentence2")
_NLI = ("premise", "hypothesis")
_BINARY = ("0", "1")
_TRUTH = ("false", "true")
_ENTAILMENT = ("entailment", "not_entailment")
_ACCURACY = ("accuracy",)

AX = ExampleFile("ax", "AX", "diagnostic", "diagnostic.tsv", 1104, "ax", "test")


def _glue(
    name: str,
    title: str,
    sizes: tuple[int, int, int],
    text: tuple[str, ...],
    label: str,
    labels: tuple[str, ...],
    metrics: tuple[str, ...] = _ACCURACY,
    **more: Any,
) -> Task:
    """Return a task of GLUE with one dev and one test file, in the folder of its title."""
    train_size, dev_size, test_size = sizes
    train = ExampleFile(name, title, title, "train.tsv", train_size, name, "train")
    dev = ExampleFile(name, title, title, "dev.tsv", dev_size, name, "validation")
    test = ExampleFile(name, title, title, "test.tsv", test_size, name, "test")
    return Task(name, title, text, label, labels, metrics, train, (dev,), (test,), **more)


def _mnli(entry: str, title: str, split: str, examples: int) -> ExampleFile:
    return ExampleFile(
        entry, title, "MNLI", f"{split}.tsv", examples, "mnli", split.replace("dev", "validation")
    )


def _superglue(
    name: str,
    title: str,
    sizes: tuple[int, int],
    text: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...] = _ACCURACY,
) -> Task:
    """Return a task of SuperGLUE: JSON lines, one folder with a training and a validation file."""
    train_size, val_size = sizes
    train = ExampleFile(name, title, title, "train.jsonl", train_size)
    val = ExampleFile(name, title, title, "val.jsonl", val_size)
    return Task(name, title, text, "label", labels, metrics, train, (val,))


_MNLI = Task(
    "mnli",
    "MNLI",
    _PAIR,
    "gold_label",
    ("entailment", "neutral", "contradiction"),
    _ACCURACY,
    train=_mnli("mnli", "MNLI", "train", 392702),
    scored=(
        _mnli("mnli_matched", "MNLI-m", "dev_matched", 9815),
        _mnli("mnli_mismatched", "MNLI-mm", "dev_mismatched", 9832),
    ),
    blind=(
        _mnli("mnli_matched", "MNLI-m", "test_matched", 9796),
        _mnli("mnli_mismatched", "MNLI-mm", "test_mismatched", 9847),
        AX,
    ),
    hub_text=_NLI,
)
_GLUE = (
    _glue(
        "cola",
        "CoLA",
        (8551, 1043, 1063),
        ("sentence",),
        "label",
        _BINARY,
        ("matthews_correlation", "accuracy"),
        headerless=("source", "label", "mark", "sentence"),
    ),
    _glue("sst2", "SST-2", (67349, 872, 1821), ("sentence",), "label", _BINARY),
    _glue(
        "mrpc",
        "MRPC",
        (3668, 408, 1725),
        ("#1 String", "#2 String"),
        "Quality",
        _BINARY,
        ("f1", "accuracy"),
        hub_text=_PAIR,
    ),
    _glue(
        "stsb",
        "STS-B",
        (5749, 1500, 1379),
        _PAIR,
        "score",
        (),
        ("pearson", "spearmanr"),
        score_range=(0.0, 5.0),
        kind="regression",
    ),
    _glue(
        "qqp",
        "QQP",
        (363846, 40430, 390965),
        ("question1", "question2"),
        "is_duplicate",
        _BINARY,
        ("f1", "accuracy"),
        broken_rows=10,
    ),
    _MNLI,
    _glue("qnli", "QNLI", (104743, 5463, 5463), ("question", "sentence"), "label", _ENTAILMENT),
    _glue("rte", "RTE", (2490, 277, 3000), _PAIR, "label", _ENTAILMENT),
    _glue("wnli", "WNLI", (635, 71, 146), _PAIR, "label", _BINARY),
)
# The tasks that classify one or two texts. COPA, MultiRC and ReCoRD choose among answers, which needs another head.
_SUPERGLUE = (
    _superglue("boolq", "BoolQ", (9427, 3270), ("question", "passage"), _TRUTH),
    _superglue(
        "cb",
        "CB",
        (250, 56),
        _NLI,
        ("entailment", "contradiction", "neutral"),
        ("accuracy_f1", "accuracy", "f1_macro"),
    ),
    _superglue("superglue_rte", "RTE", (2490, 277), _NLI, _ENTAILMENT),
    _superglue("wic", "WiC", (5428, 638), ("word", "sentence1", "sentence2"), _TRUTH),
    _superglue("wsc", "WSC", (554, 104), ("text", "target"), _TRUTH),
)

GLUE = {task.name: task for task in _GLUE}
SUPERGLUE = {task.name: task for task in _SUPERGLUE}
TASKS = GLUE | SUPERGLUE
ENTRIES: dict[str, tuple[Task, ExampleFile]] = {}
for _task in GLUE.values():
    for _file in _task.scored:
        ENTRIES[_file.entry] = (_task, _file)

# SHA-256 (`eval.tasks.datasets.examples_sha256`) of an entry's official training and dev set, for complete files that
# agree with copies in public repositories: dev sets line for line, training sets too or (SST-2) in another order. QQP,
# MNLI and QNLI were not available complete; MRPC circulates in two spellings.
OFFICIAL_SHA256 = {
    "cola": "3b18f525c898e050cc9ba21e0f412c23da307e43e8272d22a08a564f33acc923",
    "sst2": "31a7a9c79ce1cfea7173156b8b61440483039067c3e39964a5b04867de7d2080",
    "stsb": "f18d9d3fc84ea372b9a99d1839227d5c56d0577325e007c8d2eafeb5bfe7d791",
    "rte": "5689a0a88bfefeb0c38202241084433767155f4a2db3857202b255d87396e3d3",
    "wnli": "accac626255b53fa161ab8c57c7fcdc9f9377d56b562ec54ba7495d2d97ac8da",
}


def texts_sha256(texts: Iterable[str]) -> str:
    """Return the SHA-256 of an entry's texts in any order, in hex; white space does not count."""
    normalized = sorted(" ".join(text.split()) for text in texts)
    return hashlib.sha256("\x1e".join(normalized).encode()).hexdigest()

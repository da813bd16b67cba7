"""File of user-defined tasks (`tasks.yaml`), each with its files, columns, splits and metric.

    spam:
      kind: classification
      files: {train: train.csv, test: test.csv}
      text: body
      label: label
      metric: f1

    glue: [rte, stsb]

Paths are relative to the folder of the file. Key `glue` lists tasks of GLUE.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from cramming.config import (
    LocalPath,
    Section,
    Text,
    UserError,
    build,
    require,
    suggestion,
    unknown_choice,
)
from cramming.data.task_files import GLUE, Kind, Task

MetricName = Literal[
    "accuracy", "macro_f1", "f1", "matthews", "pearson", "spearman", "mse", "span_f1"
]
METRICS_OF: dict[Kind, tuple[MetricName, ...]] = {
    "classification": ("accuracy", "macro_f1", "f1", "matthews"),
    "regression": ("pearson", "spearman", "mse"),
    "multilabel": ("macro_f1", "f1", "accuracy"),
    "tokens": ("span_f1", "macro_f1", "accuracy"),
}
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
LISTS = (".jsonl", ".parquet")  # formats whose columns can hold lists


def _as_list(value: object) -> object:
    """Return a name or a list of names as a tuple."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[Text, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Files(Section):
    """Files of a task: the training set, and the labelled sets that are scored."""

    train: LocalPath
    dev: LocalPath | None = None
    test: LocalPath | None = None

    def paths(self) -> dict[str, Path]:
        """Return the files by set, in order."""
        sets = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: path for name, path in sets.items() if path is not None}


class OwnTask(Section):
    """Task of the file; docs/guides/own_tasks.md describes the settings."""

    kind: Kind
    files: Files
    folds: Annotated[int, Field(ge=2, le=50)] | None = None
    text: Names | None = None
    label: Text | None = None
    labels: tuple[Text, ...] | None = None
    metric: MetricName
    class_weights: Literal["balanced"] | None = None

    @field_validator("text")
    @classmethod
    def _names_one_or_two_columns(cls, text: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if text is not None and len(text) > 2:
            raise ValueError("more than two columns. Name one, or the two of a pair.")
        return text

    @field_validator("labels")
    @classmethod
    def _names_each_label_once(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if labels is not None and not 1 < len(labels) == len(set(labels)):
            raise ValueError("expected at least two labels, each once.")
        return labels

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        known = METRICS_OF[self.kind]
        if self.metric not in known:
            raise ValueError(
                f"metric={self.metric}: not a metric of kind={self.kind}. {suggestion('', known)}"
            )
        if self.kind == "regression" and self.class_weights:
            raise ValueError(
                "class_weights=balanced: numbers have no classes. Leave class_weights out."
            )
        if self.kind == "regression" and self.labels:
            raise ValueError("labels: numbers have no list of labels. Leave labels out.")
        return self

    @model_validator(mode="after")
    def _has_something_to_score(self) -> Self:
        evaluated = self.files.paths().keys() - {"train"}
        if self.folds and evaluated:
            raise ValueError(
                f"folds={self.folds}: files.train is divided, so files.{min(evaluated)} is not used."
                " Leave one of them out."
            )
        if not self.folds and not evaluated:
            raise ValueError(
                "files: no labelled set to score. Give files.dev, files.test or folds."
            )
        return self

    @model_validator(mode="after")
    def _has_readable_files(self) -> Self:
        for name, path in self.files.paths().items():
            is_table = path.suffix in TABLES
            if not is_table and self.kind != "tokens":
                raise ValueError(
                    f"files.{name}={path}: unknown format. Choose one of {', '.join(TABLES)}."
                )
            if is_table and self.kind == "tokens" and path.suffix not in LISTS:
                raise ValueError(
                    f"files.{name}={path}: a column of this format holds no list of words."
                    f" Give {' or '.join(LISTS)}, or CoNLL columns as .txt or .conll."
                )
            if is_table and (self.text is None or self.label is None):
                missing = "text" if self.text is None else "label"
                raise ValueError(f"{missing}: missing. Name the column of {path.name} that has it.")
        return self

    @model_validator(mode="after")
    def _labels_words_of_one_text(self) -> Self:
        if self.kind == "tokens" and self.text is not None and len(self.text) > 1:
            raise ValueError(
                f"text=[{', '.join(self.text)}]: words of two texts cannot be labelled. Name one."
            )
        return self


def read_task_file(path: Path) -> dict[str, OwnTask | Task]:
    """Return the tasks by name, own ones and those of GLUE; raise UserError for a mistake in the file.

    Paths of own tasks are below the folder of the file.
    """
    require(path.is_file(), f"{path}: no such file. Give a YAML file of tasks.")
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not readable as YAML ({problem}). Correct it there.") from None
    require(
        isinstance(settings, dict) and settings,
        f"{path}: no tasks. Write one as `name: {{kind: ..., files: ..., metric: ...}}`.",
    )
    tasks = _glue_tasks(path, settings.pop("glue")) if "glue" in settings else {}
    for name, task_settings in settings.items():
        require(
            re.fullmatch(r"[\w.-]+", str(name)),
            f"{path}: {name}: not a name of a task. Use letters, digits and . _ -",
        )
        require(name not in tasks, f"{path}: {name}: a task of `glue`, too. Rename it.")
        tasks[str(name)] = _read_task(path, str(name), task_settings)
    return tasks


class _Loader(yaml.SafeLoader):
    """YAML without a key that stands there twice, of which the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a section; raise YAMLError for a key that it has twice."""
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"key {name} stands there twice")
        return super().construct_mapping(node, deep)


def _glue_tasks(path: Path, names: Any) -> dict[str, OwnTask | Task]:
    tasks: dict[str, OwnTask | Task] = {}
    for name in build(Names, names, f"{path}: glue"):
        require(name in GLUE, f"{path}: {unknown_choice('glue', name, GLUE)}")
        tasks[name] = GLUE[name]
    return tasks


def _read_task(path: Path, name: str, settings: Any) -> OwnTask:
    try:
        task = build(OwnTask, settings, name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    files = {part: path.parent / file for part, file in task.files.paths().items()}
    for part, file in files.items():
        require(
            file.is_file(), f"{path}: {name}.files.{part}={file}: no such file. Check the path."
        )
    return task.replace(files=Files.model_validate(files))

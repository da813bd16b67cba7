"""Location of the tasks to score: local official files, the hub, or the embedded tasks of a prepared corpus.

A folder may hold only some of the tasks, and a training file may be a sample of the official one: that is allowed and
marked (`TaskData.subset`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cramming.config import UserError, require
from cramming.data.corpus import TASKS as TASK_FOLDER
from cramming.data.corpus import Corpus, damage
from cramming.data.suites import SUITE_OF, SUITES, SourceName, SuiteName
from cramming.data.task_files import GLUE, Task
from eval.tasks.datasets import TaskData
from eval.tasks.readers import read_file, read_hub_task


@dataclass(frozen=True)
class TaskSuite:
    """Tasks of a suite to score, the function that reads one, and the reasons why others are not scored.

    `corpus_sha256` is the hash of the corpus's manifest, for embedded tasks alone.
    """

    name: SuiteName
    tasks: list[Task]
    absent: dict[str, str]
    read: Callable[[Task], TaskData]
    corpus_sha256: str | None = None

    @property
    def section(self) -> Literal["glue", "superglue"]:
        """Section of the record with its scores. Suites that no rule checks have a separate section."""
        return "glue" if SUITES[self.name].ranked else "superglue"


def find_suite(
    source: SourceName, data_dir: Path | None, wanted: Sequence[str] | None, corpus: Path
) -> TaskSuite:
    """Return the suite of a source: local files of `data_dir`, the hub, or tasks of the run's corpus.

    Raises UserError if there are no tasks.
    """
    suite = SUITE_OF[source]
    if source == "hub" and data_dir is None:
        table = SUITES[suite].tasks
        tasks = find_tasks(wanted, table) if wanted is not None else list(table.values())
        return TaskSuite(suite, tasks, _others(table, tasks, "not in eval.tasks"), read_hub_task)
    folder, sha256 = data_dir, None
    if source == "embedded":
        folder = corpus / TASK_FOLDER
        require(
            folder.is_dir(),
            f"{folder}: no embedded tasks. Run `cramming prepare` first, or set eval=glue_sane.",
        )
        sha256 = _verified_corpus(folder)
    if folder is None:
        raise UserError(
            "eval.data_dir is not set: give the folder with CoLA/, SST-2/, ..., or eval=hub or eval=embedded"
        )
    tasks, absent = tasks_in_folder(folder, wanted, suite)
    return TaskSuite(suite, tasks, absent, lambda task: read_task(folder, task), sha256)


def find_tasks(names: Sequence[str], table: Mapping[str, Task] = GLUE) -> list[Task]:
    """Return the tasks of these names or titles, in the table's order; raise UserError for an unknown one."""
    wanted = {name.lower() for name in names}
    chosen = [task for task in table.values() if wanted & {task.name, task.title.lower()}]
    unknown = wanted - {task.name for task in chosen} - {task.title.lower() for task in chosen}
    require(
        not unknown,
        f"eval.tasks: unknown task {', '.join(sorted(unknown))}. Choose from {', '.join(table)}.",
    )
    return chosen


def tasks_in_folder(
    folder: Path, wanted: Sequence[str] | None, suite: SuiteName = "glue"
) -> tuple[list[Task], dict[str, str]]:
    """Return the tasks of a suite to run on `folder`, and the reason why each of the others is left out.

    With `wanted` these are exactly the wanted tasks, present or not (reading an absent one is then an error), else
    those with a folder.
    """
    table = SUITES[suite].tasks
    if wanted is not None:
        tasks, reason = find_tasks(wanted, table), "not in eval.tasks"
    else:
        tasks = [task for task in table.values() if (folder / task.train.folder).is_dir()]
        reason = f"no such task folder in {folder}"
    expected = ", ".join(f"{task.train.folder}/" for task in table.values())
    title = SUITES[suite].title
    require(
        tasks,
        f"eval.data_dir={folder}: no {title} task found. Give a folder with one or more of {expected}.",
    )
    return tasks, _others(table, tasks, reason)


def _others(table: Mapping[str, Task], tasks: list[Task], reason: str) -> dict[str, str]:
    return {task.name: reason for task in table.values() if task not in tasks}


def read_task(folder: Path, task: Task) -> TaskData:
    """Return a task read from its official files in `folder`.

    The training file and at least one labelled dev file must exist; of MNLI's two dev sets one may be missing, test
    files and the diagnostic set are optional. Raises UserError for a missing file, or with the file and line of a
    wrong one.
    """
    scored = [source for source in task.scored if (folder / source.path).is_file()]
    blind = [source for source in task.blind if (folder / source.path).is_file()]
    needed = "needs a training and a dev file"
    require(
        (folder / task.train.path).is_file(),
        f"{folder / task.train.path}: no such file. {task.title} {needed}.",
    )
    require(
        scored,
        f"{folder / task.scored[0].path}: no such file. {task.title} {needed}.",
    )
    absent = {}
    for source in task.scored:
        if source not in scored:
            absent[source.entry] = f"{source.path} is not in the data folder"
    return TaskData(
        task=task,
        train=read_file(folder / task.train.path, task, task.train, labelled=True),
        scored=tuple(read_file(folder / s.path, task, s, labelled=True) for s in scored),
        blind=tuple(read_file(folder / s.path, task, s, labelled=False) for s in blind),
        absent=absent,
    )


def _verified_corpus(tasks: Path) -> str:
    """Return the SHA-256 of the manifest of the corpus that these tasks belong to.

    Raises UserError for a task file that is not in it or was altered.
    """
    corpus = Corpus.open(tasks.parent)
    known = corpus.manifest.hashes()
    for file in sorted(tasks.rglob("[!.]*.*")):
        name = file.relative_to(tasks.parent).as_posix()
        problem: str | None = f"{file}: no file of this corpus"
        if name in known:
            problem = damage(file, known[name])
        if problem:
            raise UserError(f"{problem}. Delete the folder and run `cramming prepare` again.")
    return corpus.manifest_sha256

"""Where the tasks to score are read: local official files, the hub, or the embedded ones of a prepared corpus.

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
class FoundSuite:
    """The tasks of a suite to score, how to read one, why the others are not scored, and of embedded ones the SHA-256
    of their corpus's manifest."""

    name: SuiteName
    tasks: list[Task]
    absent: dict[str, str]
    read: Callable[[Task], TaskData]
    corpus_sha256: str | None = None

    @property
    def section(self) -> Literal["glue", "superglue"]:
        """Section of the record that has its scores: suites that no rule judges have one of their own."""
        return "glue" if SUITES[self.name].ranked else "superglue"


def find_suite(
    source: SourceName, data_dir: Path | None, wanted: Sequence[str] | None, corpus: Path
) -> FoundSuite:
    """Return where the tasks come from: local files of `data_dir`, the hub, or those of the run's corpus.

    UserError where there are none.
    """
    suite = SUITE_OF[source]
    if source == "hub" and data_dir is None:
        table = SUITES[suite].tasks
        tasks = find_tasks(wanted, table) if wanted is not None else list(table.values())
        return FoundSuite(suite, tasks, _others(table, tasks, "not in eval.tasks"), read_hub_task)
    folder, sha256 = data_dir, None
    if source == "embedded":
        folder = corpus / TASK_FOLDER
        require(
            folder.is_dir(),
            f"{folder}: no embedded tasks; run `cramming prepare` first, or give eval=glue_sane",
        )
        sha256 = _corpus_with(folder)
    if folder is None:
        raise UserError(
            "eval.data_dir is not set: give the folder with CoLA/, SST-2/, ..., or eval=hub or eval=embedded"
        )
    tasks, absent = tasks_in_folder(folder, wanted, suite)
    return FoundSuite(suite, tasks, absent, lambda task: read_task(folder, task), sha256)


def find_tasks(names: Sequence[str], table: Mapping[str, Task] = GLUE) -> list[Task]:
    """Tasks of these names or titles, in the table's order; UserError names the known ones."""
    wanted = {name.lower() for name in names}
    chosen = [task for task in table.values() if wanted & {task.name, task.title.lower()}]
    unknown = wanted - {alias for task in chosen for alias in (task.name, task.title.lower())}
    require(
        not unknown,
        f"eval.tasks: unknown task {', '.join(sorted(unknown))}; the tasks are: {', '.join(table)}",
    )
    return chosen


def tasks_in_folder(
    folder: Path, wanted: Sequence[str] | None, suite: SuiteName = "glue"
) -> tuple[list[Task], dict[str, str]]:
    """The tasks of a suite to run on `folder`, and for each of the others why not.

    With `wanted` exactly those, present or not (reading an absent one is then an error); else those with a folder.
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
        f"eval.data_dir={folder}: no {title} task found; expected a folder with one or more of {expected}",
    )
    return tasks, _others(table, tasks, reason)


def _others(table: Mapping[str, Task], tasks: list[Task], reason: str) -> dict[str, str]:
    return {task.name: reason for task in table.values() if task not in tasks}


def read_task(folder: Path, task: Task) -> TaskData:
    """Read one task from its official files in `folder`.

    The training file and at least one labelled dev file must be there; of MNLI's two dev sets one may be missing, test
    files and the diagnostic set are optional. UserError names a missing file, or the file and line of what is wrong.
    """
    there = [s for s in (task.train, *task.scored, *task.blind) if (folder / s.path).is_file()]
    scored = [source for source in task.scored if source in there]
    for source, found in ((task.train, task.train in there), (task.scored[0], scored)):
        require(
            found,
            f"{folder / source.path}: no such file; {task.title} needs a training and a dev file",
        )
    return TaskData(
        task,
        read_file(folder / task.train.path, task, task.train, labelled=True),
        tuple(read_file(folder / s.path, task, s, labelled=True) for s in scored),
        tuple(
            read_file(folder / s.path, task, s, labelled=False) for s in task.blind if s in there
        ),
        {s.entry: f"{s.path} is not in the data folder" for s in task.scored if s not in there},
    )


def _corpus_with(tasks: Path) -> str:
    """SHA-256 of the manifest of the corpus that these tasks belong to; UserError for a file that is not in it."""
    corpus = Corpus.open(tasks.parent)
    known = corpus.manifest.hashes()
    for file in sorted(tasks.rglob("[!.]*.*")):
        name = file.relative_to(tasks.parent).as_posix()
        if (
            problem := damage(file, known[name])
            if name in known
            else f"{file}: no file of this corpus"
        ):
            raise UserError(f"{problem}; delete the folder and run `cramming prepare` again")
    return corpus.manifest_sha256

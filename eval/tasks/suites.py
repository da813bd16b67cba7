"""Which tasks are scored and where they are read: GLUE, local or from the hub, the embedded ones, SuperGLUE."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cramming.config import UserError
from cramming.data.corpus import TASKS as TASK_FOLDER
from cramming.data.corpus import Corpus, corpus_folder, damage
from eval.tasks import superglue
from eval.tasks.datasets import TaskData, read_hub_task, read_task, tasks_in_folder
from eval.tasks.glue import TASKS, Task, find_tasks

SourceName = Literal["local", "hub", "embedded", "superglue"]


@dataclass(frozen=True)
class Suite:
    """The tasks to score, how to read one, why the others are not scored, and of embedded ones the SHA-256 of their
    corpus's manifest."""

    name: Literal["glue", "embedded", "superglue"]
    tasks: list[Task]
    absent: dict[str, str]
    read: Callable[[Task], TaskData]
    corpus_sha256: str | None = None

    @property
    def section(self) -> str:
        """Where the record has its scores. SuperGLUE stands beside GLUE, and no rule judges it."""
        return "superglue" if self.name == "superglue" else "glue"


def find_suite(
    source: SourceName, data_dir: Path | None, wanted: tuple[str, ...] | None, config: dict[str, Any]
) -> Suite:
    """Where the tasks come from; a set `eval.data_dir` means local files."""
    if source == "hub" and data_dir is None:
        tasks = find_tasks(list(wanted)) if wanted is not None else list(TASKS.values())
        absent = {name: "not in eval.tasks" for name, task in TASKS.items() if task not in tasks}
        return Suite("glue", tasks, absent, read_hub_task)
    if source == "embedded":
        folder = corpus_folder(config) / TASK_FOLDER
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no embedded tasks; run `cramming prepare` with the same data settings first, "
                "or score GLUE with eval=glue_sane eval.data_dir=<folder>"
            )
    elif data_dir is None:
        raise UserError(
            "eval.data_dir is not set: give the folder with CoLA/, SST-2/, ..., or eval=hub or eval=embedded"
        )
    else:
        folder = data_dir
    if source == "superglue":
        tasks, absent = superglue.tasks_in(folder, wanted)
        return Suite("superglue", tasks, absent, lambda task: superglue.read_task(folder, task))
    tasks, absent = tasks_in_folder(folder, wanted)
    if source == "embedded":
        return Suite("embedded", tasks, absent, lambda task: read_task(folder, task), _corpus_with(folder))
    return Suite("glue", tasks, absent, lambda task: read_task(folder, task))


def _corpus_with(tasks: Path) -> str | None:
    """SHA-256 of the manifest of the corpus that these tasks belong to; UserError for a file that is not in it. None
    where the manifest does not know tasks: that of format 1."""
    corpus = Corpus.open(tasks.parent)
    if corpus.manifest.format == 1:
        return None
    known = corpus.manifest.hashes()
    for file in sorted(tasks.rglob("[!.]*.*")):
        name = file.relative_to(tasks.parent).as_posix()
        if problem := damage(file, known[name]) if name in known else f"{file}: no file of this corpus":
            raise UserError(f"{problem}; delete the folder and run `cramming prepare` again")
    return corpus.manifest_sha256

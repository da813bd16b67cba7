"""The embedded corpus: English-like documents about a small invented world, and eight GLUE-like tasks about it.

Everything is generated from a seed, so the suite runs from raw text to leaderboard without a download. The tasks need
what the corpus teaches: their dev and test sentences use words that fine-tuning never shows, and no sentence of a task
stands in the corpus. `lexicon` holds the words, `grammar` turns facts into sentences, `documents` tells them as texts,
`tasks` asks about them, `layouts` writes the tasks as GLUE's own files.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from data_prep.sources.source import Document
from data_prep.synthetic.documents import texts
from data_prep.synthetic.layouts import write_task
from data_prep.synthetic.tasks import TASKS, examples


def documents(seed: int, size: int) -> Iterator[Document]:
    """Documents of about `size` words in all; the same seed gives the same texts on every platform."""
    words = 0
    for number, text in zip(count(), texts(seed)):
        if words >= size:
            return
        words += text.count(" ") + 1
        yield Document(text, f"embedded-{number}", "embedded")


def write_tasks(folder: Path, seed: int) -> None:
    """Write the eight tasks as folders `CoLA/`, `SST-2/`, ... with train, dev and test files in GLUE's layouts."""
    for name in TASKS:
        write_task(folder, name, examples(name, seed))

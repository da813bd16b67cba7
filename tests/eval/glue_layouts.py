"""The official layouts of GLUE, as small files."""

from pathlib import Path

from cramming.data.task_files import GLUE, Task

MNLI_TEXT = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
    " sentence1 sentence2"
)
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2"
MRPC = "|#1 ID|#2 ID|#1 String|#2 String"
QQP = "id qid1 qid2 question1 question2 is_duplicate"
PAIR = "index sentence1 sentence2"
# Headers of the official files, by folder and file; CoLA's train and dev have none.
LAYOUTS: dict[str, dict[str, str | None]] = {
    "CoLA": {"train": None, "dev": None, "test": "index sentence"},
    "SST-2": {"train": "sentence label", "dev": "sentence label", "test": "index sentence"},
    "MRPC": {"train": f"Quality{MRPC}", "dev": f"Quality{MRPC}", "test": f"index{MRPC}"},
    "STS-B": {"train": f"{STSB} score", "dev": f"{STSB} score", "test": STSB},
    "QQP": {"train": QQP, "dev": QQP, "test": "id question1 question2"},
    "MNLI": {
        "train": f"{MNLI_TEXT} label1 gold_label",
        **dict.fromkeys(
            ("dev_matched", "dev_mismatched"),
            f"{MNLI_TEXT} label1 label2 label3 label4 label5 gold_label",
        ),
        **dict.fromkeys(("test_matched", "test_mismatched"), MNLI_TEXT),
    },
    "QNLI": {
        **dict.fromkeys(("train", "dev"), "index question sentence label"),
        "test": "index question sentence",
    },
    "RTE": {**dict.fromkeys(("train", "dev"), f"{PAIR} label"), "test": PAIR},
    "WNLI": {**dict.fromkeys(("train", "dev"), f"{PAIR} label"), "test": PAIR},
    "diagnostic": {"diagnostic": PAIR},
}
LABELS = {"label", "Quality", "score", "is_duplicate", "gold_label"}
ROWS = 5


def task_in(folder: str) -> Task:
    return next((t for t in GLUE.values() if t.train.folder == folder), GLUE["mnli"])


def make_row(folder: str, columns: list[str], row: int) -> list[str]:
    """Field values of one row: a label that cycles, ids that count, texts with what readers stumble over."""
    task = task_in(folder)
    label = f"{row % 6}.000" if task.regression else task.labels[row % len(task.labels)]
    fixed = dict.fromkeys(LABELS, label) | {"index": str(row), "id": str(row)}
    return [fixed.get(column, f'{column} {row} says "hello, naïve') for column in columns]


def write_glue(folder: Path) -> Path:
    """Write all official files, five rows each, into the folder; return it."""
    for task_folder, files in LAYOUTS.items():
        (folder / task_folder).mkdir(parents=True)
        for name, header in files.items():
            columns = (header or "source label mark sentence").split(
                "|" if "|" in (header or "") else " "
            )
            rows = [make_row(task_folder, columns, row) for row in range(ROWS)]
            lines = ([] if header is None else [columns]) + rows
            text = "".join("\t".join(line) + "\n" for line in lines)
            (folder / task_folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return folder

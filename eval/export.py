"""The verb `cramming export`: write the finished model as a folder to use or to publish, with a model card.

The folder holds config.json, model.safetensors (the bytes that pretraining wrote), the tokenizer's files, README.md,
settings of sentence-transformers and, for an architecture that stock transformers lacks, the Python files that
`trust_remote_code=True` runs. It appears as a whole or not at all, and replaces an earlier export. With `--as` a stock
model is trained first, and exported (eval/student.py).
"""

import glob
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cramming.config import file_sha256, require
from cramming.files import overwrite_atomically, sweep
from cramming.invocation import Invocation
from cramming.model.encoder import Encoder
from cramming.model.export import CODE, SPECIAL_TOKENS, save_pretrained
from cramming.model.heads import MaskedLM
from cramming.model.load import load_exported
from cramming.model.stock import stock_family
from cramming.progress import say
from cramming.record import WITHOUT_MODEL
from eval.finetune.encode import special_token
from eval.finetune.models import altered, open_model
from eval.report.model_card import CARD_TAG, Exported, write_card
from eval.rules.load import Run, load_run

NOTHING_WRITTEN = "all in order, nothing was written"
WEIGHTS = "model.safetensors"
# Files that an export may hold; a folder with other files is not replaced.
FILES = {
    WEIGHTS,
    *CODE,
    "README.md",
    "1_Pooling",
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def main(
    invocation: Invocation,
    *,
    model: str | None = None,
    out: Path | None = None,
    license: str | None = None,
    language: str | None = None,
    test: bool = False,
    python: str | None = None,
    family: str | None = None,
    check: bool = False,
) -> None:
    """Export the run of an invocation; raise UserError for missing inputs or an existing folder.

    Args:
        invocation: Options that several verbs share; overrides are of the student that `family` asks for.
        model: Model folder that is exported in place of a run's.
        out: Where the folder is written, null for `export` beside the model.
        license: Licence of the weights, for the model card.
        language: Language of the corpus, for the model card.
        test: Let the installed clients load the folder, and add the results to the card.
        python: Interpreter of another environment whose clients load the folder.
        family: Model type of transformers that the run's model is distilled into first.
        check: Say what would be done, and write nothing.
    """
    is_program = python is None or (Path(python).is_file() and os.access(python, os.X_OK))
    require(is_program, f"--python={python}: no such program. Give the Python of an environment.")
    distilled: list[tuple[str, str]] = []
    if family is None:
        words = " ".join(invocation.overrides)
        require(not words, f"{words}: settings are of the model that --as trains. Add --as.")
        require(not invocation.resume, "--resume: nothing is trained without --as. Leave it out.")
    else:
        require(not model, f"--model={model}: --as needs a run with its corpus. Give --name.")
        trained = _train_student(invocation, family, out, check)
        if trained is None:
            return
        invocation, distilled = trained
    run: Run | None
    if model:
        folder, run = find_folder(model)
    else:
        folder, run = find_run(invocation)
    out = (out or folder.parent / "export").absolute()
    _require_replaceable(out)
    if check:
        say(f"export: {folder} to {out}; {NOTHING_WRITTEN}")
        return
    source = _open(folder, run)

    def write(temporary: Path) -> None:
        source.write(temporary)
        clients = source.test(temporary, python) if test or python else []
        exported = source.describe(
            run.label if run else out.name,
            clients=clients,
            distilled=distilled,
            weights_sha256=file_sha256(temporary / WEIGHTS),
            license=license,
            language=language,
        )
        (temporary / "README.md").write_text(write_card(exported, run), encoding="utf-8")

    sweep(out.parent, f".{glob.escape(out.name)}.*", locked=False)
    overwrite_atomically(out, write)
    loading = "as it is" if source.family else "with trust_remote_code=True"
    origin = "" if run else "no run record beside the model, "
    say(f"export: {out}, {origin}loads in transformers {loading}; README.md says how")


def _train_student(
    invocation: Invocation, family: str, out: Path | None, check: bool
) -> tuple[Invocation, list[tuple[str, str]]] | None:
    """Train a stock student of a run; return its invocation, and what the card says of its teacher.

    With `check` it is only said what would be trained, and the result is None.
    """
    from eval import student  # imported late: most exports train nothing

    teacher = student.teacher_of(*find_run(invocation), family)
    its_invocation = student.student_of(teacher, invocation, family)
    _require_replaceable(out or its_invocation.run_folder / "export")
    if not check:
        return its_invocation, student.train(teacher, its_invocation)
    for line in [*student.check(teacher, its_invocation), NOTHING_WRITTEN]:
        say(line)
    return None


@dataclass(frozen=True)
class _Source:
    """Model folder that is exported.

    `tokens`: special tokens by transformers' keys. `pooling`: that of the scores, None without scores. `max_length`:
    the length at which texts are cut. `table_length`: the longest that the model computes.
    """

    folder: Path
    model: MaskedLM | Encoder
    tokens: Mapping[str, str]
    pooling: str | None
    max_length: int
    table_length: int

    @property
    def family(self) -> str | None:
        """Model type in the exported config.json, None for this suite's own architecture."""
        return stock_family(self.model.config)

    def write(self, folder: Path) -> None:
        """Write the model, its tokenizer and its pooling to a new folder."""
        save_pretrained(self.model, folder, self.folder / "tokenizer.json", self.tokens)
        write_pooling(folder, self.model, self.pooling or "mean", self.max_length)

    def test(self, folder: Path, python: str | None) -> list[tuple[str, str, str]]:
        """Return name, version and result of each client that loads the folder that was written."""
        from eval.export_check import check_clients  # imported late: builds tasks' tokenizers

        return check_clients(self.model, folder, self.pooling or "mean", self.max_length, python)

    def describe(self, name: str, **others: Any) -> Exported:
        """Return what the card says of the folder; `others` are the fields that the model does not tell."""
        config = self.model.config
        return Exported(
            name=name,
            family=self.family,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            has_head=isinstance(self.model, MaskedLM),
            max_length=self.max_length,
            table_length=self.table_length,
            positions=config.positions,
            pooling=self.pooling,
            token_types=config.token_types,
            **others,
        )


def _open(folder: Path, run: Run | None) -> _Source:
    """Return a model folder with its model loaded; its run says how long the texts were and how it was scored."""
    tokens = special_tokens(folder)
    model = load_exported(folder)
    table_length = model.config.max_length
    max_length = trained_length(run) or table_length
    if model.config.positions != "learned":  # whose table is among the weights
        model.config = replace(model.config, max_length=max_length)
    return _Source(folder, model, tokens, scored_pooling(run), max_length, table_length)


def trained_length(run: Run | None) -> int | None:
    """Return the length of the sequences that a run trained on, None if another training came before or is unknown."""
    if run is None:
        return None
    start, train = run.record.config.get("start"), run.record.config.get("train")
    if not isinstance(train, dict) or (isinstance(start, dict) and start.get("path")):
        return None
    length = train.get("sequence_length")
    return length if isinstance(length, int) else None


def scored_pooling(run: Run | None) -> str | None:
    """Return the pooling of one text by which a run was scored, None without scores.

    `pairs` takes the mean of each text.
    """
    scores = run.record.trained if run else None
    if scores is None:
        return None
    return "cls" if scores.hyperparameters.get("pooling") == "cls" else "mean"


def write_pooling(folder: Path, model: MaskedLM | Encoder, pooling: str, max_length: int) -> None:
    """Write how texts are cut and their vectors pooled, for sentence-transformers and transformers."""
    (folder / "1_Pooling").mkdir()
    modules = []
    for index, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling"))):
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": kind})
    classifier = {}
    if stock_family(model.config) in (None, "modernbert"):
        classifier["classifier_pooling"] = pooling
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": model.config.hidden_size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
        },
        "config.json": json.loads((folder / "config.json").read_text()) | classifier,
        "tokenizer_config.json": json.loads((folder / "tokenizer_config.json").read_text())
        | {"model_max_length": max_length},
    }
    for name, node in files.items():
        (folder / name).write_text(json.dumps(node, indent=2, sort_keys=True) + "\n")


def _require_replaceable(out: Path) -> None:
    require(
        not out.exists() or _is_replaceable(out),
        f"--out={out}: exists, and is neither empty nor an export. Remove it or give another.",
    )


def _is_replaceable(out: Path) -> bool:
    """Return whether a folder is empty or an earlier export: with its files alone, and its card."""
    if not out.is_dir():
        return False
    names = {path.name for path in out.iterdir()}
    if not names:
        return True
    card = out / "README.md"
    if not names <= FILES or not card.is_file():
        return False
    return f"- {CARD_TAG}\n" in card.read_text(errors="replace")


def find_folder(model: str) -> tuple[Path, Run | None]:
    """Return a model folder and the run that made it.

    The run is None without a record of a finished run with these weights beside the folder.
    """
    folder = Path(model).absolute()
    require(
        folder.is_dir(),
        f"--model={folder}: no such folder. Give a model folder, such as runs/<name>/final.",
    )
    source, run = open_model(folder), load_run(folder.parent)
    written = run.record.training.final_files or {}
    known = not run.problem and run.record.training.final_sha256
    same = known and not altered(written, source.files)
    return folder, run if same else None


def find_run(invocation: Invocation) -> tuple[Path, Run]:
    """Return the model folder of a finished run, and the run."""
    home, name = invocation.run_folder, invocation.name
    run, final = load_run(home), home / "final"
    require(
        not run.problem,
        f"--name={name}: {str(run.problem).rstrip('.')}. Train a run with `cramming pretrain --name {name}`.",
    )
    status = run.record.training.status
    other = "Train under another name, or give --model <folder>."
    require(
        status not in WITHOUT_MODEL,
        f"--name={name}: the run in {home} is {status} and has no model. {other}",
    )
    require(
        status == "finished",
        f"--name={name}: the pretraining in {home} is {status or 'missing'}, not finished."
        " Resume it with `cramming pretrain --resume`, or give --model <folder>.",
    )
    wrong = altered(run.record.training.final_files or {}, open_model(final).files)
    hint = "Restore the file, or export without the record: copy the folder elsewhere and give --model <copy>."
    require(not wrong, f"{final}/{wrong}. {hint}")
    return final, run


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the folder's names of the five special tokens, by transformers' keys.

    Raises UserError for a missing one.
    """
    tokens = {role: special_token(folder, role) for role in SPECIAL_TOKENS}
    missing = [
        f"{role} in tokenizer_config.json" for role, token in tokens.items() if token is None
    ]
    if not (folder / "tokenizer.json").is_file():
        missing.append("tokenizer.json")
    require(
        not missing,
        f"{folder}: {', '.join(missing)} is missing. Restore the tokenizer's files beside the model.",
    )
    return {role: str(token) for role, token in tokens.items()}

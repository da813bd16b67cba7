"""The verb `cramming export`: write the finished model as a folder to use or to publish, with a model card.

The folder holds config.json, model.safetensors (the bytes that pretraining wrote), the tokenizer's files, README.md
and, for an architecture that stock transformers lacks, the Python files that `trust_remote_code=True` runs. It
appears as a whole or not at all, and replaces an earlier export.
"""

import glob
from pathlib import Path

from cramming.config import file_sha256, require
from cramming.files import overwrite_atomically, sweep
from cramming.invocation import Invocation
from cramming.model.export import CODE, SPECIAL_TOKENS, load_exported, save_pretrained
from cramming.model.heads import MaskedLM
from cramming.model.stock import stock_family
from cramming.progress import say
from cramming.record import WITHOUT_MODEL
from eval.finetune.encode import special_token
from eval.finetune.models import altered, open_model
from eval.report.model_card import CARD_TAG, Exported, write_card
from eval.rules.load import Run, load_run

WEIGHTS = "model.safetensors"
# Files that an export may hold; a folder with other files is not replaced.
FILES = {
    WEIGHTS,
    *CODE,
    "README.md",
    "config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def main(
    *,
    name: str,
    runs: Path,
    model: str | None,
    out: Path | None,
    license: str | None,
    language: str | None,
) -> None:
    """Export the run `name` (or the folder `model`); raise UserError for missing inputs or an existing folder.

    `license` of the weights and `language` of the corpus are for the model card.
    """
    invocation = Invocation(name=name, runs=runs)
    if model:
        folder, run = find_folder(model)
    else:
        folder, run = find_run(invocation)
    out = (out or folder.parent / "export").absolute()
    require(
        not out.exists() or _is_replaceable(out),
        f"--out={out}: exists, and is neither empty nor an export. Remove it or give another.",
    )
    tokens = special_tokens(folder)
    exported_model = load_exported(folder)
    config = exported_model.config
    family = stock_family(config)

    def write(temporary: Path) -> None:
        save_pretrained(exported_model, temporary, folder / "tokenizer.json", tokens)
        exported = Exported(
            name=run.label if run else out.name,
            family=family,
            parameters=sum(parameter.numel() for parameter in exported_model.parameters()),
            has_head=isinstance(exported_model, MaskedLM),
            max_length=config.max_length,
            token_types=config.token_types,
            weights_sha256=file_sha256(temporary / WEIGHTS),
            license=license,
            language=language,
        )
        (temporary / "README.md").write_text(write_card(exported, run), encoding="utf-8")

    sweep(out.parent, f".{glob.escape(out.name)}.*", locked=False)
    overwrite_atomically(out, write)
    loading = "as it is" if family else "with trust_remote_code=True"
    origin = "" if run else "no run record beside the model, "
    say(f"export: {out}, {origin}loads in transformers {loading}; README.md says how")


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
    return CARD_TAG in card.read_text(errors="replace")


def find_folder(model: str) -> tuple[Path, Run | None]:
    """Return a model folder and the run that made it.

    The run is None without a record of a finished run with these weights beside the folder.
    """
    folder = Path(model).absolute()
    require(
        folder.is_dir(),
        f"--model={folder}: no such folder. Give a model folder, such as runs/<name>/final.",
    )
    run = load_run(folder.parent)
    written = run.record.training.final_files or {}
    known = not run.problem and run.record.training.final_sha256
    same = known and not altered(written, open_model(folder).files)
    return folder, run if same else None


def find_run(invocation: Invocation) -> tuple[Path, Run]:
    """Return the model folder of a finished run, and the run."""
    home, name = invocation.run_folder, invocation.name
    run, final = load_run(home), home / "final"
    require(
        not run.problem,
        f"--name={name}: {run.problem}. Train a run with `cramming pretrain --name {name}`.",
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

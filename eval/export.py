"""The verb `cramming export`: write the finished model as a folder to use or to publish, with a model card.

The folder holds config.json, model.safetensors (the bytes that pretraining wrote), the tokenizer's files, README.md
and, for an architecture that stock transformers lacks, the Python files that `trust_remote_code=True` runs. It
appears as a whole or not at all, and replaces an earlier export.
"""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming.config import build, expand_home, file_sha256, require
from cramming.files import overwrite_atomically, sweep
from cramming.model.export import CODE, SPECIAL_TOKENS, load_exported, save_pretrained
from cramming.model.heads import MaskedLM
from cramming.model.stock import stock_family
from cramming.progress import say
from cramming.record import WITHOUT_MODEL, run_folder
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


@dataclass(frozen=True)
class ExportConfig:
    """Section `export`: the folder, and the facts for the model card that only the owner knows."""

    out: Path | None
    license: str | None
    language: str | None


def main(config: dict[str, Any]) -> None:
    """Export the run `name` (or the model folder `model_path`).

    Raises UserError for missing inputs or an existing folder.
    """
    settings = build(ExportConfig, config["export"], "export")
    folder, run = find_model(config)
    out = (settings.out or folder.parent / "export").absolute()
    require(
        not out.exists() or _is_replaceable(out),
        f"export.out={out}: is there already, and neither empty nor an export; remove it or give another",
    )
    tokens = special_tokens(folder)
    model = load_exported(folder)
    family = stock_family(model.config)

    def write(temporary: Path) -> None:
        save_pretrained(model, temporary, folder / "tokenizer.json", tokens)
        exported = Exported(
            name=run.label if run else out.name,
            family=family,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            has_head=isinstance(model, MaskedLM),
            max_length=model.config.max_length,
            token_types=model.config.token_types,
            weights_sha256=file_sha256(temporary / WEIGHTS),
            license=settings.license,
            language=settings.language,
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


def find_model(config: dict[str, Any]) -> tuple[Path, Run | None]:
    """Return the model folder and the run that made it.

    The run is None without a record of a finished run with these weights.
    """
    if config["model_path"]:
        folder = expand_home(config["model_path"], "model_path").absolute()
        require(
            folder.is_dir(),
            f"model_path={folder}: no such folder; give a model folder, such as runs/<name>/final",
        )
        run = load_run(folder.parent)
        written = run.record.training.final_files or {}
        known = not run.problem and run.record.training.final_sha256
        same = known and not altered(written, open_model(folder).files)
        return folder, run if same else None
    home, name = run_folder(config), config["name"]
    run, final = load_run(home), home / "final"
    require(
        not run.problem, f"name={name}: {run.problem}; `cramming pretrain name={name}` makes a run"
    )
    status = run.record.training.status
    other = "train under another name, or give model_path=<folder>"
    require(
        status not in WITHOUT_MODEL,
        f"name={name}: the run in {home} is {status} and has no model; {other}",
    )
    require(
        status == "finished",
        f"name={name}: the pretraining in {home} is {status or 'missing'}, not finished;"
        " go on with `cramming pretrain` and resume=true, or give model_path=<folder>",
    )
    wrong = altered(run.record.training.final_files or {}, open_model(final).files)
    hint = "restore it, or export the folder without the record: copy it elsewhere and give model_path=<copy>"
    require(not wrong, f"{final}/{wrong}; {hint}")
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
        f"{folder}: {', '.join(missing)} is missing; restore the tokenizer's files beside the model",
    )
    return {role: str(token) for role, token in tokens.items()}

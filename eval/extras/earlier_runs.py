"""Whether a run that a study finds under one of its names is the run that it would make now.

An earlier study of the same name can have had other settings. What no resume may change (cramming/resume.py) must be
the same, and where scores are compared, what decides them. A corpus may lie elsewhere, if its manifest is the same.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cramming.config import UserError, expand_home, shown
from cramming.data.manifest import MANIFEST, Manifest
from cramming.record import is_run, load_record
from cramming.resume import changed_settings

# A setting that decides scores -> what a record's scores call it.
OF_SCORES = {"precision": "precision", "threads": "threads_per_run"}

Difference = tuple[str, Any, Any]  # a setting, its value in the earlier run, and that in the study


def refuse_other(
    folders: Mapping[int, Path], settings: Mapping[str, Any], corpus: Path, fine_tunes: bool
) -> None:
    """Raise UserError for the first of a variant's runs, by seed, that was made with other settings than these."""
    for seed, folder in folders.items():
        if not is_run(folder):
            continue
        record = load_record(folder)
        now = {**settings, "seed": seed}
        differences = list(_of_training(record, now, corpus))
        if fine_tunes:
            differences += _of_scores(record, now)
        for name, before, wanted in differences:
            raise UserError(
                f"{folder}: this run was made with {name}={shown(before)}, and the study has"
                f" {name}={shown(wanted)}. Give the study another --name, or remove the run."
            )


def _of_training(
    record: Mapping[str, Any], settings: Mapping[str, Any], folder: Path
) -> Iterator[Difference]:
    """Yield settings, then the corpora themselves. Where a corpus is the same, its settings may be in other words."""
    corpus, validation = record.get("corpus", {}), settings["train"]["validation_corpus"]
    corpora = [("corpus", ["data.", "tokenizer."], corpus, folder)]
    if validation:
        name = "train.validation_corpus"
        folder = expand_home(validation, name)
        corpora.append(("validation corpus", [name], corpus.get("validation", {}), folder))
    same: list[str] = []
    other: list[Difference] = []
    for title, names, recorded, folder in corpora:
        before, now = recorded.get("manifest_sha256"), _manifest_sha256(folder)
        if now and before == now:
            same += names
        elif now and before:
            other.append((f"{title} manifest_sha256", before, now))
    for difference in changed_settings(record["config"], settings):
        if not difference[0].startswith(tuple(same)):
            yield difference
    yield from other


def _manifest_sha256(corpus: Path) -> str | None:
    file = corpus / MANIFEST
    return Manifest.load(file).sha256() if file.is_file() else None


def _of_scores(record: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what scores were made with. Other seeds and tasks are no difference: `glue` does what a run lacks."""
    scored, wanted = record.get("glue", {}).get("pretrained", {}), settings["eval"]
    before = {
        f"hyperparameters.{name}": value
        for name, value in scored.get("hyperparameters", {}).items()
    }
    before |= {name: scored[key] for name, key in OF_SCORES.items() if key in scored}
    now = {f"hyperparameters.{name}": value for name, value in wanted["hyperparameters"].items()}
    now |= {name: wanted[name] for name in OF_SCORES if wanted[name] != "auto"}
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            yield f"eval.{name}", before[name], now[name]

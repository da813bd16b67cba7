"""Check of the runs that exist under a study's names: they must have the settings of the study.

An earlier study of the same name may have had other settings. Compared are the settings that no resume may change
(cramming/resume.py) and, in a study of scores, those that decide scores. The folder of a corpus may differ if its
manifest is the same.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cramming.config import UserError, expand_home, shown
from cramming.data.manifest import MANIFEST, Manifest
from cramming.record import is_run, load_record
from cramming.resume import changed_settings

# Settings of section `eval` that decide scores -> their names in the record.
SCORE_SETTINGS = {"precision": "precision", "threads": "threads_per_run"}

Difference = tuple[str, Any, Any]  # a setting, its value in the earlier run, and that in the study


def require_same_settings(
    folders: Mapping[int, Path], settings: Mapping[str, Any], corpus: Path, fine_tunes: bool
) -> None:
    """Raise UserError for the first run of a variant, by seed, that was made with settings other than the study's."""
    for seed, folder in folders.items():
        if not is_run(folder):
            continue
        record = load_record(folder)
        now = {**settings, "seed": seed}
        differences = list(_training_differences(record, now, corpus))
        if fine_tunes:
            differences += _score_differences(record, now)
        if differences:
            name, before, wanted = differences[0]
            raise UserError(
                f"{folder}: this run was made with {name}={shown(before)}, and the study has"
                f" {name}={shown(wanted)}. Give the study another --name, or remove the run."
            )


def _training_differences(
    record: Mapping[str, Any], settings: Mapping[str, Any], folder: Path
) -> Iterator[Difference]:
    """Yield different settings of training, then different corpora.

    Settings of a corpus do not count if its manifest is the same: `data.corpus` and `data.paths` may name one corpus.
    """
    recorded_corpus = record.get("corpus", {})
    corpora = [("corpus", ["data.", "tokenizer."], recorded_corpus, folder)]
    validation = settings["train"]["validation_corpus"]
    if validation:
        name = "train.validation_corpus"
        recorded_validation = recorded_corpus.get("validation", {})
        corpora.append(
            ("validation corpus", [name], recorded_validation, expand_home(validation, name))
        )
    settled_names: list[str] = []
    other_corpora: list[Difference] = []
    for title, names, recorded, corpus in corpora:
        before = recorded.get("manifest_sha256")
        now = _manifest_sha256(corpus)
        if now and before == now:
            settled_names += names
        elif now and before:
            other_corpora.append((f"{title} manifest_sha256", before, now))
    for difference in changed_settings(record["config"], settings):
        if not difference[0].startswith(tuple(settled_names)):
            yield difference
    yield from other_corpora


def _manifest_sha256(corpus: Path) -> str | None:
    file = corpus / MANIFEST
    return Manifest.load(file).sha256() if file.is_file() else None


def _score_differences(
    record: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yield different settings that decide scores.

    Other seeds and tasks are no difference, because `glue` adds those that a run lacks.
    """
    scored, wanted = record.get("glue", {}).get("pretrained", {}), settings["eval"]
    before = {
        f"hyperparameters.{name}": value
        for name, value in scored.get("hyperparameters", {}).items()
    }
    before |= {name: scored[key] for name, key in SCORE_SETTINGS.items() if key in scored}
    now = {f"hyperparameters.{name}": value for name, value in wanted["hyperparameters"].items()}
    now |= {name: wanted[name] for name in SCORE_SETTINGS if wanted[name] != "auto"}
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            yield f"eval.{name}", before[name], now[name]

"""Facts of a run (facts.yaml): columns of the CSV and of the page's table, and rows of a run's own report.

Recipes are compared by their settings, each under its path such as `optim.lr`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import yaml

from cramming.record_schema import Record
from eval.recipe import recipe_of
from eval.report.entries import track_of
from eval.report.format import FORMS
from eval.rules.evidence import names_of


class Fact(NamedTuple):
    """Fact of a run: its title, the view of the table that shows it, its form in words, its path in the record."""

    title: str
    view: str
    form: str
    path: str = ""


def facts_of(record: Record) -> dict[str, Any]:
    """Return the value of each fact by its key, None for one that the record lacks."""
    facts: dict[str, Any] = {}
    for key, fact in FACTS.items():
        is_recipe = fact.view == "recipe"
        if is_recipe and record.pretrain is None:
            facts[key] = None
        else:
            facts[key] = _at(record, fact.path) if fact.path else COMPUTED[key](record)
    return facts


def known_facts(record: Record, *views: str) -> dict[str, str]:
    """Return the facts that are known, in words by their titles; only those of some views, or all."""
    values = facts_of(record)
    known = {}
    for key, fact in FACTS.items():
        if values[key] not in (None, "") and (not views or fact.view in views):
            known[fact.title] = FORMS[fact.form](values[key])
    return known


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration, each with its path."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def differences(
    configs: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, str], list[dict[str, str | None]]]:
    """Return the most frequent value of each setting, and for each configuration its other values.

    None stands for a setting that a configuration lacks.
    """
    flattened = list[dict[str, str]]()
    for config in configs:
        flattened.append({path: _short(value) for path, value in flat(config)})
    paths = sorted(set[str]().union(*flattened))
    usual = {}
    for path in paths:
        usual[path] = mode(settings[path] for settings in flattened if path in settings)
    others = []
    for settings in flattened:
        others.append({p: settings.get(p) for p in paths if settings.get(p) != usual[p]})
    return usual, others


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _at(record: Record, path: str) -> Any:
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _train_loss(record: Record) -> float | None:
    """Return the last training loss; that of telling replaced tokens compares with no other."""
    training = record.training
    return None if training.objective == "rtd" else training.train_loss


def _data(record: Record) -> str:
    """Return what the text is; a corpus that was given by its folder has other settings than its own."""
    if _at(record, "config.data.corpus") is None:
        return str(_at(record, "config.data.name"))
    texts = [source for source in record.corpus.sources if source.kind != "tokenizer"]
    return ", ".join(dict.fromkeys(source.dataset or source.kind or "" for source in texts))


def _licences(record: Record) -> str:
    licences = [source.license or "no licence given" for source in record.corpus.sources]
    return ", ".join(dict.fromkeys(licences))


def _recipe(record: Record) -> str | None:
    recipe = recipe_of(record)
    return recipe and recipe.settings


def _frozen_probe(record: Record) -> float | None:
    """Return the average of the probe with a frozen encoder, by which the suite of the model's scores is ranked."""
    suite = record.trained.suite if record.trained else "glue"
    probe = record.probe.get(suite, {}).get("pretrained")
    averages = probe.averages.values() if probe else ()
    return next((average.value for average in averages), None)


def _track(record: Record) -> str | None:
    track = track_of(record)
    return track and track.title


COMPUTED: dict[str, Callable[[Record], Any]] = {
    "track": _track,
    "device": lambda record: record.environment.device.name or record.environment.device.kind,
    "train_loss": _train_loss,
    "data": _data,
    "frozen_probe": _frozen_probe,
    "recipe": _recipe,
    "sources": lambda record: names_of(record.corpus.sources),
    "licences": _licences,
}
_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FACTS = {key: Fact(*row) for key, row in _ROWS.items()}

"""Recipes: the settings that decide what a run learns. Duels and leaderboard distinguish recipes by them.

Seed, names and folders are not part of a recipe. The corpus is represented by the SHA-256 of its manifest, whatever
its folder. Budget and device are the track that a run competes in (eval/report/entries.py). The commit is not part of
it either, because each commit would start every recipe anew; the leaderboard marks entries with runs of several
commits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cramming.config import settings_hash
from cramming.record_schema import Record

# sections that decide what a run learns, whose hash identifies a configuration
SECTIONS = (
    "data",
    "tokenizer",
    "model",
    "objective",
    "optim",
    "schedule",
    "start",
    "train",
    "budget",
    "attention",
    "precision",
    "memory",
    "runtime",
    "parallel",
)
BESIDE = ("data", "tokenizer", "budget")  # sections represented by corpus and track
# settings of section `train` that are not part of a recipe
NOT_LEARNT_FROM = ("log_every", "validation_corpus")


class Recipe(NamedTuple):
    """Hash of the settings, and SHA-256 of the corpus's manifest."""

    settings: str
    corpus: str


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections by which configurations are compared."""
    return {section: settings[section] for section in SECTIONS}


def recipe(settings: Mapping[str, Any], corpus: str) -> Recipe:
    """Return the recipe of a configuration on a corpus."""
    sections = compared(settings)
    for section in BESIDE:
        del sections[section]
    train = sections["train"].items()
    sections["train"] = {name: value for name, value in train if name not in NOT_LEARNT_FROM}
    return Recipe(settings_hash(sections), corpus)


def recipe_of(record: Record) -> Recipe | None:
    """Return the recipe of a run, or None if its record lacks parts of it, as for a model from elsewhere."""
    corpus = record.corpus.manifest_sha256
    whole = record.config.keys() >= set(SECTIONS) and isinstance(record.config["train"], Mapping)
    if record.pretrain is None or corpus is None or not whole:
        return None
    return recipe(record.config, corpus)

"""What defines a recipe: the settings that decide what a run learns. Duels and leaderboard tell recipes apart by it.

The seed, names and folders are no part of it. The corpus stands beside it as the SHA-256 of its manifest, whatever
folder it lies in. Budget and device are the track that a run competes in (eval/report/entries.py). The commit is no
part either: each would begin every recipe anew; the leaderboard says where runs of an entry are of several.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cramming.config import settings_hash
from cramming.record_schema import Record

# Sections that decide what a run learns: by their hash a configuration is known.
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
BESIDE = ("data", "tokenizer", "budget")  # of these, what corpus and track stand for
NOT_LEARNT_FROM = (
    "log_every",
    "validation_corpus",
)  # of section `train`; the latter is a folder's path


class Recipe(NamedTuple):
    """The hash of the settings, and the SHA-256 of the corpus's manifest."""

    settings: str
    corpus: str


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one configuration from another."""
    return {section: settings[section] for section in SECTIONS}


def recipe(settings: Mapping[str, Any], corpus: str) -> Recipe:
    """The recipe of a configuration on a corpus."""
    own = {section: value for section, value in compared(settings).items() if section not in BESIDE}
    own["train"] = {
        name: value for name, value in own["train"].items() if name not in NOT_LEARNT_FROM
    }
    return Recipe(settings_hash(own), corpus)


def recipe_of(record: Record) -> Recipe | None:
    """The recipe of a run; None where its record does not have all of it, as of a model from elsewhere."""
    corpus = record.corpus.manifest_sha256
    whole = record.config.keys() >= set(SECTIONS) and isinstance(record.config["train"], Mapping)
    if record.pretrain is None or corpus is None or not whole:
        return None
    return recipe(record.config, corpus)

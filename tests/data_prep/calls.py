"""`prepare` as a function of one dictionary: a recipe, and the folder `corpora` where that is given."""

from pathlib import Path
from typing import Any

from cramming import verbs
from cramming.data import manifest
from cramming.invocation import Invocation
from data_prep import prepare, prepare_config
from data_prep.prepare_config import Preparation


def corpora_of(config: dict[str, Any]) -> Path:
    """Return the folder of corpora."""
    return Path(config.get("corpora", "corpora"))


def main(config: dict[str, Any]) -> None:
    """Prepare the corpus."""
    prepare.main(config, Invocation(corpora=corpora_of(config)))


def check(config: dict[str, Any]) -> None:
    """Check what `main` would do, as `prepare --check` does."""
    verbs.check("prepare", config, Invocation(corpora=corpora_of(config)))


def parse(config: dict[str, Any]) -> Preparation:
    """Return what `main` would do."""
    return prepare_config.parse(config, corpora_of(config))


def corpus_folder(config: dict[str, Any]) -> Path:
    """Return where the corpus lies."""
    return manifest.corpus_folder(config, corpora_of(config))

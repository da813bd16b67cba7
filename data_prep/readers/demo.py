"""The embedded corpus as a source: `data=embedded` generates its documents from a seed, no download."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from cramming.config import Count
from data_prep.readers.source import DataConfig, Document, Source

GENERATOR = Path(__file__).parents[1] / "synthetic"


def generator_sha256() -> str:
    """Return the SHA-256 of the source code that makes documents and tasks."""
    files = sorted(path for path in GENERATOR.iterdir() if path.suffix in (".py", ".txt"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class EmbeddedConfig(DataConfig):
    """`data=embedded`."""

    size: Count  # words to generate, about


class EmbeddedSource(Source):
    """The generated corpus: a pure function of seed and size, so its identity is its generator's source code."""

    config_class: ClassVar[type[DataConfig]] = EmbeddedConfig
    config: EmbeddedConfig

    def __init__(self, config: EmbeddedConfig) -> None:
        self.config = config

    def inventory(self) -> list[dict[str, Any]]:
        entry = {"name": "embedded", "kind": "embedded", "license": self.config.license}
        return [{**entry, "sha256": generator_sha256()}]

    def documents(self) -> Iterator[Document]:
        from data_prep.synthetic.documents import (
            documents,
        )  # late: its lexicon is of no use to the other sources

        for number, text in enumerate(documents(self.config.seed, self.config.size)):
            self.position = number + 1
            yield Document(text, "embedded", number, "embedded")

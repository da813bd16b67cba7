"""Several sources mixed by weight, and the table of all sources.

At every point of the mixed stream each part has given its share of the bytes (or of the documents) read so far, to
within one document or 4 KiB: the next document is always from the part that is furthest behind its weight. `seed` sets
where in its turn each part begins. The stream ends with the first part that has no more, as the proportions could not
be kept. What the filters remove comes later, so shares of the finished corpus can differ; its card gives them.

A sample for the tokenizer has the same proportions. With a part that is costly to read it ends when it is large enough.
"""

import random
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from cramming.config import UserError, build, shown, unknown_choice
from data_prep.readers.demo import EmbeddedSource
from data_prep.readers.files import TextSource
from data_prep.readers.hub import HubSource
from data_prep.readers.source import DataConfig, Document, Source, limited
from data_prep.stats import text_bytes

PARTS: dict[str, Any] = {
    "embedded": EmbeddedSource,
    "text": TextSource,
    "hub": HubSource,
}  # what can be mixed


class MixConfig(DataConfig):
    """`data=mix`. A part is a section `data` of another source with a `weight`, without what all share."""

    parts: list[dict[str, Any]]
    unit: Literal["bytes", "documents"] = "bytes"

    @model_validator(mode="after")
    def _weighs_parts(self) -> Self:
        if len(self.parts) < 2:
            raise ValueError(
                f"parts={shown(self.parts)}: a mix has at least two."
                " Give each as {weight: 1, source: text, paths: [a.txt]}."
            )
        for number, part in enumerate(self.parts):
            weight = part.get("weight")
            if not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise ValueError(
                    f"parts[{number}].weight={shown(weight)}: expected a number above 0."
                )
        return self


class MixSource(Source):
    """The parts' documents, interleaved."""

    config_class: ClassVar[type[DataConfig]] = MixConfig
    config: MixConfig
    unit = "%"

    def __init__(self, config: MixConfig) -> None:
        self.config = config
        self.sources = [_open_part(config, number) for number in range(len(config.parts))]
        self.names = [
            f"part {number}: {part.get('name') or part.get('dataset') or part['source']}"
            for number, part in enumerate(config.parts)
        ]
        self.costly = any(source.costly for source in self.sources)
        self.in_parts = any(source.in_parts for source in self.sources)
        self.packages = list(chain.from_iterable(source.packages for source in self.sources))
        total = sum(part["weight"] for part in config.parts)
        self.shares = [part["weight"] / total for part in config.parts]
        self.total = 100.0
        self._ended_with: str | None = None

    def parts(self) -> list[str]:
        return self.names

    def inventory(self) -> list[dict[str, Any]]:
        inventory: list[dict[str, Any]] = []
        for name, part, source in zip(self.names, self.config.parts, self.sources):
            of_part = {"part": name, "weight": part["weight"]}
            inventory += [entry | of_part for entry in source.inventory()]
        return inventory

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        changes = (source.changed(entries) for source, entries in self._by_source(inventory))
        return next(filter(None, changes), None)

    def pin(self, inventory: list[dict[str, Any]]) -> None:
        for source, entries in self._by_source(inventory):
            source.pin(entries)

    def _by_source(
        self, inventory: list[dict[str, Any]]
    ) -> Iterator[tuple[Source, list[dict[str, Any]]]]:
        """Yield each part's source with its entries, as it made them."""
        for name, source in zip(self.names, self.sources):
            entries = [dict(entry) for entry in inventory if entry["part"] == name]
            for entry in entries:
                del entry["part"], entry["weight"]
            yield source, entries

    def documents(self) -> Iterator[Document]:
        return self._mixed([source.documents() for source in self.sources])

    def sample_documents(self) -> Iterator[Document]:
        return self._mixed([source.sample_documents() for source in self.sources])

    def remark(self) -> str | None:
        end = f"the mix ended with {self._ended_with}, which has no more; weights decide how far each part lasts"
        return end if self._ended_with else None

    def _mixed(self, documents: list[Iterator[Document]]) -> Iterator[Document]:
        """Yield the parts' `documents`, by weight."""
        parts = enumerate(zip(documents, self.sources))
        streams = [
            _naming(limited(stream, source), f"data.parts[{number}]")
            for number, (stream, source) in parts
        ]
        by_bytes, phase = self.config.unit == "bytes", random.Random(self.config.seed)
        # A part's turn comes when what it has given, by its share, is least. In bytes a turn is about a document long.
        turn_size = 4096 if by_bytes else 1
        taken = [phase.random() * turn_size for _ in streams]
        self.position, self._ended_with = 0.0, None
        while True:
            turn = min(range(len(streams)), key=lambda part: taken[part] / self.shares[part])
            name, document = self.names[turn], next(streams[turn], None)
            if document is None:
                self.position, self._ended_with = 100.0, name
                return
            size = document.damage.bytes if document.damage else text_bytes(document.text)
            taken[turn] += size if by_bytes else document.part == 0
            self.position = max(
                100 * source.position / (source.total or float("inf")) for source in self.sources
            )
            yield document._replace(source=name)


def _naming(documents: Iterator[Document], place: str) -> Iterator[Document]:
    """Yield the documents of a part, whose mistakes give advice for the part in place of the section `data`."""
    try:
        yield from documents
    except UserError as error:
        ours = str(error).replace("data.damaged=drop", f"damaged: drop in {place}")
        error.args = (_placed(ours, place),)
        raise


def _placed(message: str, place: str) -> str:
    """Return a complaint about the section `data` as one about the section at this place."""
    return re.sub(r"^data(?=\.)|\bdata(?=\.(?:dataset|format|text_field)\b)", place, message)


def _open_part(config: MixConfig, number: int) -> Source:
    """Return a part as a source by itself; what all parts share is the mix's."""
    shared = {
        key: value
        for key, value in config.model_dump().items()
        if key not in ("source", "parts", "unit")
    }
    shared["max_documents"] = None
    section = {key: value for key, value in config.parts[number].items() if key != "weight"}
    place = f"data.parts[{number}]"
    if clashes := sorted(section.keys() & shared.keys() - {"name", "license", "max_documents"}):
        raise UserError(f"{place}.{clashes[0]}: all parts share it; set data.{clashes[0]}")
    if section.get("ids_field"):
        raise UserError(f"{place}.ids_field: only text can be mixed, ids belong to one tokenizer")
    return open_source({**shared, **section}, place, PARTS)


SOURCES: dict[str, Any] = {**PARTS, "mix": MixSource}  # by `data.source`
SETTINGS = {name: source.config_class for name, source in SOURCES.items()}


def open_source(
    section: Mapping[str, Any], place: str = "data", sources: Mapping[str, Any] = SOURCES
) -> Source:
    """Return the source that a section of settings describes. UserError: one line that names the setting."""
    kind = str(section.get("source"))
    if kind not in sources:
        raise UserError(unknown_choice(f"{place}.source", kind, sources))
    config = build(sources[kind].config_class, section, place)
    try:
        opened: Source = sources[kind](config)
    except UserError as error:
        raise UserError(_placed(str(error), place)) from None
    return opened

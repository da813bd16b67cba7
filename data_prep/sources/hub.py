"""Text from the Hugging Face hub, streamed with `datasets`; or from a local folder that `datasets` can load.

A data set may hold text (`text_field`), or token ids with the tokenizer that made them (`ids_field`, `tokenizer_file`),
as the cramming paper's ready-made corpus does. A corpus is made from one commit of a data set: that which `revision`
stands for when the preparation begins.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cramming.config import UserError, file_sha256, require
from cramming.hub import one_line, why_unreachable
from data_prep.sources.reconnect import WAIT_SECONDS, is_network_error, reconnecting
from data_prep.sources.records import missing_field, text_value
from data_prep.sources.source import DataConfig, Document, Source


class ConnectionLostError(UserError):
    """The network failed midway: what was prepared so far is kept and the same command goes on."""


@dataclass(frozen=True, kw_only=True)
class HubConfig(DataConfig):
    """`data=hub` and its presets. `dataset` is a hub name, or a local folder that `datasets` can load."""

    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None  # a branch, tag or commit; null: the newest commit when the preparation begins
    text_field: str = "text"
    ids_field: str | None = None  # a column of token ids, instead of text
    tokenizer_file: str | None = None  # the data set's own tokenizer.json, which `ids_field` needs

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset:
            raise ValueError("dataset is not set; name one (data.dataset=owner/name) or take a preset (data=wikipedia)")
        if (self.ids_field is None) != (self.tokenizer_file is None):
            raise ValueError("ids_field and tokenizer_file belong together: ids mean nothing without their tokenizer")

    @property
    def processes(self) -> int:
        """One for ready-made ids: to send them takes longer than what is left to do."""
        return 1 if self.ids_field else super().processes


class HubSource(Source):
    """A data set of the hub, streamed. Without network it says so at once, where the libraries retry for long."""

    config_class: ClassVar[type[DataConfig]] = HubConfig
    config: HubConfig

    def __init__(self, config: HubConfig) -> None:
        assert config.dataset is not None
        self.config, self.dataset = config, config.dataset
        self.local = Path(self.dataset).is_dir()
        is_path = self.dataset.startswith(("/", "./", "../", "~"))
        require(self.local or not is_path, f"data.dataset={self.dataset}: no such folder")
        self.costly = not config.max_documents
        self.total = config.max_documents
        self.name = "/".join(filter(None, (self.dataset, config.subset, config.split)))

    @cached_property
    def commit(self) -> str | None:
        """The commit that is read: that of the run this one goes on with, else the newest; None for a folder."""
        if self.local:
            return None
        if self.earlier:
            pinned: str | None = self.earlier[0]["revision"]
            return pinned
        self._require_network()
        import huggingface_hub

        try:
            found = huggingface_hub.HfApi().dataset_info(self.dataset, revision=self.config.revision)
        except Exception as error:
            if not (is_network_error(error) or isinstance(error, ValueError)):
                raise
            raise UserError(f"data.dataset={self.dataset}: cannot be found: {one_line(error)}") from None
        return found.sha

    def inventory(self) -> list[dict[str, Any]]:
        entry = {"name": self.name, "kind": "hub", "license": self.config.license, "revision": self.commit}
        # The data set by its name on the hub, or the local folder, for the model card.
        place = {"folder": self.dataset, "sha256": self._folder_sha256()} if self.local else {"dataset": self.dataset}
        return [entry | place]

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        now = self.inventory()[0]
        return None if [now | entry for entry in inventory] == [now] else self.name  # older corpora lack some keys

    def _folder_sha256(self) -> str:
        """Of the names and contents of all files that are not hidden."""
        digest, root = hashlib.sha256(), Path(self.dataset)
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                digest.update(f"{name}\n{file_sha256(path)}\n".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        return self._documents(self._open)

    def sample_documents(self, characters: float) -> Iterator[Document]:
        """With `max_documents` these; else the beginning of a shuffled stream: a whole pass is hours of download."""
        if self.config.max_documents:
            yield from self.documents()
            return

        def shuffled() -> Any:
            return self._open().shuffle(self.config.seed, buffer_size=1000)

        # What a shuffling buffer held is not part of the state of `datasets`: after a loss it is filled again.
        for document in self._documents(shuffled, keep_state=False):
            yield document
            characters -= len(document.text)
            if characters <= 0:
                return

    def _documents(self, open_stream: Callable[[], Any], keep_state: bool = True) -> Iterator[Document]:
        self.position = 0
        field, name = self.config.ids_field or self.config.text_field, self.name
        waits = () if self.local else WAIT_SECONDS
        records = reconnecting(open_stream, f"data.dataset={self.dataset}", waits, keep_state)
        while (record := self._next(records)) is not None:
            if field not in record:
                raise missing_field(name, field, record)
            self.position += 1
            place = f"{name}:{self.position:.0f}"
            if self.config.ids_field:
                yield Document("", place, name, np.asarray(record[field], dtype=np.int64))
            else:
                yield Document(text_value(place, field, record[field]), place, name)

    def _next(self, records: Iterator[Any]) -> Any:
        place, done = f"data.dataset={self.dataset}", f"after {self.position:.0f} documents"
        try:
            return next(records, None)
        except Exception as error:
            damaged = self.local and not isinstance(error, UserError | OSError)
            if damaged or isinstance(error, UnicodeDecodeError):
                raise UserError(f"{place}: cannot be read {done}: {one_line(error)}") from None
            if not self.position or not (is_network_error(error) or isinstance(error, UserError)):
                raise
            advice = "run the same command again to go on"
            raise ConnectionLostError(f"{place}: reading broke off {done} ({one_line(error)}); {advice}") from None

    def _open(self) -> Any:
        self._require_network()
        import datasets

        config = self.config
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(
                self.dataset, config.subset, split=config.split, revision=self.commit, streaming=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"data.dataset={self.dataset}: cannot be opened: {one_line(error)}") from None

    def tokenizer_file(self) -> Path | None:
        config = self.config
        if config.tokenizer_file is None:
            return None
        if self.local:
            return Path(self.dataset) / config.tokenizer_file
        self._require_network()
        import huggingface_hub

        try:
            found = huggingface_hub.hf_hub_download(
                self.dataset, config.tokenizer_file, repo_type="dataset", revision=self.commit
            )
        except (OSError, ValueError) as error:
            raise UserError(f"data.tokenizer_file={config.tokenizer_file}: {one_line(error)}") from None
        return Path(found)

    def _require_network(self) -> None:
        reason = None if self.local else why_unreachable()
        require(
            reason is None,
            f"data.dataset={self.dataset}: the Hugging Face hub cannot be reached ({reason}); use local files:"
            " cramming prepare data=text data.paths='[your.txt]', or data=embedded",
        )

"""Text from the Hugging Face hub, streamed with `datasets`; or from a local folder that `datasets` can load.

A data set may hold text (`text_field`), or token ids with the tokenizer that made them (`ids_field`, `tokenizer_file`),
as the cramming paper's ready-made corpus does. A corpus is made from one commit of a data set: that which `revision`
stands for when the preparation begins.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from cramming.config import UserError, file_sha256
from cramming.data.manifest import TokenizerInfo
from cramming.hub import one_line, why_unreachable
from data_prep.readers.records import record_texts
from data_prep.readers.source import (
    NULL,
    DataConfig,
    Document,
    Source,
    TextField,
    field_names,
    is_saved_to_disk,
)
from data_prep.task_grid import TransientError
from data_prep.tokenizer.load import describe, load

NETWORK_PACKAGES = {"httpx", "httpcore", "aiohttp", "requests", "urllib3", "fsspec"}


class ConnectionLostError(TransientError):
    """The network failed: what was prepared so far is kept and the same command goes on."""


class HubConfig(DataConfig):
    """`data=hub` and its presets. `dataset` is a hub name, or a local folder that `datasets` can load."""

    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = (
        None  # a branch, tag or commit; null: the newest commit when the preparation begins
    )
    text_field: TextField = "text"
    ids_field: str | None = None  # a column of token ids, instead of text
    tokenizer_file: str | None = None  # the data set's own tokenizer.json, which `ids_field` needs

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if not self.dataset:
            raise ValueError(
                "dataset=null: not set. Name one (data.dataset=owner/name), or choose a preset (data=wikipedia)."
            )
        if self.ids_field is not None and self.tokenizer_file is None:
            raise ValueError(
                f"ids_field={self.ids_field}: ids mean nothing without their tokenizer. Set tokenizer_file too."
            )
        if self.ids_field is None and self.tokenizer_file is not None:
            raise ValueError(
                f"tokenizer_file={self.tokenizer_file}: only for ids. Set ids_field too, or it to null."
            )
        return self

    @property
    def processes(self) -> int | None:
        """One for ready-made ids: to send them takes longer than what is left to do."""
        return 1 if self.ids_field else super().processes


class HubSource(Source):
    """A data set of the hub, streamed; `datasets` itself retries broken connections for minutes."""

    config_class: ClassVar[type[DataConfig]] = HubConfig
    config: HubConfig

    def __init__(self, config: HubConfig) -> None:
        assert config.dataset is not None
        self.config, self.dataset = config, config.dataset
        self.local = Path(self.dataset).is_dir()
        if is_saved_to_disk(Path(self.dataset)):
            raise UserError(
                f"data.dataset={self.dataset}: written by `save_to_disk`, which is no data set to load. Set data=text"
                f" data.paths='[\"{self.dataset}/**/*.arrow\"]'."
            )
        self.costly = not config.max_documents
        self.total = config.max_documents
        self.name = "/".join(filter(None, (self.dataset, config.subset, config.split)))
        self._was_read = False  # something of it, by this process

    @contextmanager
    def _hub(self, doing: str) -> Iterator[None]:
        """Turn errors of the libraries into one line; say at once that there is no network, instead of retrying."""
        place = f"data.dataset={self.dataset}: {doing}"
        if reason := None if self.local else why_unreachable():
            raise ConnectionLostError(
                f"{place}: the Hugging Face hub cannot be reached ({reason}); run the same command again to go on, or"
                " use local files: cramming prepare data=text data.paths='[your.txt]'"
            )
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None and self.local:
                raise
            message = f"{place}: failed after {self.position:.0f} documents: {one_line(error)}"
            if (self._was_read or self.earlier) and _is_network_error(error):
                raise ConnectionLostError(
                    f"{message}; run the same command again to go on"
                ) from None
            raise UserError(message) from None

    @cached_property
    def commit(self) -> str | None:
        """The commit that is read: that of the run this one goes on with, else the newest; None for a folder."""
        if self.local:
            return None
        if self.earlier:
            pinned: str | None = self.earlier[0]["revision"]
            return pinned
        with self._hub("looking for it"):
            import huggingface_hub

            return (
                huggingface_hub.HfApi()
                .dataset_info(self.dataset, revision=self.config.revision)
                .sha
            )

    def inventory(self) -> list[dict[str, Any]]:
        entry = {
            "name": self.name,
            "kind": "hub",
            "license": self.config.license,
            "revision": self.commit,
        }
        # The data set by its name on the hub, or the local folder, for the model card.
        place = (
            {"folder": self.dataset, "sha256": self._folder_sha256()}
            if self.local
            else {"dataset": self.dataset}
        )
        return [entry | place]

    def _folder_sha256(self) -> str:
        """Return the SHA-256 of the names and contents of all files that are not hidden."""
        digest, root = hashlib.sha256(), Path(self.dataset)
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                digest.update(f"{name}\n{file_sha256(path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def documents(self, shuffled: bool = False) -> Iterator[Document]:
        config, name = self.config, self.name
        self.position = 0
        with self._hub("reading it"):
            import datasets

            datasets.disable_progress_bars()
            rows: Any = datasets.load_dataset(
                self.dataset,
                config.subset,
                split=config.split,
                revision=self.commit,
                streaming=True,
            )
            records = self._numbered(
                rows.shuffle(config.seed, buffer_size=1000) if shuffled else rows
            )
            if config.ids_field:
                for number, (_, row) in enumerate(records):
                    ids = self._own_tokens(np.asarray(row[config.ids_field], np.int64))
                    yield Document("", name, number, name, ids)
                return
            for number, text in enumerate(record_texts(records, field_names(config.text_field))):
                damage = NULL if text is None else None
                yield Document(text or "", name, number, name, damage=damage)

    def _numbered(self, rows: Any) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(rows):
            self.position, self._was_read = number + 1, True
            yield f"{self.name}:{number}", row

    def sample_documents(self) -> Iterator[Document]:
        """Yield documents, shuffled where a whole pass is hours of download, as only the beginning is read."""
        return self.documents(shuffled=self.costly)

    @cached_property
    def _tokenizer(self) -> TokenizerInfo:
        path = self.tokenizer_file()
        assert path, "ids come with their tokenizer"
        return describe(load(path), path)

    def _own_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return ids [n] without padding, a [CLS] in front and a [SEP] at the end, which every document gets anew."""
        entries, special = self._tokenizer.vocab_size, self._tokenizer.special_ids
        if len(ids) and ids.min() < 0:
            raise UserError(
                f"data.ids_field holds {ids.min()}, which is no token; is it a column of labels?"
            )
        if len(ids) and ids.max() >= entries:
            raise UserError(
                f"data.ids_field holds token {ids.max()}, the tokenizer has {entries} entries: it is not the one that"
                " made these ids; set data.tokenizer_file"
            )
        ids = ids[ids != special["pad"]]
        first, last = ids[:1].tolist() == [special["cls"]], ids[-1:].tolist() == [special["sep"]]
        return ids[int(first) : len(ids) - last]

    def tokenizer_file(self) -> Path | None:
        file = self.config.tokenizer_file
        if file is None:
            return None
        if self.local:
            return Path(self.dataset) / file
        with self._hub(f"fetching {file}"):
            import huggingface_hub

            return Path(
                huggingface_hub.hf_hub_download(
                    self.dataset, file, repo_type="dataset", revision=self.commit
                )
            )


def _is_network_error(error: BaseException) -> bool:
    """Return whether this came from the network; the clients' own errors derive from nothing in common."""
    modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return isinstance(error, OSError) or bool(modules & NETWORK_PACKAGES)

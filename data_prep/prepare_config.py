"""One preparation: the validated settings, the opened source, and the folder to fill."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cramming.config import UserError, build, expand_home, file_sha256
from cramming.data import manifest
from data_prep.dedup.decontaminate import Decontaminator
from data_prep.filters.quality import FilterConfig
from data_prep.readers.hub import HubSource
from data_prep.readers.mix import open_source
from data_prep.readers.source import DataConfig, Package, Source
from data_prep.tokenizer import load as tokenizer
from data_prep.tokenizer.load import TokenizerConfig


@dataclass(frozen=True)
class Preparation:
    """Plan of one call of `prepare`."""

    folder: Path
    data: DataConfig
    tokenizer: TokenizerConfig
    source: Source
    settings: dict[str, Any]
    settings_hash: str

    @property
    def tokenizer_path(self) -> Path | None:
        """Existing tokenizer to use instead of training one: the source's, or the user's."""
        of_source = self.source.tokenizer_file()
        if of_source is None and self.tokenizer.path:
            return expand_home(self.tokenizer.path, "tokenizer.path")
        return of_source

    def inventory(self) -> list[dict[str, Any]]:
        """Return the inputs of the corpus: those of the source, and an existing tokenizer."""
        return self.source.inventory() + self._tokenizer_entry()

    @cached_property
    def decontaminator(self) -> Decontaminator | None:
        """The search for downstream text, if it is on."""
        config = self.data.decontaminate
        if not config.tasks:
            return None
        return Decontaminator.from_folder(
            expand_home(config.tasks, "data.decontaminate.tasks"), config
        )

    @property
    def compared(self) -> list[dict[str, Any]]:
        """The tasks' files that the text is compared with; no sources of the corpus."""
        return self.decontaminator.files if self.decontaminator else []

    def changed(
        self, inventory: list[dict[str, Any]], compared: list[dict[str, Any]]
    ) -> str | None:
        """Return in words what differs from an earlier run's inventory and task files; None if nothing does."""
        if sorted(map(str, self.compared)) != sorted(map(str, compared)):
            return f"the tasks in {self.data.decontaminate.tasks}"
        source = [entry for entry in inventory if entry["kind"] != "tokenizer"]
        self.source.pin(source)
        if changed := self.source.changed(source):
            return changed
        before, now = inventory[len(source) :], self._tokenizer_entry()
        return None if before == now else ", ".join(entry["name"] for entry in now or before)

    def _tokenizer_entry(self) -> list[dict[str, Any]]:
        """Return a ready-made tokenizer. That of the source has its revision, so it is not fetched to be known."""
        source = self.source
        if isinstance(source, HubSource) and source.config.tokenizer_file:
            name = f"{source.dataset}/{source.config.tokenizer_file}"
            return [{**source.inventory()[0], "name": name, "kind": "tokenizer"}]
        if not self.tokenizer.path:
            return []
        sha256 = file_sha256(expand_home(self.tokenizer.path, "tokenizer.path"))
        return [
            {"name": self.tokenizer.path, "kind": "tokenizer", "license": None, "sha256": sha256}
        ]


def parse(config: Mapping[str, Any], corpora: Path) -> Preparation:
    """Validate the settings and look at the source, before anything is written."""
    source = open_source(config["data"])
    preparation = Preparation(
        folder=manifest.corpus_folder(config, corpora),
        data=source.config,
        tokenizer=build(TokenizerConfig, config["tokenizer"], "tokenizer"),
        source=source,
        settings=manifest.content_settings(config),
        settings_hash=manifest.corpus_hash(config),
    )
    data, has_its_own = source.config, isinstance(source, HubSource) and source.config.ids_field
    if has_its_own and (
        data.decontaminate.tasks or data.near_duplicates.enabled or data.filters != FilterConfig()
    ):
        raise UserError(
            "data.ids_field: token ids are neither searched nor filtered; set data.decontaminate.tasks=null (open"
            " division), data.near_duplicates.enabled=false, and no data.filters"
        )
    packages = list(source.packages)
    if data.filters.languages is not None:
        packages.append(Package("py3langid", "language", "data.filters.languages"))
    if data.ray:
        packages.append(Package("ray", "ray", "data.ray"))
    if path := preparation.tokenizer.path:
        if has_its_own:
            raise UserError(
                "tokenizer.path: data.ids_field comes with its own tokenizer; set tokenizer.path=null"
            )
        tokenizer.load(expand_home(path, "tokenizer.path"))
    elif preparation.tokenizer.kind == "unigram" and not has_its_own:
        packages.append(Package("sentencepiece", "unigram", "tokenizer.kind=unigram"))
    for module, extra, needed_by in packages:
        if not importlib.util.find_spec(module):
            raise UserError(
                f"{needed_by} needs the package {module}: pip install 'cramming[{extra}]'"
            )
    return preparation

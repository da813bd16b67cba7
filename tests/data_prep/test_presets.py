"""Every YAML of the groups `data` and `tokenizer` builds, and presets add to what they inherit."""

from collections.abc import Callable
from typing import Any

import pytest

from cramming.config import UserError, build, config_folder
from data_prep.readers.demo import EmbeddedConfig
from data_prep.readers.mix import SOURCES
from data_prep.tokenizer.load import TokenizerConfig
from tests.data_prep.calls import corpus_folder

DATA = sorted(
    path.stem for path in (config_folder() / "data").glob("*.yaml") if path.stem != "base"
)
TOKENIZERS = sorted(path.stem for path in (config_folder() / "tokenizer").glob("*.yaml"))
FILTERS = sorted(path.stem for path in (config_folder() / "data" / "filters").glob("*.yaml"))
NEEDED = {
    "mix": [
        "data.parts=[{weight: 1, source: text, paths: [a.txt]}, {weight: 2, source: embedded, size: 9}]"
    ],
    "hub": ["data.dataset=owner/name"],
    "text": ["data.paths=[a.txt]"],
}


@pytest.mark.parametrize("name", DATA)
def test_data_preset_builds(name: str, compose: Callable[..., dict[str, Any]]) -> None:
    settings = compose(f"data={name}", *NEEDED.get(name, []))
    section = settings["data"]
    config = build(SOURCES[section["source"]].config_class, section, "data")
    assert config.name == name and config.clean.min_characters > 0
    assert corpus_folder(settings).name.startswith(f"{name}-wordpiece-auto-")


@pytest.mark.parametrize("name", FILTERS)
def test_filter_preset_builds_with_every_source(
    name: str, compose: Callable[..., dict[str, Any]]
) -> None:
    section = compose("data=wikipedia", f"data/filters={name}")["data"]
    config = build(SOURCES["hub"].config_class, section, "data")
    assert config.filters.min_words == 50


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_preset_builds(name: str, compose: Callable[..., dict[str, Any]]) -> None:
    config = build(TokenizerConfig, compose(f"tokenizer={name}")["tokenizer"], "tokenizer")
    assert (config.kind, config.lowercase) == (name, name == "wordpiece")
    assert config.vocab_size == "auto"


def test_cased_and_uncased_corpora_have_folders_of_their_own(
    compose: Callable[..., dict[str, Any]],
) -> None:
    assert corpus_folder(compose("tokenizer=wordpiece")) != corpus_folder(
        compose("tokenizer.lowercase=false")
    )


@pytest.mark.parametrize("size", [0, -5])
def test_a_size_that_gives_no_text_is_named(
    compose: Callable[..., dict[str, Any]], size: int
) -> None:
    with pytest.raises(UserError, match=rf"^data.size={size}: "):
        build(EmbeddedConfig, compose(f"data.size={size}")["data"], "data")

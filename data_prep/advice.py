"""What `prepare` says at its end where the corpus is perhaps not the one that was meant, from the manifest alone."""

from collections.abc import Iterator

from cramming.data.manifest import Manifest
from data_prep.filters import quality
from data_prep.filters.quality import FilterConfig
from data_prep.sources.source import DataConfig

MUCH = 0.2  # of the text's bytes, taken by filters
FEW_WORDS = 20  # of a document, on average
MUCH_UNKNOWN = 0.005  # of the tokens, or of the characters
LARGE_HOLD_OUT = 0.1  # of the tokens
# Reason -> the setting that is behind it.
_SETTINGS = {
    "too_short": "data.clean.min_characters",
    "too_many_tokens": "data.filters.max_tokens_per_character",
} | {filter.reason: f"data.filters.{filter.setting}" for filter in quality.all_filters(FilterConfig())}


def advice(manifest: Manifest, config: DataConfig, documents: str | None = None) -> Iterator[str]:
    """At most three lines: text that filters took or documents that are tiny, unknown tokens, and a hold-out of many
    times its share. `documents` is the setting of this name where plain text was cut by it."""
    hint = f" (data.documents={documents} cuts the text so)" if documents else ""
    found = manifest.statistics
    words = found["words"] / max(1, manifest.counts["documents"])
    tiny = f"documents are tiny: {words:.0f} words on average{hint}" if 0 < words < FEW_WORDS else ""
    taken = _taken(manifest)
    total = sum(taken.values())
    if total > MUCH:
        reason, share = max(taken.items(), key=lambda item: item[1])
        setting = f" ({_SETTINGS[reason]})" if reason in _SETTINGS else ""
        yield (
            f"the filters took {total:.0%} of the text, {share:.0%} by {reason}{setting}; corpus_card.md has examples; "
            + (tiny or f"documents that are left have {words:.0f} words on average{hint}")
        )
    elif tiny:
        yield tiny
    if max(found["unknown_rate"], found["characters_lost"] or 0) > MUCH_UNKNOWN:
        yield _unknown(found["unknown_rate"], found["characters_lost"])
    train, validation = (sum(shard.tokens for shard in manifest.splits[split]) for split in ("train", "validation"))
    held_out = validation / (train + validation)
    if held_out > max(LARGE_HOLD_OUT, 2 * config.validation_fraction):
        yield (
            f"{held_out:.0%} of the tokens are held out for validation, where data.validation_fraction="
            f"{config.validation_fraction:g}: whole documents are, and there are {manifest.counts['documents']}{hint}"
        )


def _unknown(rate: float, lost: float | None) -> str:
    tokens = f"{rate:.1%} of the tokens are unknown"
    if lost is None:
        return f"{tokens}; tokenizer=bpe knows every character"
    return (
        f"{tokens}, and no token stands for {lost:.1%} of the characters: WordPiece's unknown token is a whole word,"
        " in scripts without spaces a whole line, and in lower case it drops vowel signs; take tokenizer=bpe or unigram"
    )


def _taken(manifest: Manifest) -> dict[str, float]:
    """Share of the normalised text's bytes that each filter removed."""
    stages = {stage.name: stage for stage in manifest.stages}
    total = max(1, stages["normalise"].bytes_out)
    dropped = [stages[name].dropped for name in ("filters", "tokens")]
    return {reason: bin_.bytes / total for bins in dropped for reason, bin_ in bins.items()}

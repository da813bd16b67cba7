"""A run's settings as the pages show them: the recipe in words, and the whole configuration for comparing two runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mode
from typing import Any

from cramming.record_schema import Record, number
from eval.report.wording import compact

Settings = dict[str, str]  # path, such as `optim.lr`, to value


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The configuration's settings, each with its path."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def differences(
    configs: Sequence[Mapping[str, Any]],
) -> tuple[Settings, list[dict[str, str | None]]]:
    """For each setting the value that most configurations have, and for each configuration what differs from these;
    None stands for a setting that it lacks."""
    every = [{path: _words(value) for path, value in flat(config)} for config in configs]
    paths = sorted({path for settings in every for path in settings})
    usual = {path: mode(s[path] for s in every if path in s) for path in paths}
    return usual, [{p: s.get(p) for p in paths if s.get(p) != usual[p]} for s in every]


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def recipe(record: Record) -> dict[str, str]:
    """What a reader asks of a recipe first, in words; empty where the record does not say."""
    found = dict(flat(record.config))  # of a model that was not trained here, what scored it
    return {
        title: words(found, record) if record.pretrain else "" for title, words in RECIPE.items()
    }


def _of(*paths: str) -> Callable[[Mapping[str, Any], Record], str]:
    def words(found: Mapping[str, Any], _: Record) -> str:
        return " ".join(_short(found[path]) for path in paths if found.get(path) is not None)

    return words


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _batch(found: Mapping[str, Any], _: Record) -> str:
    sequences, length = (
        number(found.get("train.batch_size")),
        number(found.get("train.sequence_length")),
    )
    if sequences is None or length is None:
        return ""
    return f"{sequences:g} × {length:g} = {compact(sequences * length)} tokens"


def _learning_rate(found: Mapping[str, Any], record: Record) -> str:
    peak = number(record.training.peak_learning_rate) or number(found.get("optim.lr"))
    return "" if peak is None else f"{peak:.3g}"


def _precision(found: Mapping[str, Any], record: Record) -> str:
    mode = record.training.precision or _of("precision.mode")(found, record)
    residual = record.training.residual
    return mode if residual in (None, "fp32") else f"{mode}, residual stream in {residual}"


def _masking(found: Mapping[str, Any], record: Record) -> str:
    rate = number(found.get("objective.rate"))
    name = record.training.objective or found.get("objective.name") or ""
    return str(name) if rate is None else f"{name} {rate:.0%}"


def _data(found: Mapping[str, Any], record: Record) -> str:
    """Of a corpus that was named by its folder the configuration does not say what it was made of."""
    if found.get("data.corpus") is None:
        return _of("data.name")(found, record)
    texts = [source for source in record.corpus.sources if source.kind != "tokenizer"]
    return ", ".join(dict.fromkeys(source.dataset or source.kind or "" for source in texts))


def _tokenizer(found: Mapping[str, Any], record: Record) -> str:
    corpus = record.corpus
    if corpus.vocab_size is None:
        return _of("tokenizer.kind", "tokenizer.vocab_size")(found, record)
    return f"{corpus.tokenizer.kind or ''} {corpus.vocab_size:g}".strip()


RECIPE: dict[str, Callable[[Mapping[str, Any], Record], str]] = {
    "Layers": _of("model.num_layers"),
    "Width": _of("model.hidden_size"),
    "Optimizer": _of("optim.name"),
    "Learning rate": _learning_rate,
    "Schedule": _of("schedule.name"),
    "Batch": _batch,
    "Masking": _masking,
    "Precision": _precision,
    "Start": lambda found, record: record.training.start or _of("start.name")(found, record),
    "Data": _data,
    "Tokenizer": _tokenizer,
    "Seed": _of("seed"),
}

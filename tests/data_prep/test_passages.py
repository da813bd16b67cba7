"""An example of what was dropped shows what was measured, the limit, and the passage in which it lies."""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.decisions import Fates
from data_prep.dedup.decontaminate import Decontaminator
from data_prep.dedup.near import SIGN, NearDuplicateConfig, Signer, find_near_duplicates
from data_prep.dedup.passages import PASSAGE_CHARACTERS, passage, spans
from data_prep.dedup.words import hash_words_and_lengths, word_places
from data_prep.filters.measures import BROKEN, MARKUP, NO_LETTER_WORD, SYMBOL, Measures
from data_prep.filters.quality import FILTERS, FilterConfig
from data_prep.pipeline import Selection, judges
from data_prep.sources.source import Damage, DataConfig, Document
from data_prep.stage_stats import Ledger
from data_prep.workers import Workers

WORDS = [f"{a}{b}{c}" for a in ("kal", "mir", "tas") for b in ("o", "en", "urd", "iv") for c in "bdfgklmnprst"]
PROSE = "\n".join(" ".join(["the", *WORDS[i : i + 9], "with", *WORDS[i + 9 : i + 13]]) + "." for i in range(0, 130, 13))
MORE = PROSE.replace("al", "ul").replace("ir", "or").replace("as", "us")
ENCODED = base64.b64encode(PROSE[:150].encode()).decode()
SLOGAN = "our cheap watches come with free delivery to every country of the known world"
TAGS = "<div class='x'><a href='http://example.org/one'>one</a></div><br/>" * 2
CODE = "x[i] != y[j] && (z += ~w) || (*p++ = q[--n] ^ 7) // !!"

# The filter -> the limit, what is put between two pieces of good prose, what must be shown of it.
BAD: dict[str, tuple[Any, str, str]] = {
    "broken_characters": (0.0001, "a cafÃ© by the sea.", "cafÃ©"),
    "unbroken_runs": (0.05, ENCODED, ENCODED[:100]),
    "markup": (0.01, TAGS, "href='http://example.org/one'"),
    "symbols": (0.02, CODE, "q[--n] ^ 7"),
    "lorem_ipsum": (True, "Lorem Ipsum dolor sit amet.", "Lorem Ipsum dolor"),
    "curly_braces": (0.0001, "let {a, b} be a set.", "{a, b}"),
    "hashes": (0.001, "and #love of the #sea.", "#love of the #sea"),
    "ellipses": (0.001, "and then … the ship ... sank.", "… the ship ..."),
    "bullets": (0.02, "• the roof\n• the door", "• the roof"),
    "cut_lines": (0.02, "the mayor said that\nthe bridge would ...", "the bridge would ..."),
    "boilerplate": (0.02, "Please enable Javascript to see this.", "enable Javascript"),
    "duplicate_lines": (0.02, "the red line\nthe red line", "the red line the red line"),
    "duplicate_line_characters": (0.001, "the red line\nthe red line", "the red line the red line"),
    "not_words": (0.99, "1001 7007 - 1002 7014 - 1003 7021", "1001 7007 - 1002"),
    "top_ngrams": ([0.01, 1, 1], "buy now buy now, buy now; Buy Now", "buy now buy now, buy now; Buy Now"),
    "duplicate_ngrams": ([0.01] * 6, f"{SLOGAN}.\n{SLOGAN.upper()}!", f"{SLOGAN}. {SLOGAN.upper()[:40]}"),
}
# Of the whole text: the limit and the text whose beginning is shown.
WHOLE: dict[str, tuple[Any, str]] = {
    "too_few_words": (5000, PROSE),
    "words_too_short": (12, PROSE),
    "words_too_long": (2, PROSE),
    "few_sentences": (300, PROSE),
    "no_stop_words": (8, PROSE),
    "other_language": (["de"], PROSE),
}


def examples(stage: str, reason: str, documents: Iterable[Document], path: Path, **settings: Any) -> list[str]:
    """What the ledger shows of the documents that this stage dropped for this reason."""
    tasks: Decontaminator | None = settings.pop("tasks", None)
    config, ledger = DataConfig(name="test", source="test", **settings), Ledger(0)
    with Workers(1, judges(config, tasks)) as workers:
        for _ in Selection(config, ledger, Fates(path / "fates", []), workers, None, tasks).run(documents):
            pass
    return ledger[stage].line().dropped[reason].examples


@pytest.mark.parametrize("name", BAD)
def test_the_passage_that_broke_a_rule_is_shown(name: str, tmp_path: Path) -> None:
    limit, bad, expected = BAD[name]
    text = f"{PROSE}\n{bad}\n{MORE}"
    config = FilterConfig(**{FILTERS[name][0]: limit})
    (shown,) = examples("filters", name, [Document(text, "a:1", "a")], tmp_path, filters=config)
    assert expected in shown
    value, rest = shown.removeprefix("a:1: ").split(", limit ", 1)
    assert rest.split(" (")[0] == ("none" if limit is True else f"{limit[0] if isinstance(limit, list) else limit:.4g}")
    assert limit is True or float(value.split()[0]) != limit
    assert f"({FILTERS[name][0]}): " in shown
    assert len(shown) < PASSAGE_CHARACTERS + 100


@pytest.mark.parametrize("name", WHOLE)
def test_of_what_is_wrong_with_a_whole_text_the_beginning_is_shown(name: str, tmp_path: Path) -> None:
    if name == "other_language":
        pytest.importorskip("py3langid")
    limit, text = WHOLE[name]
    config = FilterConfig(**{FILTERS[name][0]: limit})
    (shown,) = examples("filters", name, [Document(text, "a:1", "a")], tmp_path, filters=config)
    limits = ", ".join(limit) if isinstance(limit, list) else str(limit)
    assert f", limit {limits} ({FILTERS[name][0]}): {text[:100]}".replace("\n", " ") in shown


def test_every_filter_is_shown() -> None:
    assert BAD.keys() | WHOLE.keys() == FILTERS.keys()


def test_what_is_no_text_shows_its_number(tmp_path: Path) -> None:
    documents = [Document("Too short", "a:1", "a"), Document("12345 " * 9, "a:2", "a"), Document(PROSE, "a:3", "a")]
    assert examples("filters", "too_short", documents, tmp_path) == ["a:1: 9, limit 20 (min_characters): Too short"]
    (shown,) = examples("filters", "no_letters", documents, tmp_path)
    assert shown.startswith("a:2: 0, limit 1 (letters): 12345 12345")


def test_bytes_that_are_not_utf8_are_shown_wherever_they_stand(tmp_path: Path) -> None:
    damaged = Document(f"{PROSE} a caf\udce9 by the sea {PROSE}", "a:1", "a", damage=Damage("not_utf8", 99))
    (shown,) = examples("source", "not_utf8", [damaged], tmp_path)
    assert "a caf? by the sea" in shown


def test_downstream_text_is_shown_with_its_task(tmp_path: Path) -> None:
    example = "The old harbour of the town, which lies at the mouth of the river, was destroyed by the storm of 1703."
    tasks = Decontaminator(
        {"CoLA": ["Nobody knew it."], "RTE": [example]}, DataConfig(name="a", source="b").decontaminate
    )
    document = Document(f"{PROSE} {example} {PROSE}", "a:1", "a")
    (shown,) = examples("decontamination", "contaminated", [document], tmp_path, tasks=tasks)
    assert shown.startswith("a:1: 13 words of RTE: ... ") and example[:60] in shown


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_near_duplicate_names_the_kept_document_wherever_it_stands(kept_first: bool, tmp_path: Path) -> None:
    config = DataConfig(
        name="test", source="test", near_duplicates=NearDuplicateConfig(enabled=True), deduplicate=False
    )
    long, short = Document(PROSE, "a:long", "a"), Document(PROSE[:-200], "a:short", "a")
    documents = [long, short, short] if kept_first else [short, short, long]
    ledger = Ledger(0)
    with Workers(1, {SIGN: Signer(config.near_duplicates)}) as workers:
        fates = Fates(tmp_path / "fates", [])
        unique = Selection(config, Ledger(0), fates, workers).unique(documents)
        found = find_near_duplicates(((c.key, c.document.text) for c in unique), config.near_duplicates, workers)
        kept = [c.document.id for _, c in Selection(config, ledger, fates, workers, found).run(documents)]
    assert kept == ["a:long"]
    dropped = ledger["near deduplication"].line().dropped["near_duplicate"]
    (shown,) = dropped.examples
    assert dropped.documents == 2
    head = f"a:short: like a:long, {float(found.similarity[0]):.4g}, limit 0.5 (threshold): "
    assert shown.startswith(head + PROSE[:100].replace("\n", " "))


def test_a_passage_holds_most_of_what_was_counted() -> None:
    text = "x" * 500 + "##" + "x" * 500 + "#" + "x" * 50 + "###" + "x" * 500
    counted = [(i, i + 1) for i, sign in enumerate(text) if sign == "#"]
    shown = passage(text, counted)
    assert shown.count("#") == 4 and shown.startswith("... x") and shown.endswith("x ...")
    assert len(shown) == PASSAGE_CHARACTERS + 8
    assert passage("short", [(2, 3)]) == passage("short") == "short"
    assert passage(text, [(100, 900)]).startswith("... ") and passage(text, [(0, 1)]) == passage(text)


@pytest.mark.parametrize("text", ["", "abc, d — é€… «x» {a|b} <p>&amp;</p> 12 34 \ue000 Ã© 漢字 ok\x1b", PROSE + CODE])
def test_what_is_shown_is_what_is_counted(text: str) -> None:
    measures = Measures(text)

    def characters(pattern: Any) -> int:
        return sum(end - start for start, end in spans(pattern, text))

    assert characters(SYMBOL) == round(measures.symbol_share * len(text))
    assert characters(BROKEN) == round(measures.broken_share * len(text))
    assert characters(MARKUP) == round(measures.markup_share(-1) * len(text))
    assert len(spans(NO_LETTER_WORD, text)) == round((1 - measures.alphabetic_word_share) * measures.words)


@pytest.mark.parametrize(
    "text", ["", "It's the END. Of it?", "naïve “quotes” — and dashes…", "漢字 is 日本語。OK", "é ß " * 30_000]
)
def test_words_are_found_in_the_text(text: str) -> None:
    starts_W, ends_W = word_places(text)
    found = [text[start:end] for start, end in zip(starts_W, ends_W)]
    numbers_W, lengths_W = hash_words_and_lengths(text)
    assert [len(word.encode()) for word in found] == lengths_W.tolist()
    alone = {word: hash_words_and_lengths(word)[0] for word in set(found)}
    assert np.array_equal(numbers_W, np.array([alone[word][0] for word in found], dtype=np.uint64))

"""Every filter keeps good text, removes what its source speaks of, and shows why; one that is off removes nothing."""

import base64
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cramming.config import UserError, build
from cramming.data.manifest import SpecialIds
from data_prep.filters import quality
from data_prep.filters.normalise import CleanConfig, normalize
from data_prep.filters.quality import (
    Filter,
    FilterConfig,
    active_filters,
    always_on,
    is_broken,
    tokens_limit,
)
from data_prep.readers.source import DataConfig, Document
from data_prep.stages import Stages
from data_prep.stats import EXCERPT_CHARACTERS, Stage, excerpt
from data_prep.tokenizer.load import TokenizerConfig
from data_prep.tokenizer.train import train

Examples = Callable[..., list[str]]
ARTICLE = """The harbour of the old town was built in the eleventh century, when merchants from the south began to
winter there. A stone quay replaced the wooden one after the great fire of 1312, and for two hundred years the salt
of the whole coast went over it.
With the silting of the river the trade moved to the new port. What remained were the fishermen, a small yard that
mended their boats, and the customs house, which has been a museum since 1954. Visitors reach it by the ferry (45 min).
The quay is 310 metres long; 3 of its 12 bollards are Roman columns."""
FORMULA = "Let {a, b} be a set with two members and f a map from it to the natural numbers. "
PAGE = """We use cookies to make this site better for you.
Please enable Javascript in your browser to see the prices of these shoes.
By going on you accept our terms of use and the privacy policy of the shop.
These are good shoes for all that you do out of doors."""
REPEATED = "Buy cheap watches and bags in our shop today, with free delivery to every country. "
CODE = "if (x[i] != y[j]) { z += f(&x[i], y->k[j]) * ~(1 << 7); } else { *p++ = q[--n] ^ 0x7f; } // !!\n"
TABLE = (
    "| 12.5 | 14.1 | -- | 33.0 |\n| 11.9 | 2.55 | -- | 34.1 |\n| 9.05 | 8.77 | -- | 35.6 |\n" * 5
)
WIKITEXT = "{{Infobox|name=[[Quay]]}} The '''quay''' is [[old]].<ref name=a/> == Use == It is [[used]].<br/>&nbsp;'' "
HEADLINES = "\n".join(
    f"The mayor of the town said on radio that the bridge number {i} would ..." for i in range(12)
)
LIST = "\n".join(
    f"• the {word} of the house and the garden"
    for word in "roof door wall tree gate well path".split()
)
NUMBERS = "The tables of the year and of the month: " + " ".join(
    f"{n} {n * 7} -" for n in range(1000, 1060)
)
ENCODED = ARTICLE + "\n" + base64.b64encode(ARTICLE.encode() * 3).decode()
LONG_WORDS = (
    "internationalisation responsibilities characteristically " * 3
    + "misunderstandings of interoperability"
)
GERMAN = """Der Hafen der alten Stadt wurde im elften Jahrhundert gebaut, als Kaufleute aus dem Süden begannen, dort zu
überwintern. Nach dem großen Brand ersetzte ein Kai aus Stein den hölzernen, und zweihundert Jahre lang ging das Salz
der ganzen Küste über ihn."""
MOJIBAKE = ARTICLE.replace(" the ", " â€œtheâ€\x9d ").replace("salt", "cafÃ©")


def junk() -> str:
    """What is left of random bytes that somebody decoded as Latin-1, after normalisation."""
    return normalize(random.Random(0).randbytes(3000).decode("latin-1"), CleanConfig())


OFF_IN_STRICT = {"other_language"}
# The filter -> the limit as in conf/data/filters, a text that must go, a text near the limit that must stay.
EXAMPLES: dict[str, tuple[Any, str, str]] = {
    "too_few_words": (50, "The quay is 310 metres long.", ARTICLE),
    "broken_characters": (0.002, MOJIBAKE, ARTICLE.replace("whole", "whôle “Ãland”")),
    "unbroken_runs": (0.1, ENCODED, ARTICLE + " " + "a" * 99),
    "markup": (0.05, WIKITEXT * 3, ARTICLE + " It is < 5 & > 3, see [[here]]."),
    "symbols": (0.25, CODE * 5, ARTICLE + " («§ 5!»)"),
    "words_too_short": (3, "a b c d e f g of an in " * 6, "the old cat sat there on the mat " * 9),
    "words_too_long": (10, LONG_WORDS, ARTICLE),
    "lorem_ipsum": (True, ARTICLE + " Lorem Ipsum dolor sit amet.", ARTICLE + " Lorem and ipsum."),
    "curly_braces": (0.01, CODE * 5, ARTICLE + " " + FORMULA),
    "hashes": (0.1, "#love #sea the #ship and #me " * 4, ARTICLE + " He was #1."),
    "ellipses": (0.1, "And then ... the sea … the ship ... " * 5, ARTICLE + " And then ..."),
    "bullets": (0.9, LIST, "The parts of the house are:\n" + LIST),
    "cut_lines": (0.3, HEADLINES, ARTICLE + "\nread on ..."),
    "boilerplate": (0.3, PAGE, ARTICLE + "\n" + PAGE.splitlines()[0]),
    "duplicate_lines": (0.3, "one\ntwo\none\ntwo\nthree", "a\na\na\na\nb\nc\nd\ne\nf\ng"),
    "duplicate_line_characters": (
        0.2,
        f"{REPEATED}\n{ARTICLE[:300]}\n{REPEATED}\n{REPEATED}",
        ARTICLE + "\nred\nred",
    ),
    "few_sentences": (
        3,
        "The title " + "!" * 200_000 + "x",
        ARTICLE,
    ),  # a run of signs is read once, or it takes 102 s
    "not_words": (0.8, NUMBERS, ARTICLE),
    "top_ngrams": (
        [0.2, 0.18, 0.16],
        "buy now the best " * 4 + "of all watches in the world " * 2,
        ARTICLE,
    ),
    "duplicate_ngrams": (
        [0.15, 0.14, 0.13, 0.12, 0.11, 0.1],
        ARTICLE + REPEATED * 2,
        ARTICLE + REPEATED,
    ),
    "no_stop_words": (2, GERMAN, ARTICLE),
}

WORDS = [
    f"{a}{b}{c}"
    for a in ("kal", "mir", "tas")
    for b in ("o", "en", "urd", "iv")
    for c in "bdfgklmnprst"
]
PROSE = "\n".join(
    " ".join(["the", *WORDS[i : i + 9], "with", *WORDS[i + 9 : i + 13]]) + "."
    for i in range(0, 130, 13)
)
MORE = PROSE.replace("al", "ul").replace("ir", "or").replace("as", "us")
CODED = base64.b64encode(PROSE[:150].encode()).decode()
SLOGAN = "our cheap watches come with free delivery to every country of the known world"
TAGS = "<div class='x'><a href='http://example.org/one'>one</a></div><br/>" * 2
SIGNS = "x[i] != y[j] && (z += ~w) || (*p++ = q[--n] ^ 7) // !!"

# The filter -> the limit, what is put between two pieces of good prose, what must be shown of it.
SHOWN: dict[str, tuple[Any, str, str]] = {
    "broken_characters": (0.0001, "a cafÃ© by the sea.", "cafÃ©"),
    "unbroken_runs": (0.05, CODED, CODED[:100]),
    "markup": (0.01, TAGS, "href='http://example.org/one'"),
    "symbols": (0.02, SIGNS, "q[--n] ^ 7"),
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
    "top_ngrams": (
        [0.01, 1, 1],
        "buy now buy now, buy now; Buy Now",
        "buy now buy now, buy now; Buy Now",
    ),
    "duplicate_ngrams": (
        [0.01] * 6,
        f"{SLOGAN}.\n{SLOGAN.upper()}!",
        f"{SLOGAN}. {SLOGAN.upper()[:40]}",
    ),
}
# Of the whole text the beginning is shown.
WHOLE: dict[str, Any] = {
    "too_few_words": 5000,
    "words_too_short": 12,
    "words_too_long": 2,
    "few_sentences": 300,
    "no_stop_words": 8,
    "other_language": ["de"],
}


ALL = {rule.reason: setting for setting, rule in quality.RULES.items()}


def config_of(name: str, limit: Any) -> FilterConfig:
    return FilterConfig(**{ALL[name]: limit})


def reason_by(text: str, filters: list[Filter]) -> str | None:
    violated = quality.first_violated(text, filters)
    return violated.rule.reason if violated else None


def reason(text: str, config: FilterConfig) -> str | None:
    return reason_by(text, active_filters(config))


@pytest.mark.parametrize("name", EXAMPLES)
def test_filter_removes_the_one_and_keeps_the_other(name: str) -> None:
    limit, bad, good = EXAMPLES[name]
    config = config_of(name, limit)
    assert reason(bad, config) == name
    assert reason(good, config) is None


def test_all_filters_have_examples() -> None:
    assert SHOWN.keys() | WHOLE.keys() == EXAMPLES.keys() | {"other_language"} == ALL.keys()


def test_by_default_nothing_is_removed(compose: Callable[..., dict[str, Any]]) -> None:
    config = build(
        FilterConfig, compose("data=text", "data.paths=[a]")["data"]["filters"], "data.filters"
    )
    assert config == FilterConfig() and not active_filters(config)


def test_the_strict_set_keeps_an_article_and_removes_junk(
    compose: Callable[..., dict[str, Any]],
) -> None:
    settings = compose("data=text", "data.paths=[a]", "data/filters=strict")["data"]["filters"]
    config = build(FilterConfig, settings, "data.filters")
    assert reason(ARTICLE, config) is None
    for text in (
        junk(),
        CODE * 9,
        TABLE,
        WIKITEXT * 5,
        MOJIBAKE,
        ENCODED,
        REPEATED * 9,
        PAGE,
        GERMAN,
        "",
        "\x00" * 99,
    ):
        assert reason(text, config), text[:50]
    assert {filter.rule.reason for filter in active_filters(config)} == ALL.keys() - OFF_IN_STRICT


@pytest.mark.parametrize(
    "text",
    [
        "東京は日本の首都であり、世界でも有数の大都市である。江戸時代には江戸と呼ばれ、徳川幕府が置かれた。明治維新の後、天皇が"
        "京都から移り、名前も東京に改められた。春には桜が咲き、公園では花見を楽しむ人々で賑わう…。夏は蒸し暑く、台風が来る。",
        "値は変数に束縛することができます。変数の型は値から推測することができます。\n"
        "– 型は後から変換することができます。\n– 名前は短くすることができます。\n– 関数は値を返すことができます。",
        "भारत दक्षिण एशिया में स्थित एक विशाल देश है। इसकी राजधानी नई दिल्ली है और यहाँ अनेक भाषाएँ बोली जाती हैं। गंगा नदी उत्तर भारत"
        " की सबसे महत्वपूर्ण नदी मानी जाती है। हिमालय पर्वत देश की उत्तरी सीमा पर है। यहाँ की संस्कृति बहुत पुरानी है, और लोग अलग अलग"
        " त्योहार मनाते हैं।",
    ],
    ids=["Japanese", "recurring forms of verbs in Japanese", "Hindi"],
)
def test_of_the_strict_set_only_stop_words_tell_other_languages(
    compose: Callable[..., dict[str, Any]], text: str
) -> None:
    settings = compose("data=text", "data.paths=[a]", "data/filters=strict")["data"]["filters"]
    config = build(FilterConfig, settings, "data.filters")
    assert reason(text, config) == "no_stop_words"
    assert reason(text, config.replace(min_stop_words=None)) is None
    mixed = f"{ARTICLE} ({text[:40]})"  # words of a text in English are counted as before
    assert reason(mixed, config.replace(min_words=len(mixed.split()) + 1)) == "too_few_words"


@pytest.mark.parametrize(
    "text",
    [
        "a film that never quite says what it is about ...",
        "* the best of the three films, and the one to see with the children",
        "it needs no javascript and no cookie policy to be good",
        "so it goes\nso it goes",
    ],
)
def test_rules_on_shares_of_lines_do_not_judge_one_or_two(text: str) -> None:
    limits = (
        "max_bullet_lines",
        "max_ellipsis_lines",
        "max_boilerplate_lines",
        "max_duplicate_lines",
    )
    config = FilterConfig(**dict.fromkeys(limits, 0.3), max_duplicate_line_characters=0.2)  # type: ignore[arg-type]
    assert reason(text, config) is None
    assert reason("\n".join([text] * 3), config)


def test_filters_that_are_always_on() -> None:
    filters = always_on(CleanConfig())
    assert reason_by("short", filters) == "too_short"
    assert reason_by("1234567890 1234567890 !!", filters) == "no_letters"
    assert reason_by("Ein ganz gewöhnlicher Satz.", filters) is None


@pytest.mark.parametrize(("rate", "limit"), [(0.15, 0.3), (0.22, 0.3), (0.33, 0.45)])
def test_the_limit_of_tokens_goes_by_the_tokenizer(rate: float, limit: float) -> None:
    assert tokens_limit(0.3, rate) == pytest.approx(limit)


@pytest.mark.parametrize(
    "raw",
    [
        ARTICLE.replace(", ", ",\u00a0").encode().decode("latin-1"),
        ARTICLE.replace("the ", "“the” ").encode().decode("latin-1"),
        "".join(c + "\x07" * (i % 9 == 0) for i, c in enumerate(ARTICLE)),
    ],
)
def test_what_normalisation_takes_away_is_broken_before_it(raw: str) -> None:
    config = FilterConfig(max_broken=0.002)
    assert is_broken(raw, config) and not is_broken(raw, FilterConfig())
    assert not is_broken(ARTICLE.replace(". ", ".\r\n\x0c\u00a0\u0085"), config)


def test_a_non_breaking_space_that_was_read_as_latin_1_is_broken() -> None:
    config = FilterConfig(max_broken=0.002)
    assert reason(ARTICLE.replace(", ", ",Â "), config) == reason(
        ARTICLE.replace("the ", "theÂ "), config
    )
    assert reason(ARTICLE.replace(", ", ",Â "), config) == "broken_characters"
    assert reason("A NOVA ESTAÇÃO DA MANHÃ E DA IRMÃ NÃO SÃ ", config) is None


def test_a_wrong_limit_is_named() -> None:
    with pytest.raises(UserError, match=r"data.filters.max_top_ngrams"):
        build(FilterConfig, {"max_top_ngrams": [0.2]}, "data.filters")


def test_language_filter() -> None:
    pytest.importorskip("py3langid")
    config = FilterConfig(languages=["en"])
    assert reason(GERMAN, config) == "other_language" and reason(ARTICLE, config) is None
    assert reason(GERMAN, FilterConfig(languages=["en", "de"])) is None


# --- what the corpus card shows of a removed document -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([ARTICLE] * 3, TokenizerConfig(vocab_size=300))


@pytest.fixture
def examples(tokenizer: Tokenizer) -> Callable[..., list[str]]:
    """`examples(why, documents, **settings)`: what is shown of the documents that filters drop for this reason."""

    def shown(why: str, texts: list[str], **settings: Any) -> list[str]:
        config, stage = DataConfig(name="test", source="test", **settings), Stage()
        ids = SpecialIds(0, 1, 2, 3, 4)
        stages = Stages(config, tokenizer, ids, 300, np.dtype("<u2"))
        documents = [Document(text, "a", number, "a") for number, text in enumerate(texts, 1)]
        stages.filtered(stages.normalised(documents, Stage(), Counter()), stage)
        return stage.line("filters").dropped[why].examples

    return shown


@pytest.mark.parametrize("name", SHOWN)
def test_the_passage_that_broke_a_rule_is_shown(name: str, examples: Examples) -> None:
    limit, bad, expected = SHOWN[name]
    text = f"{PROSE}\n{bad}\n{MORE}"
    (shown,) = examples(name, [text], filters=config_of(name, limit))
    assert expected in shown and len(shown) < EXCERPT_CHARACTERS + 100
    value, rest = shown.removeprefix("a:1: ").split(", limit ", 1)
    number = limit[0] if isinstance(limit, list) else limit
    assert rest.startswith(f"{'none' if limit is True else format(number, '.4g')} ({ALL[name]}): ")
    assert limit is True or float(value.split()[0]) != limit


@pytest.mark.parametrize("name", WHOLE)
def test_of_what_is_wrong_with_a_whole_text_the_beginning_is_shown(
    name: str, examples: Examples
) -> None:
    if name == "other_language":
        pytest.importorskip("py3langid")
    limit = WHOLE[name]
    (shown,) = examples(name, [PROSE], filters=config_of(name, limit))
    limits = ", ".join(limit) if isinstance(limit, list) else str(limit)
    assert f", limit {limits} ({ALL[name]}): {PROSE[:100]}".replace("\n", " ") in shown


def test_what_is_no_text_shows_its_number(examples: Examples) -> None:
    texts = ["Too short", "12345 " * 9, PROSE]
    assert examples("too_short", texts) == ["a:1: 9, limit 20 (min_characters): Too short"]
    (shown,) = examples("no_letters", texts)
    assert shown.startswith("a:2: 0, limit 1 (min_letters): 12345 12345")


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_near_duplicate_names_the_kept_document_wherever_it_stands(
    kept_first: bool, tmp_path: Path, text_config: Any, run: Any, made_up: Any
) -> None:
    long, short = ARTICLE.replace("\n", " "), ARTICLE.replace("\n", " ")[:-200]
    texts = [long, short, short] if kept_first else [short, short, long]
    (tmp_path / "a.txt").write_text("\n".join([*texts, *made_up(50)]))
    settings = {"documents": "line", "deduplicate": False, "near_duplicates": {"enabled": True}}
    corpus = run(text_config(tmp_path / "a.txt", **settings))
    stages = {stage.name: stage for stage in corpus.manifest.stages}
    dropped = stages["near deduplication"].dropped["near_duplicate"]
    assert dropped.documents == 2
    place = {text: number for number, text in reversed(list(enumerate(texts)))}
    (shown,) = dropped.examples
    name = tmp_path / "a.txt"
    assert shown.startswith(f"{name}:{place[short]}: like {name}:{place[long]}, 0.")
    assert f", limit 0.5 (threshold): {short[:100]}" in shown


def test_an_excerpt_holds_most_of_what_was_counted() -> None:
    text = "x" * 500 + "##" + "x" * 500 + "#" + "x" * 50 + "###" + "x" * 500
    counted = [(i, i + 1) for i, sign in enumerate(text) if sign == "#"]
    shown = excerpt(text, counted)
    assert shown.count("#") == 4 and shown.startswith("... x") and shown.endswith("x ...")
    assert len(shown) == EXCERPT_CHARACTERS + 8
    assert excerpt("short", [(2, 3)]) == excerpt("short") == "short"
    assert excerpt(text, [(100, 900)]).startswith("... ") and excerpt(text, [(0, 1)]) == excerpt(
        text
    )

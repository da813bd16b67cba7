"""`prepare` end to end: what goes in comes out, once, on the right side, the same however it is computed."""

import importlib.util
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST
from data_prep import stages
from data_prep.filters.normalise import CleanConfig, normalize, split_by_words
from data_prep.readers import plain_text
from data_prep.readers.source import limited
from data_prep.tokenizer import encode
from data_prep.tokenizer import train as training
from eval.tasks.locate import read_task, tasks_in_folder
from tests.data_prep.calls import check, corpus_folder, main, parse

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Corpus]
Contents = Callable[[Path], dict[str, bytes]]
MadeUp = Callable[..., list[str]]
Decode = Callable[[Corpus], list[str]]
Captured = pytest.CaptureFixture[str]


def test_every_document_comes_out_once(
    tmp_path: Path, text_config: Config, made_up: MadeUp, decode: Decode, run: Run
) -> None:
    texts = made_up(120)
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:60]), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts[60:] + texts[:5])
    )
    corpus = run(text_config(tmp_path / "a.txt", tmp_path / "b.jsonl", shard_tokens=1000))
    manifest = corpus.manifest
    assert manifest.removed == {"duplicate": 5}
    assert (manifest.counts["documents_read"], manifest.counts["documents"]) == (125, 120)
    assert sorted(decode(corpus)) == sorted(text.lower() for text in texts)
    assert [Path(source["name"]).name for source in manifest.sources] == ["a.txt", "b.jsonl"]
    assert 1 <= corpus.stream("validation").num_documents < 20


def test_what_is_broken_before_normalisation_goes_and_is_shown(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run
) -> None:
    broken = [
        text.replace(" ", "\x1b ", 3).replace("a ", "\x93a ")
        for text in made_up(5, seed=1, words=90)
    ]
    documents = ["so\xadft " + text for text in made_up(40)] + broken
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    config = text_config(tmp_path / "a.jsonl", filters={"max_broken": 0.002, "max_words": 30})
    corpus = run(config)
    stage = next(stage for stage in corpus.manifest.stages if stage.name == "filters")
    dropped = stage.dropped["broken_characters"]
    assert dropped.documents == sum(
        len(split_by_words(normalize(text, CleanConfig()), 30)) for text in broken
    )
    controls = sum(len(re.findall("[\x1b\x93]", text)) for text in broken)
    assert corpus.manifest.stages[1].notes["deleted_characters"] == {
        "control": controls,
        "soft hyphen": 40,
    }
    card = (corpus.folder / "corpus_card.md").read_text()
    assert f"deleted_characters {controls} control, 40 soft hyphen" in card
    shown = dropped.examples
    assert all(
        "limit 0.002 (max_broken)" in text and "\\x" in text and text.isprintable()
        for text in shown
    )


def test_result_does_not_depend_on_workers_tasks_or_groups(
    tmp_path: Path,
    text_file: Path,
    text_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    contents: Contents,
) -> None:
    results = []
    for count, range_bytes, group in ((1, 1 << 20, 1 << 20), (2, 5000, 1 << 20), (1, 300, 100)):
        monkeypatch.setattr(plain_text, "RANGE_BYTES", range_bytes)
        monkeypatch.setattr(stages, "GROUP_SIZE", group)
        folder = tmp_path / f"{count}-{range_bytes}"
        # Many documents are in pieces, and some are dropped for each reason.
        settings = {
            "filters": {"max_words": 40, "min_words": 8},
            "near_duplicates": {"enabled": True},
        }
        settings |= {"shard_tokens": 3000}
        run(text_config(text_file, text_file, workers=count, corpus=str(folder), **settings))
        results.append(contents(folder))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 6


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_long_documents_are_tokenized_as_if_in_one_piece(
    tmp_path: Path,
    kind: str,
    made_up: MadeUp,
    text_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    if kind == "unigram":
        pytest.importorskip("sentencepiece")
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 100)
    texts = ["\n".join(made_up(200, seed)) for seed in range(4)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    # One shard is far shorter than a document: the document lies across many.
    corpus = run(
        text_config(
            tmp_path / "a.txt", shard_tokens=500, tokenizer={"kind": kind, "vocab_size": 400}
        )
    )
    assert len(corpus.manifest.splits["train"]) > 10
    model = Tokenizer.from_file(str(corpus.tokenizer_file))
    expected = {tuple(model.encode(text).ids) for text in texts}
    streams = corpus.stream("train"), corpus.stream("validation")
    found = {tuple(stream.document(n)) for stream in streams for n in range(stream.num_documents)}
    assert found == expected


def test_documents_of_too_many_words_are_cut_not_dropped(
    tmp_path: Path, text_config: Config, made_up: MadeUp, decode: Decode, run: Run
) -> None:
    """As novels read by file are: all their text stays, and the card says how many there were."""
    texts = ["\n\n".join(made_up(40, seed)) for seed in range(3)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    limits = {"max_words": 500, "min_alphabetic_words": 0.9}
    corpus = run(text_config(tmp_path / "*.txt", documents="file", filters=limits))
    documents = decode(corpus)
    assert (
        corpus.manifest.removed == {} and max(len(d.split()) for d in documents) <= 520
    )  # ends of sentence are words
    stage = next(stage for stage in corpus.manifest.stages if stage.name == "normalise")
    assert (
        stage.notes == {"long_documents_cut": 3, "their_parts": len(documents)}
        and len(documents) > 9
    )
    assert sorted(" ".join(documents).replace(".", "").split()) == sorted(
        " ".join(texts).lower().replace(".", "").split()
    )
    assert (
        f"long_documents_cut 3; their_parts {len(documents)}"
        in (corpus.folder / "corpus_card.md").read_text()
    )


def test_a_long_document_is_counted_once(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run
) -> None:
    """It is read in parts, so that memory stays bounded."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(
            "\n".join("\n".join(made_up(20, number)).split(". "))
        )
    config = text_config(tmp_path / "*.txt", documents="file", clean={"max_characters": 2000})
    corpus = run(config)
    source, normalise = corpus.manifest.stages[:2]
    assert (source.documents_in, source.documents_out, normalise.documents_in) == (3, 3, 3)
    assert normalise.notes == {"long_documents_cut": 3, "their_parts": normalise.documents_out}
    assert normalise.documents_out > 6 and corpus.manifest.removed == {}
    config["data"]["max_documents"] = 2
    first_two = list(limited(parse(config).source.documents(), parse(config).source))
    texts = [(tmp_path / f"{number}.txt").read_text() for number in range(2)]
    assert "".join(document.text for document in first_two) == "".join(
        f"{text}\n" for text in texts
    )


def test_a_long_document_that_is_damaged_in_its_second_part_is_counted_once(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run
) -> None:
    lines = "\n".join(made_up(40)).encode()
    (tmp_path / "0.txt").write_bytes(lines[:3000] + b"\xff" + lines[3000:])
    (tmp_path / "1.txt").write_bytes(b"\xff\n" + "\n".join(made_up(40, 1)).encode())
    corpus = run(
        text_config(
            tmp_path / "*.txt", documents="file", damaged="drop", clean={"max_characters": 2000}
        )
    )
    source, normalise = corpus.manifest.stages[:2]
    assert corpus.manifest.counts["documents_read"] == source.documents_in == 2
    assert (
        corpus.manifest.removed == {"not_utf8": 1} and source.dropped["not_utf8"].bytes > 3000
    )  # two parts
    assert normalise.notes == {"long_documents_cut": 2, "their_parts": normalise.documents_out}


@pytest.mark.parametrize("limit", [None, 1000])
def test_no_tokenizer_is_trained_on_what_is_left_out_as_damaged(
    tmp_path: Path,
    text_config: Config,
    made_up: MadeUp,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
) -> None:
    latin = "\n\n".join(f"{text} Grüße" for text in made_up(20)).encode("latin1")
    (tmp_path / "a.txt").write_bytes("\n\n".join(made_up(50, 1)).encode() + b"\n\n" + latin)
    samples: list[list[str]] = []
    train = training.train
    monkeypatch.setattr(
        training,
        "train",
        lambda sample, *rest: (samples.append(sample), train(sample, *rest))[1],
    )
    main(text_config(tmp_path / "a.txt", damaged="drop", max_documents=limit))
    assert samples == [made_up(50, 1)]


@pytest.mark.parametrize("limit", [None, 1000])
def test_text_that_is_missing_for_damage_is_said_to_be_damaged(
    tmp_path: Path, text_config: Config, limit: int | None
) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "b.txt").write_bytes(b"A few words.\n\nCaf\xe9.")
    config = text_config(tmp_path / "*.txt", damaged="drop", max_documents=limit)
    with pytest.raises(
        UserError,
        match=r"too little text to train .*; left out as damaged: 1 binary_file, 1 not_utf8$",
    ):
        main(config)


def test_a_name_breaks_no_table(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run
) -> None:
    (tmp_path / "a|b\nc.txt").write_text("\n\n".join(made_up(50)))
    corpus = run(text_config(tmp_path / "*.txt"))
    assert list(corpus.manifest.statistics["by_source"]) == [rf"{tmp_path}/a|b\x0ac.txt"]
    rows = [
        line
        for line in (corpus.folder / "corpus_card.md").read_text().splitlines()
        if "c.txt |" in line
    ]
    assert [row.count("|") - row.count(r"\|") for row in rows] == [5]


def test_a_file_may_have_a_name_that_is_no_text(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run, capsys: Captured
) -> None:
    (tmp_path / "caf\udce9.txt").write_text("\n\n".join(made_up(50)))
    config = text_config(tmp_path / "*.txt", filters={"min_words": 20})
    corpus = run(config)
    main(config)
    assert "nothing to do" in capsys.readouterr().out
    names = [corpus.manifest.sources[0]["name"], *corpus.manifest.statistics["by_source"]]
    assert names == [rf"{tmp_path}/caf\xe9.txt"] * 2
    assert rf"- `{tmp_path}/caf\xe9.txt:" in (corpus.folder / "corpus_card.md").read_text("utf-8")


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "filters": (
        {"documents": "block", "filters": {"min_words": 60}},
        r"too_few_words took \d\d% of the text; .*documents=block .*milder data\.filters\.min_words",
    ),
    "tiny documents": (
        {"documents": "line"},
        r"documents are tiny: \d words on average \(data\.documents=line",
    ),
    "hold-out": (
        {"documents": "file"},
        r"\d\d% of the tokens are held out .*data\.validation_fraction=0\.05.* there are 8 \(data\.documents=file",
    ),
    "nothing": ({"documents": "block"}, ""),
    "no separator": (
        {"documents": "separator", "separator": "<eot>", "validation_fraction": 0.3},
        r"data\.separator=<eot>: in none of the files",
    ),
    "markers within lines": (
        {"documents": "block", "marker": "<|endoftext|>"},
        r"'<\|endoftext\|>' stands 8 times .* data\.separator='\"<\|endoftext\|>\"'",
    ),
    # 300 entries make more tokens than that of every document
    "nothing of the tokenizer": (
        {"documents": "block", "filters": {"max_tokens_per_character": 0.3}},
        "",
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_may_not_be_meant_is_said_at_the_end(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run, capsys: Captured, name: str
) -> None:
    settings, said = dict(ADVICE[name][0]), ADVICE[name][1]
    marker = settings.pop("marker", "")
    for number in range(8):
        texts = [text.split() for text in made_up(30, number)]
        blocks = [
            "\n".join(" ".join(words[i : i + 8]) for i in range(0, len(words), 8))
            for words in texts
        ]
        (tmp_path / f"{number}.txt").write_text(marker + "\n\n".join(blocks))
    corpus = run(text_config(tmp_path / "*.txt", **settings))
    last = capsys.readouterr().out.splitlines()[-1]
    card = (corpus.folder / "corpus_card.md").read_text()
    assert ("## Warnings" in card) == bool(said) and (not said or f"- {last}" in card)
    assert re.search(said, last) if said else "documents; vocabulary" in last, last


@pytest.mark.parametrize("gap", ["", " "])
def test_unigram_on_text_without_spaces_is_said_to_be_slow(
    tmp_path: Path, text_config: Config, run: Run, capsys: Captured, gap: str
) -> None:
    pytest.importorskip("sentencepiece")
    syllables = ["ka", "lo", "mi", "ren", "tas"]
    texts = [gap.join(random.Random(number).choices(syllables, k=60)) for number in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    run(text_config(tmp_path / "a.txt", tokenizer={"kind": "unigram", "vocab_size": 40}))
    assert ("takes long to train" in capsys.readouterr().out) == (gap == "")


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_vocabulary_that_the_text_does_not_fill_is_said(
    text_file: Path, text_config: Config, run: Run, capsys: Captured, kind: str
) -> None:
    corpus = run(text_config(text_file, tokenizer={"kind": kind, "vocab_size": "auto"}))
    entries = f"vocab_size=auto: {corpus.manifest.tokenizer.vocab_size:,} entries"
    assert f"{entries}, no more pairs reach tokenizer.min_frequency=2" in capsys.readouterr().out


def test_no_advice_on_plain_text_where_there_is_none(
    tmp_path: Path, text_config: Config, made_up: MadeUp
) -> None:
    (tmp_path / "a.csv").write_text("id,text\n" + f"1,{made_up(1)[0]}\n".replace(", ", " ") * 3)
    with pytest.raises(UserError, match="too little text: 1 of 3 documents remain") as error:
        main(text_config(tmp_path / "a.csv"))
    assert "data.documents" not in str(error.value)


def test_text_that_becomes_unknown_tokens_is_said_at_the_end(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run, capsys: Captured
) -> None:
    """WordPiece makes one unknown token of a run of over 100 characters without a space."""
    thai = [
        "".join(chr(0x0E01 + (7 * line + i * i) % 46) for i in range(150)) for line in range(60)
    ]
    (tmp_path / "a.txt").write_text("\n\n".join([*made_up(60), *thai]), encoding="utf-8")
    corpus = run(text_config(tmp_path / "a.txt"))
    found = corpus.manifest.statistics
    lost, spaces = found["characters_lost"], found["words"] - corpus.manifest.counts["documents"]
    assert round(lost * (found["characters"] - spaces)) == 150 * len(set(thai))
    said = rf"[\d.]+% of the tokens are unknown, and no token stands for {100 * lost:.1f}% .*100 without .*=bpe"
    assert re.search(said, capsys.readouterr().out)
    (tmp_path / "a.txt").write_text("\n\n".join(["Some words.", *thai]), encoding="utf-8")
    with pytest.raises(UserError, match=r"does not fit .* 100 without a space\. tokenizer=bpe"):
        main(text_config(tmp_path / "a.txt", clean={"min_characters": 1}))


@pytest.mark.parametrize(
    ("words", "stripped"),
    [
        ("ガード カード どあ とあ", {"Hiragana": 1, "Katakana": 3}),
        ("мой мои край края", {"Cyrillic": 2}),
        ("कु को पु पानी", {"Devanagari": 2}),
        ("é e Kalo", {"Latin": 1}),
        ("مَعَ كَتَبَ", {"Arabic": 5}),
        ("Kalo kalo", {}),
    ],
)
def test_characters_that_lose_their_accents_are_counted_by_script(
    tmp_path: Path,
    text_config: Config,
    run: Run,
    capsys: Captured,
    words: str,
    stripped: dict[str, int],
) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"{n} {words} rentas" * 3 for n in range(100)))
    scripts = {script: 300 * count for script, count in stripped.items()}
    for settings, counts in (({}, scripts), ({"strip_accents": False}, {})):
        tokenizer = {"vocab_size": 400, "lowercase": True, **settings}
        corpus = run(text_config(tmp_path / "a.txt", tokenizer=tokenizer))
        notes = next(line.notes for line in corpus.manifest.stages if line.name == "tokens")
        assert notes.get(stages.STRIPPED, {}) == counts
        card = (corpus.folder / "corpus_card.md").read_text()
        for shown in (card, capsys.readouterr().out):
            assert "no token stands for" not in shown.replace("characters that no", "")
            warned = re.search(r"takes accents.*\((.*)\)\. .*strip_accents=false", shown)
            expected = ", ".join(f"{count:,} {script}" for script, count in counts.items())
            assert (warned[1] if warned else "") == expected


@pytest.mark.parametrize(
    ("kind", "said"),
    [("wordpiece", r"[\d.]+ %"), ("bpe", r"0\.0000 %"), ("unigram", r"at least [\d.]+ %")],
)
def test_the_card_says_which_share_of_the_characters_no_token_stands_for(
    tmp_path: Path, text_config: Config, made_up: MadeUp, run: Run, kind: str, said: str
) -> None:
    if kind == "unigram":
        pytest.importorskip("sentencepiece")
    rare = "".join(chr(0x4E00 + i) for i in range(200))  # more signs than there is room for
    (tmp_path / "a.txt").write_text(
        "\n\n".join([*made_up(60), f"{made_up(1)[0]} {rare}", *made_up(60, 1)]), "utf-8"
    )
    corpus = run(text_config(tmp_path / "a.txt", tokenizer={"kind": kind, "vocab_size": 320}))
    card, unknown = (
        (corpus.folder / "corpus_card.md").read_text("utf-8"),
        corpus.manifest.counts["unknown_tokens"],
    )
    (found,) = re.findall(r"\| characters that no token stands for \| (.*) \|", card)
    assert re.fullmatch(said, found) and (unknown > 0) == (kind != "bpe") == ("0.0000" not in found)


def test_transformers_loads_the_tokenizer_of_a_corpus_with_its_special_tokens(
    text_file: Path, text_config: Config, run: Run
) -> None:
    corpus = run(text_config(text_file))
    tokenizer = AutoTokenizer.from_pretrained(corpus.folder)
    names = ("pad", "unk", "cls", "sep", "mask")
    assert {
        name: getattr(tokenizer, f"{name}_token_id") for name in names
    } == corpus.special_ids._asdict()


def test_the_loop_that_the_corpus_page_shows_reads_a_corpus(
    text_file: Path, text_config: Config, run: Run
) -> None:
    folder = run(text_config(text_file)).folder
    page = Path(__file__).parents[2] / "docs" / "reference" / "corpus.md"
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        if "Corpus.open" in block
    ]
    names: dict[str, Any] = {}
    exec(code.replace("corpora/<folder>", str(folder)), names)
    assert names["ids"].shape == (32, 128) and names["first"] > 0


def test_second_prepare_changes_nothing_and_refuses_sources_that_changed_since(
    text_file: Path,
    text_config: Config,
    capsys: Captured,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = text_config(text_file)
    folder = run(config).folder
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    os.utime(text_file)  # touched, but the same content
    main(config)
    assert "nothing to do" in capsys.readouterr().out
    monkeypatch.setattr(os, "access", lambda path, mode: path not in (folder, folder.parent))
    check(config)  # nothing is made
    text_file.write_text(text_file.read_text() + "\n\nOne more document, at the end.\n")
    for do in (main, check):
        with pytest.raises(UserError, match=r"sources have changed since .*text\.txt"):
            do(config)
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before


def test_a_named_folder_with_other_settings_is_refused(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run, contents: Contents
) -> None:
    run(text_config(text_file, corpus=str(tmp_path / "mine")))
    other = text_config(text_file, corpus=str(tmp_path / "mine"), tokenizer={"vocab_size": 290})
    for do in (main, check):
        with pytest.raises(UserError, match=r"other settings \(tokenizer\.vocab_size\)"):
            do(other)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.doc").write_text("precious")
    with pytest.raises(UserError, match=r"not a corpus, and not empty \(letter.doc\)"):
        main(text_config(text_file, corpus=str(tmp_path / "home")))
    assert contents(tmp_path / "home") == {"letter.doc": b"precious"}


def test_existing_tokenizer_is_used_watched_and_refused_for_another_language(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run
) -> None:
    first = run(text_config(text_file))
    path = tmp_path / "own.json"
    path.write_bytes(first.tokenizer_file.read_bytes())
    config = text_config(text_file, tokenizer={"path": str(path)})
    second = run(config)
    assert second.folder != first.folder and second.manifest.tokenizer == first.manifest.tokenizer
    assert second.manifest.splits == first.manifest.splits
    (tmp_path / "greek.txt").write_text(
        "\n\n".join(f"Ένα δύο τρία τέσσερα πέντε αριθμός {i}." for i in range(50))
    )
    greek = text_config(tmp_path / "greek.txt", tokenizer={"path": str(path)})
    with pytest.raises(UserError, match=r"does not fit this text: .* unknown"):
        main(greek)
    assert not corpus_folder(greek).exists()
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match=r"have changed since .*own\.json"):
        main(config)


FAILURES: dict[str, tuple[bytes, str]] = {
    "one document": (
        b"One single document that is long enough to train on. " * 50,
        "at least 2 are needed",
    ),
    "all filtered": (
        b"12345 67890 12345 67890 12345\n\n" * 100,
        r"0 of 100 documents remain \(removed: 100 no_l",
    ),
    "all too short": (
        b"1 of few\n\n" * 300,
        r"removed: 300 too_short by data\.clean\.min_characters\)",
    ),
    "too little": (b"A few words and\n\nnot much more than that.", "too little text to train"),
    "bad bytes at the end": (
        b"Some text that goes on and on.\n\n" * 100 + b"\xff",
        "not UTF-8 at byte 3200",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_mistake_leaves_nothing_behind(tmp_path: Path, text_config: Config, name: str) -> None:
    data, message = FAILURES[name]
    (tmp_path / "a.txt").write_bytes(data)
    config = text_config(tmp_path / "a.txt", deduplicate=False)
    with pytest.raises(UserError, match=message):
        main(config)
    assert not corpus_folder(config).exists()


def test_unknown_source_and_bad_values_name_the_setting(
    text_file: Path, text_config: Config
) -> None:
    for data, message in (
        ({"source": "web"}, "data.source=web: "),
        ({"validation_fraction": 1.5}, "validation_fraction=1.5"),
        ({"seed": 2**63}, "data.seed=9223372036854775808: "),
        ({"documents": "page"}, "data.documents=page: "),
        ({"colour": 1}, "data.colour: unknown setting"),
    ):
        with pytest.raises(UserError, match=message):
            main(text_config(text_file, **data))


def test_demo_corpus_brings_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    from data_prep.synthetic import documents
    from data_prep.synthetic import tasks as task_files

    monkeypatch.setattr(task_files, "SIZES", {"train": 30, "dev": 12, "test": 12})
    data = {"name": "e", "source": "embedded", "size": 3000, "seed": 7}
    config = {
        "corpora": str(tmp_path),
        "data": data,
        "tokenizer": {"kind": "wordpiece", "vocab_size": 300},
    }
    corpus = run(config)
    read = corpus.manifest.counts["documents_read"]
    assert read == len([*documents.documents(7, 3000)]) > 5
    tasks, absent = tasks_in_folder(corpus.folder / "tasks", None)
    assert len(tasks) == 8 and set(absent) == {"wnli"}
    assert len(read_task(corpus.folder / "tasks", tasks[0]).train) == 30
    main(config)
    monkeypatch.setattr(
        task_files, "write_tasks", lambda folder, seed: (_ for _ in ()).throw(RuntimeError("half"))
    )
    other = {**config, "data": {**data, "seed": 8}}
    with pytest.raises(RuntimeError, match="half"):
        main(other)
    assert (
        not (corpus_folder(other) / "tasks").exists()
        and not (corpus_folder(other) / MANIFEST).exists()
    )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a.xml.bz2", {}, r"mwparserfromhell: pip install 'cramming\[wikipedia\]'"),
        ("a.wet.gz", {}, r"warcio: .*\[warc\]'"),
        (
            "a.txt",
            {"filters": {"languages": ["en"]}},
            r"data.filters.languages needs .*\[language\]'",
        ),
        (
            "a.txt",
            {"tokenizer": {"kind": "unigram"}},
            r"tokenizer.kind=unigram needs the package .*\[unigram\]'",
        ),
    ],
)
def test_a_missing_package_is_named_before_anything_is_read(
    tmp_path: Path,
    text_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: Any,
    message: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        parse(text_config(tmp_path / name, **settings))

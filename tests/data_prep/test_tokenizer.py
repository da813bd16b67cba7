"""Trained tokenizers are deterministic, load in stock transformers, and encode as BERT's do."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from cramming.config import UserError, build
from cramming.data.manifest import SpecialIds
from data_prep import prepare
from data_prep.tokenizer import train as training
from data_prep.tokenizer.load import (
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TokenizerConfig,
    characters_by_entry,
    describe,
    describe_for_transformers,
    load,
    special_tokens,
)
from data_prep.tokenizer.train import TRAINERS, Sample, train

Config = Callable[..., dict[str, Any]]
MadeUp = Callable[..., list[str]]
PRINT_VOCABULARY = """
import json, sys
from data_prep.tokenizer.load import TokenizerConfig
from data_prep.tokenizer.train import train
sample = json.load(sys.stdin)
print(train(sample, TokenizerConfig(kind=sys.argv[1], vocab_size=400)).to_str())
"""


def write_words(path: Path, *special: str) -> None:
    """Write a tokenizer.json that knows the word `a` and these special tokens."""
    vocabulary = {word: number for number, word in enumerate(("a", *special))}
    unk = next(token for token in special if "unk" in token.lower())
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))


def write_config(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer_config.json beside the tokenizer."""
    info = describe(tokenizer, folder / "tokenizer.json")
    text = describe_for_transformers(info, folder / "tokenizer.json")
    (folder / TOKENIZER_CONFIG).write_text(text)


def require(kind: str) -> None:
    """Skip where Unigram's optional trainer is missing."""
    if kind == "unigram":
        pytest.importorskip("sentencepiece")


@pytest.mark.parametrize("kind", TRAINERS)
def test_training_is_the_same_in_every_process(kind: str, made_up: MadeUp) -> None:
    require(kind)
    sample = made_up(200) + ["日本語 éàü ß Ωμέγα"] * 3
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_VOCABULARY, kind],
            input=json.dumps(sample),
            env={
                **os.environ,
                "PYTHONHASHSEED": str(seed),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("kind", TRAINERS)
def test_loads_in_stock_transformers_and_encodes_pairs(
    tmp_path: Path, kind: Any, made_up: MadeUp
) -> None:
    require(kind)
    tokenizer = train(made_up(100), TokenizerConfig(kind=kind, vocab_size=400))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        **{f"{n}_token": t for n, t in SPECIAL_TOKENS.items()},
    )
    ids = SpecialIds(**describe(tokenizer, tmp_path / "tokenizer.json").special_ids)
    assert ids == (0, 1, 2, 3, 4)
    first, second = (
        fast(text, add_special_tokens=False)["input_ids"] for text in ("Kalo mi", "rentas")
    )
    pair = fast("Kalo mi", "rentas")
    assert pair["input_ids"] == [ids.cls, *first, ids.sep, *second, ids.sep]
    assert tokenizer.encode("Kalo mi", "rentas").type_ids == [0] * (len(first) + 2) + [1] * (
        len(second) + 1
    )
    assert fast("kalo")["input_ids"] == fast("KALO")["input_ids"]
    assert fast.decode(first).strip() == "kalo mi"
    words = "Kalo mi, rentas!".split()
    spaced = [
        words[0],
        *(" " + word for word in words[1:]),
    ]  # as docs/guides/export.md has it for byte-level BPE
    assert fast(spaced, is_split_into_words=True)["input_ids"] == fast(" ".join(words))["input_ids"]


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_masked_word_takes_its_space_with_it(tmp_path: Path, kind: Any, made_up: MadeUp) -> None:
    """In `kalo [MASK] mi` the mask stands for a word as in pretraining, for byte-level BPE with the space before it."""
    require(kind)
    tokenizer = train(made_up(100), TokenizerConfig(kind=kind, vocab_size=400))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, tokenizer)
    masked = tokenizer.encode("Kalo", add_special_tokens=False).ids + [4]
    masked += tokenizer.encode(" rentas", add_special_tokens=False).ids
    assert tokenizer.encode("Kalo [MASK] rentas", add_special_tokens=False).ids == masked
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert fast("Kalo [MASK] rentas", add_special_tokens=False)["input_ids"] == masked


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("name", ["AutoTokenizer", "BertTokenizerFast"])
def test_classes_of_transformers_keep_case_and_accents_as_trained(
    tmp_path: Path, name: str, lowercase: bool
) -> None:
    text = "Éa in Ärger, ガ カ Й и 東京 UND Überfall"
    tokenizer = train([text] * 60, TokenizerConfig(vocab_size=300, lowercase=lowercase))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, tokenizer)
    loaded = getattr(transformers, name).from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids


@pytest.mark.parametrize("word", ["दिल्ली", "كَتَبَ", "שָׁלוֹם", "นี้ที่", "e\u0301te\u0301", "don"])
def test_byte_level_words_hold_their_marks(word: str) -> None:
    """GPT-2's own pattern cuts Hindi at each vowel sign, so that no entry could hold a word."""
    text = " ".join([word] * 100) + ", 12"
    tokenizer = train([text] * 9, TokenizerConfig(kind="bpe", vocab_size=400))
    encoding = tokenizer.encode(f"{word} {word}, 12", add_special_tokens=False)
    assert [len(characters) for characters in encoding.tokens][1:] == [
        len(f" {word}".encode()),
        1,
        3,
    ]
    assert tokenizer.decode(encoding.ids) == f"{word} {word}, 12"


@pytest.mark.parametrize("lacks", ["", "é", "Ω"])
def test_byte_level_entries_stand_for_the_characters_of_their_bytes(
    lacks: str, made_up: MadeUp
) -> None:
    """Counted, not taken for granted: one that lacks the last byte of a character loses no other."""
    tokenizer = train(made_up(100), TokenizerConfig(kind="bpe", vocab_size=300, lowercase=False))
    if lacks:
        (sign,) = (sign for sign in tokenizer.pre_tokenizer.pre_tokenize_str(lacks)[0][0][0])
        node = json.loads(tokenizer.to_str())
        number = node["model"]["vocab"].pop(sign)
        node["model"]["vocab"]["<unused>"] = number
        node["model"]["merges"] = [
            pair for pair in node["model"]["merges"] if sign not in "".join(pair)
        ]
        tokenizer = Tokenizer.from_str(json.dumps(node))
    characters_V = characters_by_entry(tokenizer)
    assert characters_V is not None
    text = "Kalo mi rentas\né Ω 日本語 😀 Ωé kalo"
    found = characters_V[tokenizer.encode(text, add_special_tokens=False).ids].sum()
    assert found == len("".join(text.split())) - (text.count(lacks) if lacks else 0)


def test_cased_tokenizer_keeps_case_and_accents(made_up: MadeUp) -> None:
    sample = made_up(100) + ["Éa éa"] * 5
    cased = train(sample, TokenizerConfig(lowercase=False, vocab_size=400))
    assert cased.encode("Éa").ids != cased.encode("ea").ids
    uncased = train(sample, TokenizerConfig(vocab_size=400))
    assert uncased.encode("Éa").ids == uncased.encode("ea").ids


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_vocabulary_by_frequency_is_that_of_its_size(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is a size like any other: the largest at which 95 % of the merges of a BPE are frequent enough."""
    require(kind)
    monkeypatch.setattr(training, "SMALLEST_VOCABULARY", 320)
    monkeypatch.setattr(training, "OCCURRENCES", 20)
    draw = random.Random(0)
    lexicon = ["".join(draw.choices("aeioubcdfgk", k=draw.randint(2, 9))) for _ in range(5000)]
    sample = [" ".join(draw.choices(lexicon, k=400)) for _ in range(60)]
    config = TokenizerConfig(kind=kind, lowercase=False)
    size = training.supported_vocabulary(sample, config, 1.0)
    assert size % 64 == 0 and 320 < size < training.supported_vocabulary(sample, config, 0.2)
    chosen, typed = train(sample, config), train(sample, config.replace(vocab_size=size))
    assert chosen.to_str() == typed.to_str()
    for larger, is_frequent in ((size, True), (size + 64, False)):
        draft = train(sample, TokenizerConfig(kind="bpe", lowercase=False, vocab_size=larger))
        words = Counter(word for text in sample for word in text.split())
        uses = Counter[int]()
        for word, count in words.items():
            for entry in draft.encode(f" {word}", add_special_tokens=False).ids:
                uses[entry] += count
        merges = range(261, draft.get_vocab_size())
        frequent = sum(uses[entry] >= 20 for entry in merges) / len(merges)
        assert (frequent >= 0.95) == is_frequent


@pytest.mark.parametrize(("vocab_size", "least"), [(32768, 0.9995), (2048, 0.85)])
def test_the_alphabet_covers_scripts_of_many_characters(vocab_size: int, least: float) -> None:
    """Han characters, which stand alone, have one entry each; a small vocabulary has room for the frequent ones."""
    draw = random.Random(0)
    han = [chr(0x4E00 + number) for number in range(4000)]
    weights = [1 / (1 + number) for number in range(4000)]
    text = "".join(draw.choices(han, weights, k=200_000))
    tokenizer = train([text], TokenizerConfig(vocab_size=vocab_size))
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    assert len(tokens) == len(text) and 1 - tokens.count("[UNK]") / len(tokens) >= least
    assert not any(entry.startswith("##") for entry in tokenizer.get_vocab())


@pytest.mark.parametrize("kind", TRAINERS)
def test_what_cannot_be_trained_is_refused(kind: Any, made_up: MadeUp) -> None:
    require(kind)
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=12 is too small: .* alone need \d+"):
        train(made_up(100), TokenizerConfig(kind=kind, vocab_size=12))
    if kind != "wordpiece":
        with pytest.raises(UserError, match=rf"tokenizer.strip_accents=true: kind={kind} keeps"):
            build(TokenizerConfig, {"kind": kind, "strip_accents": True}, "tokenizer")
    with pytest.raises(UserError, match="too little text"):
        train(["a few words"], TokenizerConfig(kind=kind))
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=1000000000: "):
        build(TokenizerConfig, {"vocab_size": 10**9}, "tokenizer")


def test_bad_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load(tmp_path / "nothing.json")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load(tmp_path / "t.json")
    write_words(tmp_path / "t.json", "[UNK]", "[PAD]", "</s>", "<bos>")
    lacks = (
        r"for cls \(\[CLS\] or <cls> or <s>\), mask \(.*the file has </s> <bos> \[PAD\] \[UNK\]\."
    )
    with pytest.raises(UserError, match=lacks):
        load(tmp_path / "t.json")


@pytest.mark.parametrize(
    "special",
    [
        "<pad> <unk> <s> </s> <mask>",  # RoBERTa, XLM-R, CamemBERT
        "<pad> <unk> <cls> <eos> <mask>",  # ESM
        "<pad> <unk> <cls> <sep> <mask>",  # XLNet
        "<pad> <unk> [CLS] [SEP] [MASK]",  # ALBERT
    ],
)
def test_special_tokens_of_known_families_are_mapped(tmp_path: Path, special: str) -> None:
    pad, unk, cls, sep, mask = special.split()
    others = [token for token in ("<s>", "</s>") if cls != "<s>"]  # of XLNet and BigBird, not used
    write_words(tmp_path / "t.json", *others, mask, sep, cls, unk, pad)
    tokenizer = load(tmp_path / "t.json")
    info = describe(tokenizer, tmp_path / "t.json")
    assert info.special == {"pad": pad, "unk": unk, "cls": cls, "sep": sep, "mask": mask}
    between = [sep, sep] if cls == "<s>" else [sep]
    assert tokenizer.encode("a", "a").tokens == [cls, "a", *between, "a", sep]


def test_added_tokens_come_before_entries_of_another_tokenizer() -> None:
    """MPNet's vocabulary holds BERT's special tokens, which are plain entries there."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *SPECIAL_TOKENS.values(), "<mask>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = transformers.MPNetTokenizer(vocab=vocabulary).backend_tokenizer
    assert list(special_tokens(tokenizer).values()) == ["<pad>", "[UNK]", "<s>", "</s>", "<mask>"]


def test_sample_is_bounded_even_in_order_and_the_same_for_any_tasks() -> None:
    texts = [f"{i:06d} " + "x" * 93 for i in range(5000)]
    samples = []
    for tasks in (1, 7):
        whole = Sample(0.1, seed=0)
        for task in random.Random(tasks).sample(range(tasks), tasks):
            own = Sample(0.1, seed=0, threshold=whole.threshold)
            for text in texts[task * 5000 // tasks : (task + 1) * 5000 // tasks]:
                own.add(text, task, str.upper)
            for sampled in own.sampled():
                whole.take(sampled)
        samples.append([sampled.data.decode() for sampled in whole.sampled()])
    assert samples[0] == samples[1]
    numbers = [int(text[:6]) for text in samples[0]]
    assert numbers == sorted(numbers) and 900 <= len(numbers) <= 1000
    assert 2250 < sum(numbers) / len(numbers) < 2750  # not the beginning
    small = Sample(0.1, seed=0)
    for text in texts[:10] * 2:
        small.add(text, 0, str.upper)
    assert [s.data.decode() for s in small.sampled()] == [text.upper() for text in texts[:10]] * 2


def test_a_process_of_its_own_trains_the_same_tokenizer(
    text_file: Path,
    text_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Any,
    contents: Any,
) -> None:
    run(text_config(text_file, corpus=str(tmp_path / "here")))
    monkeypatch.setattr(prepare, "TRAINED_HERE", 0)
    run(text_config(text_file, corpus=str(tmp_path / "there")))
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("size", [4096, 65536])
def test_the_vocabulary_is_as_large_as_the_text_allows(kind: Any, size: int) -> None:
    require(kind)
    draw = random.Random(0)
    text = [
        " ".join("".join(draw.choices("aeioubcdfgk", k=draw.randint(2, 9))) for _ in range(400))
        for _ in range(60)
    ]
    tokenizer = train(text, TokenizerConfig(kind=kind, vocab_size=size))
    assert tokenizer.get_vocab_size() <= size and (
        size > 4096 or tokenizer.get_vocab_size() == size
    )
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(
        range(tokenizer.get_vocab_size())
    )

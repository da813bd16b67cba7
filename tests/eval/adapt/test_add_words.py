"""`adapt --add-words`: frequent words of the text become entries, and nothing else of the checkpoint changes."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cramming import cli, verbs
from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.invocation import Invocation
from cramming.overrides import compose
from data_prep import prepare
from eval.adapt.add_words import EXTENSIONS, Word, extended_checkpoint, refuse_tokenizer
from eval.adapt.words import is_word, own_words, word_beginnings

COMMON, RARE = ["the", "of", "and", "in", "is"], ["photosynthesis", "mitochondria", "ribosomes"]
MERGES = (("b", "c"), ("Ġ", "a"), ("a", "b"), ("Ġa", "bc"), ("Ġa", "b"))
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def sentences(words: list[str], count: int) -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choices(words, k=12)) for _ in range(count)]


def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer that knows the common words, and the rare ones letter by letter."""
    letters = sorted(set("".join(COMMON + RARE)))
    if kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=SPECIAL)
    elif kind == "BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet)
    else:
        pieces = [(token, 0.0) for token in SPECIAL]
        pieces += [(f"▁{word}", -2.0) for word in COMMON] + [("▁", -3.0)]
        pieces += [(letter, -4.0) for letter in letters]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(SPECIAL)
        return tokenizer
    tokenizer.train_from_iterator(
        sentences(COMMON, 500) + ["".join(letters * 2), " ".join(letters)], trainer
    )
    tokenizer.add_special_tokens(SPECIAL)  # of BPE behind the vocabulary, as ModernBERT's
    return tokenizer


@pytest.fixture(params=["WordPiece", "BPE", "Unigram"])
def checkpoint(
    request: pytest.FixtureRequest, write_bert: Callable[..., Path], tmp_path: Path
) -> Path:
    """A small BERT with a tokenizer of each kind, in a folder `bert`."""
    folder = write_bert(tmp_path / "bert", words=400, max_position_embeddings=64, hidden_size=32)
    tokenizer_of(request.param).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def corpus(checkpoint: Path, tmp_path: Path) -> Corpus:
    """Text with rare words, prepared by the checkpoint's tokenizer."""
    return prepared(checkpoint, "\n\n".join(sentences(COMMON + RARE, 300)), tmp_path)


def prepared(checkpoint: Path, text: str, folder: Path) -> Corpus:
    """The corpus of a text, by the checkpoint's tokenizer."""
    (folder / "own.txt").write_text(text)
    recipe = compose(
        [
            "experiment=adapt",
            f"start.path={checkpoint}",
            f"data.paths=[{folder / 'own.txt'}]",
            f"data.corpus={folder / 'corpus'}",
        ]
    )
    prepare.main(recipe, Invocation(corpora=folder))
    return Corpus.open(folder / "corpus")


def test_words_become_entries_with_the_mean_of_their_pieces(
    checkpoint: Path, corpus: Corpus, tmp_path: Path
) -> None:
    longer, count = extended_checkpoint(checkpoint, corpus, 2, tmp_path)
    assert count == 2
    before = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    after = Tokenizer.from_file(str(longer / "tokenizer.json"))
    added = [word for word in RARE if len(after.encode(f"the {word}").ids) == 2]
    assert len(added) == 2
    weights, old = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (longer, checkpoint)
    )
    rows, old_rows = (state["bert.embeddings.word_embeddings.weight"] for state in (weights, old))
    for word in added:
        pieces = before.encode(f"the {word}").ids[1:]
        torch.testing.assert_close(
            rows[after.encode(f"the {word}").ids[1]], old_rows[pieces].mean(0)
        )
    used = list(before.get_vocab().values())
    assert torch.equal(rows[used], old_rows[used])
    assert len(rows) == json.loads((longer / "config.json").read_text())["vocab_size"]
    assert weights.keys() == old.keys()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["WordPiece"], indirect=True)
def test_the_verb_adds_words_and_scores_tasks_before_and_after(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.txt").write_text("\n\n".join(sentences(COMMON + RARE, 300)))
    rows = [f"{RARE[n % 2]} is {COMMON[n % 5]},{RARE[n % 2]}" for n in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / "tasks.yaml").write_text(
        "which: {kind: classification, text: text, label: label, metric: accuracy,"
        " files: {train: rows.csv, dev: rows.csv}}\n"
    )
    words: list[Any] = ["adapt", "--from", checkpoint, "--name", "mine", "--device", "cpu"]
    words += ["--runs", tmp_path / "runs", "--corpora", tmp_path / "corpora", "--add-words", 2]
    words += ["--tasks", tmp_path / "tasks.yaml", f"data.paths=[{tmp_path / 'own.txt'}]"]
    words += [
        "precision=fp32",
        "train.sequence_length=32",
        "train.batch_size=8",
        "train.micro_batch=8",
    ]
    words += ["train.validation_tokens=1024", "budget.steps=4", "eval.seeds=[0]"]
    words += ["eval.hyperparameters.max_length=32", "eval.init=[pretrained]"]
    call = cli.parse([str(word) for word in words])
    assert call is not None
    verbs.run(call)
    assert "2 words get an entry of their own" in capfd.readouterr().out
    run = tmp_path / "runs" / "mine"
    page = (run / "adapt.md").read_text(encoding="utf-8")
    assert "2 words of the text were added" in page and "Task which, dev" in page
    (result,) = json.loads((run / "scores" / "scores.json").read_text())["results"]
    assert {str(checkpoint), str(run)} <= {each["competitor"] for each in result["comparisons"]}
    tokenizer = Tokenizer.from_file(str(run / "final" / "tokenizer.json"))
    assert len(tokenizer.encode(f"{RARE[0]} {RARE[1]} {RARE[2]}", add_special_tokens=False)) < 20


def test_other_text_is_read_as_before(checkpoint: Path, corpus: Corpus, tmp_path: Path) -> None:
    longer, count = extended_checkpoint(checkpoint, corpus, 2, tmp_path)
    assert count == 2
    before = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    after = Tokenizer.from_file(str(longer / "tokenizer.json"))
    vocabulary = after.get_vocab()
    assert all(vocabulary[token] == number for token, number in before.get_vocab().items())
    for text in [*sentences(COMMON, 20), "[CLS] the [MASK] of [SEP]"]:
        assert after.encode(text).ids == before.encode(text).ids
    for text in sentences(RARE, 5):
        assert after.decode(after.encode(text).ids) == before.decode(before.encode(text).ids)


def test_the_same_call_uses_what_is_there(checkpoint: Path, corpus: Corpus, tmp_path: Path) -> None:
    folders = [extended_checkpoint(checkpoint, corpus, count, tmp_path)[0] for count in (2, 2, 1)]
    assert folders[0] == folders[1] != folders[2]
    assert all((folder / "model.safetensors").is_file() for folder in folders)


def test_every_kind_that_can_be_extended_is_accepted(checkpoint: Path) -> None:
    refuse_tokenizer(checkpoint, 5)


def test_special_entries_behind_a_unigram_vocabulary_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], unk_id=0))
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"^--add-words: .*behind its vocabulary \[2\]"):
        refuse_tokenizer(tmp_path, 5)


def test_a_text_without_split_words_is_refused(
    write_bert: Callable[..., Path], tmp_path: Path
) -> None:
    bert = write_bert(tmp_path / "bert", words=50, max_position_embeddings=64, hidden_size=32)
    words = [f"w{number}" for number in range(50)]
    corpus = prepared(bert, "\n\n".join(sentences(words, 100)), tmp_path)
    with pytest.raises(UserError, match=r"^--add-words=5: "):
        extended_checkpoint(bert, corpus, 5, tmp_path)


@pytest.mark.parametrize(
    ("kind", "entries", "merges", "words"),
    [
        ("Unigram", ["▁ab", "cd", "e"], (), ["abcd", "abcde"]),  # one begins with the other
        ("Unigram", ["▁ab", "cd", "e"], (), ["abcde", "abcd"]),
        ("BPE", ["Ġ", "a", "b", "c", "d", "bc", "Ġa", "ab", "Ġab", "Ġabc"], MERGES, ["abcd"]),
    ],
)
def test_an_added_word_is_one_entry(
    kind: str, entries: list[str], merges: tuple[tuple[str, str], ...], words: list[str]
) -> None:
    if kind == "Unigram":
        pieces = [("<unk>", 0.0), *((entry, -3.0) for entry in entries)]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        vocabulary = {entry: number for number, entry in enumerate(entries)}
        tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    definition = json.loads(tokenizer.to_str())
    splits = [Word(word, tuple(tokenizer.encode(word).ids), 20) for word in words]
    assert all(len(word.pieces) > 1 for word in splits)
    EXTENSIONS[kind](definition, splits)
    longer = Tokenizer.from_str(json.dumps(definition))
    assert [len(longer.encode(word).ids) for word in words] == [1] * len(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("клетка", True), ("भारतीय", True), ("naïve", True), ("a1bc", False), ("abc", False)],
)
def test_words_of_every_script_are_words(text: str, expected: bool) -> None:
    assert is_word(text) == expected


def test_beginnings_are_those_of_the_decoded_text() -> None:
    byte_level = tokenizer_of("BPE")
    vocabulary = byte_level.get_vocab()
    begins_V = word_beginnings(byte_level, 1 + max(vocabulary.values()))
    inside = ["a", "Ð", "¿", "½", "Ģ"]  # "п" has the bytes Ð and ¿
    assert not any(begins_V[vocabulary[entry]] for entry in inside)
    assert all(begins_V[vocabulary[entry]] for entry in ("Ġ", "Ċ", ".", "[MASK]"))
    maltese = Tokenizer(models.WordPiece({"[UNK]": 0, "Ġ": 1, "word": 2, "##s": 3}))
    assert word_beginnings(maltese, 4).tolist() == [True, True, True, False]


def test_own_words_of_bytes_are_shown_as_text(
    write_bert: Callable[..., Path], tmp_path: Path
) -> None:
    text = "\n\n".join(sentences(["клетка", "ёжик", "фотосинтез"], 200))
    folder = write_bert(tmp_path / "bert", words=400, max_position_embeddings=64, hidden_size=32)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    corpus = prepared(folder, text, tmp_path)
    shown = set(own_words(corpus, tokenizer).values())
    assert shown == {"клетка", "ёжик", "фотосинтез"}

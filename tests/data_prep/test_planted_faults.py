"""Everything that is known to be wrong in a text is planted in one; each fault is found and reported with its count.

The clean documents are prose of invented words among real stop words, so that the published filters let them pass.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cramming.config import UserError, config_folder
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST
from data_prep.corpus_card import SETTINGS
from data_prep.task_grid import UNFINISHED
from tests.data_prep.calls import corpus_folder, main

Config = Callable[..., dict[str, Any]]
Contents = Callable[[Path], dict[str, bytes]]
DOCUMENTS, EXACT, NEAR, SENTENCES, MARKUP, GIBBERISH = 400, 20, 20, 200, 7, 12
SYLLABLES = "ka lo mi ren tas vu del or sin pel ga tho bra ek un fi dor mel".split()
GERMAN = (
    "Der alte Hafen wurde im elften Jahrhundert gebaut, als Kaufleute aus dem Süden begannen, dort zu überwintern. "
    "Nach dem großen Brand ersetzte eine steinerne Mauer die hölzerne, und zweihundert Jahre lang ging das Salz der "
    "ganzen Küste über sie. Heute liegen dort nur noch Fischerboote, und im Sommer kommen die Besucher in die engen "
    "Gassen, in denen früher Seile gedreht wurden."
)


class Prose:
    """English-looking text of invented words; nothing in it repeats by itself."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lexicon = [
            "".join(self.rng.choices(SYLLABLES, k=self.rng.randint(1, 3))) for _ in range(4000)
        ]

    def sentence(self, words: int) -> str:
        small = ("the", "of", "and", "to", "with", "that")
        chosen = [
            self.rng.choice(small) if i % 3 == 0 else self.rng.choice(self.lexicon)
            for i in range(words)
        ]
        return " ".join(chosen).capitalize() + "."

    def document(self, sentences: int = 9) -> str:
        return " ".join(self.sentence(self.rng.randint(14, 24)) for _ in range(sentences))

    def edited(self, text: str, share: float) -> str:
        words = text.split(" ")
        for place in self.rng.sample(range(len(words)), int(share * len(words))):
            words[place] = self.rng.choice(self.lexicon)
        return " ".join(words)


def write_tasks(folder: Path, sentences: list[str]) -> None:
    """Half of them CoLA's, half RTE's, in the official layouts."""
    half = len(sentences) // 2
    (folder / "CoLA").mkdir(parents=True)
    (folder / "RTE").mkdir()
    (folder / "CoLA" / "dev.tsv").write_text(
        "\n".join(f"gj04\t1\t\t{text}" for text in sentences[:half]) + "\n"
    )
    rows = [f"{i}\t{text}\tIt is so.\tentailment" for i, text in enumerate(sentences[half:])]
    (folder / "RTE" / "dev.tsv").write_text(
        "\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n"
    )


def plant(tmp_path: Path, line_sentences: int) -> tuple[Path, Path]:
    """A folder of text files with every fault, and one of tasks."""
    prose, text = Prose(0), tmp_path / "text"
    text.mkdir()
    clean = [prose.document() for _ in range(DOCUMENTS)]
    sentences = [prose.sentence(10 if i % 2 else 20) for i in range(SENTENCES)]
    write_tasks(tmp_path / "glue", sentences)
    holding = [f"{prose.document(5)} {sentence} {prose.document(4)}" for sentence in sentences]
    near = [prose.edited(document, 0.05) for document in clean[EXACT : EXACT + NEAR]]
    page = (
        "<div class='c{i}'><p><a href=\"http://example.org/{i}\">{word}</a></p>"
        "<br/><span id='{i}'>{word}</span></div>"
    )
    markup = [
        "\n".join(page.format(i=i + 100 * k, word=prose.sentence(6)) for i in range(20))
        for k in range(MARKUP)
    ]
    consonants = Prose(1)
    consonants.lexicon = [
        "".join(consonants.rng.choices("bcdfghjklmnpqrstvwxz", k=6)) for _ in range(9000)
    ]
    gibberish = [consonants.document() for _ in range(GIBBERISH)]
    documents = gibberish + clean + clean[:EXACT] + near + holding + markup + [GERMAN]
    prose.rng.shuffle(documents)
    (text / "0.jsonl").write_text(
        "\n".join(json.dumps({"text": document}) for document in documents)
    )
    (text / "1-binary.txt").write_bytes(np.random.default_rng(0).bytes(300_000))
    (text / "2-empty.txt").write_bytes(b"")
    (text / "3-also-empty.txt").write_bytes(b"\n\n")
    latin = [prose.document().replace("a", "é", 3).encode("latin1") for _ in range(2)]
    (text / "4-latin1.txt").write_bytes(
        b"\n\n".join([prose.document().encode(), *latin, prose.document().encode()])
    )
    # One line without end; a sentence is written often so that the test is quick, in an order that never repeats.
    stock = [prose.sentence(16) for _ in range(3000)]
    (text / "5-long-line.txt").write_text(" ".join(prose.rng.choices(stock, k=line_sentences)))
    return text, tmp_path / "glue"


def strict(changes: dict[str, Any]) -> dict[str, Any]:
    """The values of data/filters=strict, as Hydra would compose them."""
    values: dict[str, Any] = {}
    for name in ("gopher", "strict"):
        node = yaml.safe_load((config_folder() / "data" / "filters" / f"{name}.yaml").read_text())
        values |= {key: value for key, value in node.items() if key != "defaults"}
    return values | changes


def everything(text: Path, tasks: Path, text_config: Config, **data: Any) -> dict[str, Any]:
    """Settings with every stage at work."""
    return text_config(
        *sorted(text.iterdir()),
        damaged="drop",
        list_dropped=True,
        filters=strict({"max_tokens_per_character": 0.5}),  # the vocabulary of this test is small
        near_duplicates={"enabled": True},
        decontaminate={"tasks": str(tasks)},
        tokenizer={"vocab_size": 1000},
        **data,
    )


@pytest.mark.parametrize(
    ("line_sentences", "clean"),
    [
        (300, {"max_characters": 20_000}),
        pytest.param(100_000, {}, marks=pytest.mark.slow),
    ],  # the latter: 10 MB
)
def test_every_planted_fault_is_found_and_reported(
    tmp_path: Path, text_config: Config, line_sentences: int, clean: dict[str, int]
) -> None:
    config = everything(*plant(tmp_path, line_sentences), text_config, clean=clean)
    main(config)
    corpus = Corpus.open(corpus_folder(config), verify=True)
    stages = {stage.name: stage for stage in corpus.manifest.stages}
    found = {
        name: {why: bin_.documents for why, bin_ in stage.dropped.items()}
        for name, stage in stages.items()
    }
    for name, reasons in found.items():
        assert set(reasons) <= set(SETTINGS.get(name, {}))
    assert found["source"] == {"binary_file": 1, "empty_file": 2, "not_utf8": 2}
    assert found["exact deduplication"] == {"duplicate": EXACT}
    assert found["near deduplication"] == {"near_duplicate": NEAR}
    assert found["decontamination"] == {"contaminated": SENTENCES}
    assert corpus.manifest.decontamination["removed"] == {
        "CoLA": SENTENCES // 2,
        "RTE": SENTENCES // 2,
    }
    assert all(
        re.search(r": \d+ words of (CoLA|RTE): ", e)
        for e in stages["decontamination"].dropped["contaminated"].examples
    )
    assert all(
        ", limit 0.05 (max_markup): " in e and "<div" in e
        for e in stages["filters"].dropped["markup"].examples
    )
    assert all(
        re.search(r": 0\.\d+, limit 0.5 \(", e)
        for e in stages["tokens"].dropped["too_many_tokens"].examples
    )
    assert all(
        " like " in e and "0.jsonl:" in e
        for e in stages["near deduplication"].dropped["near_duplicate"].examples
    )
    assert found["filters"]["markup"] == MARKUP and found["filters"]["no_stop_words"] == 1
    assert found["tokens"] == {"too_many_tokens": GIBBERISH}
    assert stages["normalise"].notes["long_documents_cut"] == 1
    kept = DOCUMENTS + 2
    assert kept <= corpus.manifest.counts["documents"] <= kept + 3  # and the parts of the long line
    for before, after in zip(corpus.manifest.stages, corpus.manifest.stages[1:]):
        assert (before.documents_out, before.bytes_out) == (after.documents_in, after.bytes_in), (
            after.name
        )
    for stage in stages.values():
        if stage.name != "normalise":
            assert stage.documents_in - stage.documents_out == sum(found[stage.name].values()), (
                stage.name
            )
            assert stage.bytes_in - stage.bytes_out == sum(
                bin_.bytes for bin_ in stage.dropped.values()
            ), stage.name
    card = (corpus.folder / "corpus_card.md").read_text(encoding="utf-8")
    assert "| CoLA | 100 | 100 | 100 | 100 | 0 |" in card and "7 markup" in card
    assert "Der alte Hafen" in card


# --- killed in the middle of it ---------------------------------------------------------------------------------------


def start(config: dict[str, Any], kill_at: int = 0) -> subprocess.Popen[bytes]:
    """Prepare in a process that is killed at its write number `kill_at`, or in one of whose workers that happens."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script, count = (
        Path(__file__).with_name("killed_at_write.py"),
        f"{config['data']['corpus']}-writes",
    )
    command = [sys.executable, str(script), json.dumps(config), str(kill_at), count]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory, text_config_in: Config, contents: Contents
) -> tuple[Callable[..., dict[str, Any]], dict[str, bytes], int]:
    """Settings of a corpus of many shards from the faulty text, what an unbroken run makes of them, and its writes."""
    place = tmp_path_factory.mktemp("planted")
    text, tasks = plant(place, 300)

    def settings(name: str, workers: int = 2) -> dict[str, Any]:
        changes = {
            "clean": {"max_characters": 20_000},
            "corpus": str(place / name),
            "shard_tokens": 10_000,
        }
        return everything(text, tasks, partial(text_config_in, place), workers=workers, **changes)

    assert start(settings("whole", workers=1)).wait() == 0
    writes = int((place / "whole-writes").read_text())
    return settings, contents(place / "whole"), writes


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_many_writes_the_corpus_is_byte_for_byte_that_of_an_unbroken_run(
    unbroken: Any, contents: Contents, workers: int
) -> None:
    settings, expected, writes = unbroken
    config = settings(f"broken-{workers}", workers)
    folder, rng = Path(config["data"]["corpus"]), random.Random(workers)
    for kill_at in (1, 5, rng.randrange(writes // 4), rng.randrange(writes // 2)):
        assert start(config, kill_at).wait() in (-signal.SIGKILL, 0)
        if (folder / UNFINISHED).is_file() and not (folder / MANIFEST).is_file():
            (folder / "train-00099.bin.part").write_bytes(b"left over")
            with pytest.raises(UserError, match="half-written"):
                Corpus.open(folder)
    assert start(config).wait() == 0
    assert contents(folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_killed_at_any_write(unbroken: Any, contents: Contents, workers: int) -> None:
    """Two hundred kills together; each run is killed until one comes through."""
    settings, expected, writes = unbroken
    rng, config = random.Random(workers), settings(f"any-{workers}", workers)
    folder, killed = Path(config["data"]["corpus"]), 0
    while killed < 67:
        code = start(config, rng.randint(1, writes // workers)).wait()
        assert code in (-signal.SIGKILL, 0)
        killed += code != 0
        if code == 0:
            assert contents(folder) == expected
            shutil.rmtree(folder)
    assert start(config).wait() == 0
    assert contents(folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_killed_at_random_moments(unbroken: Any, contents: Contents, workers: int) -> None:
    settings, expected, _ = unbroken
    rng, config = random.Random(workers), settings(f"random-{workers}", workers)
    started = time.monotonic()
    assert start(settings(f"timed-{workers}", workers)).wait() == 0
    seconds, killed = time.monotonic() - started, 0
    while killed < 20:
        child = start(config)
        time.sleep(rng.uniform(0.2, 1.0) * seconds)
        child.kill()
        killed += child.wait() == -signal.SIGKILL
        if (Path(config["data"]["corpus"]) / "manifest.json").is_file():
            assert start(config).wait() == 0  # clears what the kill may have left
            assert contents(Path(config["data"]["corpus"])) == expected
            shutil.rmtree(config["data"]["corpus"])
    assert start(config).wait() == 0
    assert contents(Path(config["data"]["corpus"])) == expected

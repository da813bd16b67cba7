"""`prepare` end to end: what goes in comes out, once, on the right side, the same however it is computed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cramming.config import UserError
from cramming.data.shards import MANIFEST, Corpus, corpus_folder
from data_prep import hub, pack, prepare, tokenizer
from data_prep.prepare import UNFINISHED, main
from data_prep.sources import Document

Config = Callable[..., dict[str, Any]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run(config: dict[str, Any]) -> Corpus:
    main(config)
    return Corpus.open(corpus_folder(config), verify=True)


def test_every_document_comes_out_once(
    tmp_path: Path, text_config: Config, made_up: Callable[..., list[str]], decode: Callable[[Corpus], list[str]]
) -> None:
    texts = made_up(120)
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:60]), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[60:] + texts[:5]))
    corpus = run(text_config(tmp_path / "a.txt", tmp_path / "b.jsonl", shard_tokens=1000))
    manifest = corpus.manifest
    assert manifest.removed == {"duplicate": 5}
    assert (manifest.counts["documents_read"], manifest.counts["documents"]) == (125, 120)
    assert sorted(decode(corpus)) == sorted(text.lower() for text in texts)
    assert [Path(source["name"]).name for source in manifest.sources] == ["a.txt", "b.jsonl"]
    assert 1 <= corpus.stream("validation").num_documents < 20


def test_result_does_not_depend_on_threads_or_batches(
    tmp_path: Path, text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for workers, batch in ((1, 1 << 20), (3, 1 << 20), (4, 100)):
        monkeypatch.setattr(pack, "BATCH_CHARACTERS", batch)
        folder = tmp_path / f"{workers}-{batch}"
        run(text_config(text_file, workers=workers, corpus=str(folder), shard_tokens=3000))
        results.append(contents(folder))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 6


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_long_documents_are_tokenized_as_if_in_one_piece(
    tmp_path: Path, kind: str, made_up: Callable[..., list[str]], text_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PIECE_CHARACTERS", 100)
    texts = ["\n".join(made_up(200, seed)) for seed in range(4)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    # One shard is far shorter than a document: the document lies across many.
    corpus = run(text_config(tmp_path / "a.txt", shard_tokens=500, tokenizer={"kind": kind, "vocab_size": 400}))
    assert len(corpus.manifest.splits["train"]) > 10
    model = Tokenizer.from_file(str(corpus.tokenizer_file))
    expected = {tuple(model.encode(text).ids) for text in texts}
    found = set()
    for split in ("train", "validation"):
        stream = corpus.stream(split)  # type: ignore[arg-type]
        bounds = [*stream.document_starts.tolist(), stream.num_tokens]
        found |= {tuple(stream.gather(np.array([a]), b - a)[0].tolist()) for a, b in pairwise(bounds)}
    assert found == expected


def test_second_prepare_changes_nothing(
    text_file: Path, text_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config = text_config(text_file)
    folder = run(config).folder
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    capsys.readouterr()
    os.utime(text_file)  # touched, but the same content
    main(config)
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before


def test_validation_documents_do_not_depend_on_the_order_of_files(
    tmp_path: Path, text_config: Config, made_up: Callable[..., list[str]], decode: Callable[[Corpus], list[str]]
) -> None:
    texts = made_up(100)
    for name, part in (("a", texts[:50]), ("b", texts[50:])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    held_out = []
    for order in (("a", "b"), ("b", "a")):
        corpus = run(text_config(*(tmp_path / f"{name}.txt" for name in order), documents="line"))
        documents = decode(corpus)
        held_out.append(set(documents[corpus.stream("train").num_documents :]))
    assert held_out[0] == held_out[1] and held_out[0]


def test_sources_that_changed_since_are_refused(text_file: Path, text_config: Config) -> None:
    config = text_config(text_file)
    folder = run(config).folder
    before = contents(folder)
    text_file.write_text(text_file.read_text() + "\n\nOne more document, at the end.\n")
    with pytest.raises(UserError, match=r"sources have changed since .*text\.txt"):
        main(config)
    assert contents(folder) == before


def test_a_named_folder_with_other_settings_is_refused(tmp_path: Path, text_file: Path, text_config: Config) -> None:
    run(text_config(text_file, corpus=str(tmp_path / "mine")))
    with pytest.raises(UserError, match=r"other settings \(tokenizer\.vocab_size\)"):
        main(text_config(text_file, corpus=str(tmp_path / "mine"), tokenizer={"vocab_size": 290}))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.doc").write_text("precious")
    with pytest.raises(UserError, match=r"not a corpus, and not empty \(letter.doc\)"):
        main(text_config(text_file, corpus=str(tmp_path / "home")))
    assert contents(tmp_path / "home") == {"letter.doc": b"precious"}


def test_existing_tokenizer_is_used_and_watched(tmp_path: Path, text_file: Path, text_config: Config) -> None:
    first = run(text_config(text_file))
    path = tmp_path / "own.json"
    path.write_bytes(first.tokenizer_file.read_bytes())
    config = text_config(text_file, tokenizer={"path": str(path)})
    second = run(config)
    assert second.folder != first.folder and second.manifest.tokenizer == first.manifest.tokenizer
    assert second.manifest.splits == first.manifest.splits
    main(config)
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match=r"have changed since .*own\.json"):
        main(config)


def test_tokenizer_of_another_language_is_refused(tmp_path: Path, text_file: Path, text_config: Config) -> None:
    own = run(text_config(text_file)).tokenizer_file
    (tmp_path / "greek.txt").write_text("\n\n".join(f"Ένα δύο τρία τέσσερα πέντε αριθμός {i}." for i in range(50)))
    config = text_config(tmp_path / "greek.txt", tokenizer={"path": str(own)})
    with pytest.raises(UserError, match=r"does not fit this text: .* unknown"):
        main(config)
    assert not corpus_folder(config).exists()


FAILURES: dict[str, tuple[bytes, str]] = {
    "one document": (b"One single document that is long enough to train on. " * 50, "at least 2 are needed"),
    "all filtered": (
        b"12345 67890 12345 67890 12345\n\n" * 100,
        r"0 of 100 documents remain \(removed: 100 no_l",
    ),
    "too little": (b"A few words and\n\nnot much more than that.", "too little text to train"),
    "bad bytes at the end": (b"Some text that goes on and on.\n\n" * 100 + b"\xff", "not UTF-8 at byte 3200"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_mistake_leaves_nothing_behind(tmp_path: Path, text_config: Config, name: str) -> None:
    data, message = FAILURES[name]
    (tmp_path / "a.txt").write_bytes(data)
    config = text_config(tmp_path / "a.txt", deduplicate=False)
    with pytest.raises(UserError, match=message):
        main(config)
    assert not corpus_folder(config).exists()


def test_unknown_source_and_bad_values_name_the_setting(text_file: Path, text_config: Config) -> None:
    for data, message in (
        ({"source": "web"}, "data.source='web': choose one of embedded, text, hub, mix"),
        ({"validation_fraction": 1.5}, "validation_fraction=1.5"),
        ({"documents": "page"}, "data.documents='page': choose one of block, line, file, record"),
        ({"colour": 1}, "data.colour: unknown setting"),
    ):
        with pytest.raises(UserError, match=message):
            main(text_config(text_file, **data))


def test_embedded_corpus_brings_its_tasks(
    tmp_path: Path, made_up: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from data_prep import embedded

    def documents(seed: int, size: int) -> Iterator[Document]:
        return (Document(text, str(i), "embedded") for i, text in enumerate(made_up(size, seed)))

    def write_tasks(folder: Path, seed: int) -> None:
        (folder / "CoLA").mkdir()
        (folder / "CoLA" / "train.tsv").write_text(f"{seed}")

    monkeypatch.setattr(embedded, "documents", documents, raising=False)
    monkeypatch.setattr(embedded, "write_tasks", write_tasks, raising=False)
    data = {"name": "e", "source": "embedded", "size": 50, "seed": 7}
    config = {"corpora": str(tmp_path), "data": data, "tokenizer": {"kind": "wordpiece", "vocab_size": 300}}
    folder = run(config).folder
    assert (folder / "tasks" / "CoLA" / "train.tsv").read_text() == "7"
    main(config)
    monkeypatch.setattr(embedded, "write_tasks", lambda folder, seed: (_ for _ in ()).throw(RuntimeError("half")))
    other = {**config, "data": {**data, "seed": 8}}
    with pytest.raises(RuntimeError, match="half"):
        main(other)
    assert not (corpus_folder(other) / "tasks").exists() and not (corpus_folder(other) / MANIFEST).exists()


# --- interruption -----------------------------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
from pathlib import Path
from data_prep import pack, prepare, tokenizer
config, stop = json.loads(sys.argv[1]), sys.argv[2]
pack.BATCH_CHARACTERS = 500
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if stop == "tokenizer":
    tokenizer.train = die
elif stop == "manifest":
    prepare.summary.complete = die
else:
    save = prepare.Unfinished.save
    def counted(self, folder):
        save(self, folder)
        if sum(map(len, self.shards.values())) >= int(stop):
            die()
    prepare.Unfinished.save = counted
prepare.main(config)
"""


@pytest.mark.parametrize("stop", ["tokenizer", "0", "1", "4", "manifest"])
def test_resumed_after_kill_9_equals_unbroken(
    tmp_path: Path, text_file: Path, text_config: Config, stop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = (text_config(text_file, corpus=str(tmp_path / n), shard_tokens=3000) for n in ("whole", "broken"))
    assert run(whole).manifest.counts["unknown_tokens"] > 50
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, json.dumps(broken), stop]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    (tmp_path / "broken" / "train-00099.bin.part").write_bytes(b"left over")
    with pytest.raises(UserError, match="half-written"):
        Corpus.open(tmp_path / "broken")
    capsys.readouterr()
    run(broken)
    assert "going on with an interrupted run" in capsys.readouterr().out
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_resuming_does_not_tokenize_finished_shards_again(
    tmp_path: Path, text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), shard_tokens=3000)
    encoded: list[int] = []
    encode = pack.Encoder.__call__
    monkeypatch.setattr(
        pack.Encoder, "__call__", lambda self, pieces: (encoded.append(len(pieces)), encode(self, pieces))[1]
    )
    monkeypatch.setattr(pack, "BATCH_CHARACTERS", 500)
    save = prepare.Unfinished.save

    def interrupt(self: prepare.Unfinished, folder: Path) -> None:
        save(self, folder)
        if len(self.shards["train"]) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare.Unfinished, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(config)
    assert (tmp_path / "c" / UNFINISHED).is_file()
    monkeypatch.setattr(prepare.Unfinished, "save", save)
    shards = json.loads((tmp_path / "c" / UNFINISHED).read_text())["shards"]
    finished = sum(shard["documents"] for part in shards.values() for shard in part)
    encoded.clear()
    run(config)
    assert finished > 50 and sum(encoded) <= 300 - finished + 2


def test_interrupted_run_of_changed_sources_starts_over(
    tmp_path: Path, text_file: Path, text_config: Config, made_up: Callable[..., list[str]]
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "broken"), shard_tokens=3000)
    command = [sys.executable, "-c", KILLED, json.dumps(config), "2"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    text_file.write_text("\n\n".join(made_up(200, seed=5)))
    run(config)
    fresh = text_config(text_file, corpus=str(tmp_path / "fresh"), shard_tokens=3000)
    run(fresh)
    assert contents(tmp_path / "broken") == contents(tmp_path / "fresh")


def test_two_at_once_are_refused(tmp_path: Path, text_file: Path, text_config: Config) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"))
    with prepare.lock(tmp_path / "c"), pytest.raises(UserError, match="another `cramming prepare` is writing"):
        main(config)
    run(config)


# --- the hub, on a local data set -------------------------------------------------------------------------------------


@pytest.fixture
def hub_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def make(dataset: Path | str, **data: Any) -> dict[str, Any]:
        section = {"name": "h", "source": "hub", "dataset": str(dataset), "validation_fraction": 0.05, **data}
        kind = {"kind": "wordpiece", "vocab_size": 300}
        return {"corpora": str(tmp_path / "corpora"), "data": section, "tokenizer": kind}

    yield make


def test_hub_data_set_equals_the_same_text_from_files(
    tmp_path: Path, hub_config: Config, text_config: Config, made_up: Callable[..., list[str]]
) -> None:
    texts = made_up(100)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    streamed = run(hub_config(tmp_path / "set", text_field="body", max_documents=80))
    text = run(text_config(tmp_path / "set" / "train.jsonl", text_field="body", max_documents=80))
    assert streamed.manifest.splits == text.manifest.splits
    assert streamed.manifest.counts["documents_read"] == 80
    unlimited = run(hub_config(tmp_path / "set", text_field="body"))
    assert unlimited.manifest.counts["documents_read"] == 100
    with pytest.raises(UserError, match="no field 'text'; there are: body"):
        main(hub_config(tmp_path / "set"))


def test_tokenizer_sample_does_not_read_a_whole_hub_data_set(
    tmp_path: Path, hub_config: Config, made_up: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in made_up(300)))
    read: list[float] = []
    train = tokenizer.train

    def spy(*arguments: Any) -> Any:
        read.append(source.position)
        return train(*arguments)

    monkeypatch.setattr(tokenizer, "train", spy)
    config = hub_config(tmp_path / "set")
    config["tokenizer"]["sample_mb"] = 0.02
    job = prepare.parse(config)
    source = job.source
    with prepare.lock(job.folder):
        prepare.prepare(job)
    assert 20 < read[0] < 100
    assert Corpus.open(job.folder).manifest.counts["documents_read"] == 300


def test_a_full_disk_is_said_and_the_run_goes_on_later(
    text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = text_config(text_file, shard_tokens=3000)
    with monkeypatch.context() as patch:
        patch.setattr(pack.ShardWriter, "_write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(UserError, match="disk is full"):
            main(config)
    run(config)


def test_tokenized_data_set_keeps_its_ids_and_tokenizer(
    tmp_path: Path, hub_config: Config, text_file: Path, text_config: Config
) -> None:
    own = run(text_config(text_file))
    model = Tokenizer.from_file(str(own.tokenizer_file))
    rows = [[5 + i % 90, 6, 7, 3, 8 + i // 90, *([3] if i % 2 else [])] for i in range(150)]
    folder = tmp_path / "set"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    model.save(str(folder / "tokenizer" / "tokenizer.json"))
    fields = {"ids_field": "input_ids", "tokenizer_file": "tokenizer/tokenizer.json"}
    corpus = run(hub_config(folder, **fields))
    found = set()
    for split in ("train", "validation"):
        stream = corpus.stream(split)  # type: ignore[arg-type]
        bounds = [*stream.document_starts.tolist(), stream.num_tokens]
        found |= {tuple(stream.gather(np.array([a]), b - a)[0].tolist()) for a, b in pairwise(bounds)}
    assert found == {(2, *row[:5], 3) for row in rows}
    (folder / "train.jsonl").write_text(json.dumps({"input_ids": [5, 100_000]}))
    with pytest.raises(UserError, match="holds token 100000, the tokenizer has 300 entries"):
        main(hub_config(folder, **fields, seed=1))
    with pytest.raises(UserError, match="belong together"):
        main(hub_config(folder, ids_field="input_ids"))
    with pytest.raises(UserError, match="data: dataset is not set"):
        main(hub_config(""))


def test_no_network_is_said_at_once(hub_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hub_config("owner/name")
    for variable in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"owner/name: the Hugging Face hub cannot be reached .*data=text"):
        main(config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        main(config)
    assert time.monotonic() - started < 5
    assert not corpus_folder(config).exists()


def test_lost_connection_keeps_what_was_done(
    tmp_path: Path, hub_config: Config, made_up: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in made_up(200)))
    config = hub_config(tmp_path / "set", shard_tokens=2000, max_documents=200)
    opened = hub.HubSource._open
    passes: list[int] = []

    def breaking(self: hub.HubSource) -> Any:
        passes.append(1)

        def rows() -> Iterator[Any]:
            for index, row in enumerate(opened(self)):
                if len(passes) == 2 and index == 150:
                    raise ConnectionError("reset by peer")
                yield row

        return rows()

    monkeypatch.setattr(hub.HubSource, "_open", breaking)
    with pytest.raises(UserError, match=r"broke off after 150 documents .*run the same command again"):
        main(config)
    broken = corpus_folder(config)
    assert (broken / UNFINISHED).is_file() and not (broken / MANIFEST).exists()
    run(config)
    monkeypatch.setattr(hub.HubSource, "_open", opened)
    whole = {**config, "corpora": str(tmp_path / "whole")}
    run(whole)
    assert contents(broken) == contents(corpus_folder(whole))

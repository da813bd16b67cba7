"""Data sets of the hub, on local ones: the same as files, streamed, and what is said when the network is gone."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST
from cramming.record_schema import read_record
from data_prep import prepare
from data_prep.readers import hub
from data_prep.task_grid import UNFINISHED
from data_prep.tokenizer import train as vocabulary
from eval.rules.closed_division import tokenizer_origin
from tests.data_prep.calls import corpus_folder, main, parse

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Corpus]
Contents = Callable[[Path], dict[str, bytes]]


def write_set(folder: Path, texts: Iterable[Any], column: str = "text") -> Path:
    """A local data set of one file of JSON lines."""
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(json.dumps({column: text}) for text in texts))
    return folder


@pytest.fixture
def hub_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def make(dataset: Path | str, **data: Any) -> dict[str, Any]:
        section = {
            "name": "h",
            "source": "hub",
            "dataset": str(dataset),
            "validation_fraction": 0.05,
            **data,
        }
        kind = {"kind": "wordpiece", "vocab_size": 300}
        return {"corpora": str(tmp_path / "corpora"), "data": section, "tokenizer": kind}

    yield make


def test_hub_data_set_equals_the_same_text_from_files(
    tmp_path: Path,
    hub_config: Config,
    text_config: Config,
    made_up: Callable[..., list[str]],
    run: Run,
) -> None:
    write_set(tmp_path / "set", made_up(100), "body")
    streamed = run(hub_config(tmp_path / "set", text_field="body", max_documents=80))
    text = run(text_config(tmp_path / "set" / "train.jsonl", text_field="body", max_documents=80))
    assert streamed.manifest.splits == text.manifest.splits
    assert streamed.manifest.counts["documents_read"] == 80
    unlimited = run(hub_config(tmp_path / "set", text_field="body"))
    assert unlimited.manifest.counts["documents_read"] == 100
    with pytest.raises(UserError, match=r"no text in field 'text' .*fields body"):
        main(hub_config(tmp_path / "set"))


def test_fields_inside_objects_and_nulls_of_a_data_set(
    tmp_path: Path, hub_config: Config, made_up: Callable[..., list[str]], run: Run
) -> None:
    rows = [{"text": text, "n": 1} for text in made_up(60)] + [{"text": None, "n": 2}] * 3
    write_set(tmp_path / "set", rows, "m")
    corpus = run(hub_config(tmp_path / "set", text_field=["m.text"]))
    assert corpus.manifest.removed == {"null": 3}
    with pytest.raises(UserError, match=r"no text in field 'text' .*fields m\.text, m\.n"):
        main(hub_config(tmp_path / "set"))


def test_tokenizer_sample_does_not_read_a_whole_hub_data_set(
    tmp_path: Path,
    hub_config: Config,
    made_up: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_set(tmp_path / "set", made_up(300))
    read: list[float] = []
    train = vocabulary.train

    def spy(*arguments: Any) -> Any:
        read.append(source.position)
        return train(*arguments)

    monkeypatch.setattr(vocabulary, "train", spy)
    config = hub_config(tmp_path / "set")
    config["tokenizer"]["sample_mb"] = 0.02
    job = parse(config)
    source = job.source
    monkeypatch.setattr(prepare, "parse", lambda recipe, corpora: job)
    main(config)
    assert 20 < read[0] < 100
    assert Corpus.open(job.folder).manifest.counts["documents_read"] == 300


def test_tokenized_data_set_keeps_its_ids_and_tokenizer(
    tmp_path: Path, hub_config: Config, text_file: Path, text_config: Config, run: Run, capsys: Any
) -> None:
    own = run(text_config(text_file))
    model = Tokenizer.from_file(str(own.tokenizer_file))
    rows = [
        [5 + i % 90, 6, 7, 3, 8 + i // 90, *([3] if i % 2 else []), *[0] * (i % 4)]
        for i in range(150)
    ]
    empty, again = [[], [2, 3], [2, 3, 0, 0], [0]], [[2, *rows[0]], [*rows[0], 3, 0]]
    folder = write_set(tmp_path / "set", [*rows, *empty, *again], "input_ids")
    (folder / "tokenizer").mkdir()
    model.save(str(folder / "tokenizer" / "tokenizer.json"))
    fields = {"ids_field": "input_ids", "tokenizer_file": "tokenizer/tokenizer.json"}
    corpus = run(hub_config(folder, **fields))
    streams = corpus.stream("train"), corpus.stream("validation")
    found = {tuple(stream.document(n)) for stream in streams for n in range(stream.num_documents)}
    assert found == {(2, *row[:5], 3) for row in rows}
    assert corpus.manifest.removed == {"duplicate": len(again), "too_short": len(empty)}
    assert (
        corpus.manifest.counts["documents"]
        == sum(stream.num_documents for stream in streams)
        == len(rows)
    )
    said = capsys.readouterr().out
    assert (
        "no order files for sentence_length, compressibility: ready-made ids have no text to measure"
        in said
    )
    with pytest.raises(UserError, match=r"only: shuffled, source"):
        corpus.stream("train", "sentence_length")
    with pytest.raises(UserError, match=r"Prepare it with data\.orders=\[token_prevalence\]"):
        corpus.stream("train", "token_prevalence_reversed")
    page = (corpus.folder / "corpus_card.md").read_text()
    assert (
        page.count("not known (ready-made ids)") == 5
        and "None, None" not in page
        and "| 0 bytes" not in page
    )
    entry = corpus.manifest.sources[-1]
    assert (entry["kind"], entry["name"]) == ("tokenizer", f"{folder}/tokenizer/tokenizer.json")
    corpus_of_record = {"tokenizer": {"kind": "wordpiece", "sha256": "0"}, "sources": [entry]}
    evidence = tokenizer_origin(read_record({"corpus": corpus_of_record}))[1]
    assert evidence == f"wordpiece, ready-made: {entry['name']}"
    main(hub_config(folder, **fields))  # a no-op: the inventory compares equal
    (folder / "train.jsonl").write_text(json.dumps({"input_ids": [5, 100_000]}))
    with pytest.raises(UserError, match="holds token 100000, the tokenizer has 300 entries"):
        main(hub_config(folder, **fields, seed=1))
    (folder / "train.jsonl").write_text(json.dumps({"input_ids": [5, 6, -100]}))
    with pytest.raises(UserError, match=r"holds -100, .* labels"):
        main(hub_config(folder, **fields, seed=1))
    with pytest.raises(UserError, match=r"^data\.(ids_field|tokenizer_file)="):
        main(hub_config(folder, ids_field="input_ids"))
    with pytest.raises(UserError, match=r"data\.dataset=null: "):
        main(hub_config(""))


@pytest.mark.parametrize(
    "setting",
    [
        {"decontaminate": {"tasks": "glue"}},
        {"near_duplicates": {"enabled": True}},
        {"filters": {"min_words": 5}},
    ],
)
def test_no_corpus_of_ids_claims_a_search(hub_config: Config, setting: dict[str, Any]) -> None:
    with pytest.raises(
        UserError,
        match=r"ids are neither searched nor filtered; set data\.decontaminate\.tasks=null",
    ):
        main(
            hub_config(
                "owner/name", ids_field="input_ids", tokenizer_file="tokenizer.json", **setting
            )
        )


class Hub:
    """A hub with one data set: local folders by commit, of which `head` is the newest. One stream of it may break."""

    def __init__(self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders, self.head, self.reached = folders, next(iter(folders)), True
        self.opened, self.breaks_in, self.breaks_after = 0, 0, 150
        load = datasets.load_dataset

        def info(_: Any, name: str, revision: str | None = None) -> Any:
            return SimpleNamespace(sha=revision if revision in folders else self.head)

        def stream(name: str, subset: Any, *, split: str, revision: str, streaming: bool) -> Any:
            rows = load(str(folders[revision]), split=split, streaming=streaming)
            self.opened += 1
            return rows if self.opened != self.breaks_in else broken(rows)

        def broken(rows: Any) -> Iterator[Any]:
            yield from islice(rows, self.breaks_after)
            raise ConnectionError("reset by peer")

        def download(name: str, file: str, *, repo_type: str, revision: str) -> str:
            return str(folders[revision] / file)

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(datasets, "load_dataset", stream)
        monkeypatch.setattr(hub, "why_unreachable", lambda: None if self.reached else "no route")


@pytest.fixture
def a_hub(
    tmp_path: Path, made_up: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> Hub:
    folders = {letter * 40: tmp_path / letter for letter in "ab"}
    for number, folder in enumerate(folders.values()):
        write_set(folder, made_up(200, seed=number))
    return Hub(folders, monkeypatch)


def test_a_corpus_is_made_from_one_commit(
    tmp_path: Path, hub_config: Config, a_hub: Hub, run: Run, contents: Contents
) -> None:
    """That which was the newest at the beginning, also when an interrupted run goes on after another came."""
    first, second = a_hub.folders
    config = hub_config("owner/name", shard_tokens=2000, max_documents=200)
    folders = []
    for name, commit in (("first", first), ("second", second)):
        a_hub.head = commit
        whole = {**config, "corpora": str(tmp_path / name)}
        assert run(whole).manifest.sources[0]["revision"] == commit
        folders.append(contents(corpus_folder(whole)))
    assert folders[0] != folders[1]

    a_hub.head, a_hub.breaks_in = first, a_hub.opened + 2  # the tokenizer is trained by then
    with pytest.raises(
        UserError, match=r"failed after 150 documents: .*run the same command again"
    ):
        main(config)
    assert (corpus_folder(config) / UNFINISHED).is_file() and not (
        corpus_folder(config) / MANIFEST
    ).exists()
    a_hub.head = second
    assert run(config).manifest.sources[0]["revision"] == first
    assert contents(corpus_folder(config)) == folders[0]


def test_a_break_before_the_first_document_is_the_networks_if_some_were_read_before(
    hub_config: Config, a_hub: Hub
) -> None:
    config = hub_config("owner/name", max_documents=200)
    a_hub.breaks_after = 0
    a_hub.breaks_in = a_hub.opened + 1
    with pytest.raises(UserError, match=r"failed after 0 documents: reset by peer$"):
        main(config)
    assert not corpus_folder(config).exists()
    a_hub.breaks_in = a_hub.opened + 2  # the tokenizer's sample is read by then
    for _ in range(2):
        with pytest.raises(
            UserError, match="failed after 0 documents: reset by peer; run the same command again"
        ):
            main(config)
        assert (corpus_folder(config) / UNFINISHED).is_file()
        a_hub.breaks_in = a_hub.opened + 1  # the next process, which goes on


def test_a_finished_corpus_of_the_hub_needs_no_network(
    hub_config: Config, a_hub: Hub, run: Run
) -> None:
    """Nor is it another one when the hub has gone on; one by a branch's name holds the commit too."""
    first, second = a_hub.folders
    configs = [
        hub_config("owner/name"),
        hub_config("owner/name", revision="main", name="by-branch"),
    ]
    for config in configs:
        assert run(config).manifest.sources[0]["revision"] == first
    a_hub.head, a_hub.reached = second, False
    for config in configs:
        assert run(config).manifest.sources[0]["revision"] == first


def test_ids_and_their_tokenizer_are_of_the_same_commit(
    hub_config: Config, a_hub: Hub, run: Run, text_file: Path, text_config: Config
) -> None:
    own = run(text_config(text_file))
    for folder in a_hub.folders.values():
        (folder / "tokenizer.json").write_bytes(own.tokenizer_file.read_bytes())
        write_set(
            folder, [[5 + number % 90, 6, 7 + number // 90] for number in range(150)], "input_ids"
        )
    corpus = run(hub_config("owner/name", ids_field="input_ids", tokenizer_file="tokenizer.json"))
    assert {entry["kind"]: entry["revision"] for entry in corpus.manifest.sources} == {
        "hub": a_hub.head,
        "tokenizer": a_hub.head,
    }


def test_no_network_is_said_at_once(hub_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hub_config("owner/name")
    for scheme in ("http", "https", "all"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_proxy".upper(), raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(
        UserError, match=r"owner/name: .*the Hugging Face hub cannot be reached .*data=text"
    ):
        main(config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        main(config)
    assert time.monotonic() - started < 5
    assert not corpus_folder(config).exists()


def test_a_damaged_local_data_set_is_one_line(
    tmp_path: Path, hub_config: Config, made_up: Any
) -> None:
    config = hub_config(write_set(tmp_path / "set", made_up(20)))
    with (tmp_path / "set" / "train.jsonl").open("a") as file:
        file.write('\n{"text": "cut o')
    with pytest.raises(
        UserError, match=r"=.*set: reading it: failed after \d+ documents: .*JSON"
    ) as caught:
        main(config)
    assert "\n" not in str(caught.value) and not corpus_folder(config).exists()
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, pyarrow.array([b"one", b"caf\xe9"]).buffers()
    )
    (tmp_path / "bytes").mkdir()
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "bytes" / "train.parquet")
    with pytest.raises(UserError, match=r"=.*bytes: .*utf-8"):
        main(hub_config(tmp_path / "bytes"))

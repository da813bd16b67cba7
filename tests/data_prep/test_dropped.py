"""`dropped.jsonl` has every dropped document with its stage, reason and partner, whoever did the work."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.data.corpus import Corpus
from data_prep.readers import plain_text, source
from data_prep.task_grid import DROPPED
from tests.data_prep.conftest import made_up_documents

Config = Callable[..., dict[str, Any]]
SENTENCE = "The sentence of a task has some words that stand in one document of the text."


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Files with documents for every stage to drop, and a task."""
    documents = made_up_documents(120, words=40)
    near = [f"{text} Something else." for text in documents[50:60] if len(text) > 200]
    documents += [*documents[3:9], *near, "short", "tiny", f"{documents[0]} {SENTENCE}"]
    documents += [f"{documents[1]} {{" + " {" * 40]
    blocks, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    blocks.write_bytes(
        "\n\n".join(documents).encode() + b"\n\nlatin \xe9 one\n\nend of it all here"
    )
    rows = [{"text": None}, {"text": documents[20]}, {"text": f"Again {documents[30]}"}, {}]
    records.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    (tmp_path / "glue" / "CoLA" / "dev.tsv").write_text(f"gj04\t1\t\t{SENTENCE}\n")
    return [blocks, records]


def settings(tmp_path: Path, texts: list[Path], text_config: Config, **data: Any) -> dict[str, Any]:
    return text_config(
        *texts,
        damaged="drop",
        filters={"max_curly_braces": 0.05},
        near_duplicates={"enabled": True},
        decontaminate={"tasks": str(tmp_path / "glue")},
        **{"list_dropped": True, **data},
    )


def test_every_dropped_document_is_listed_with_its_reason(
    tmp_path: Path, texts: list[Path], text_config: Config, run: Callable[..., Corpus]
) -> None:
    corpus = run(settings(tmp_path, texts, text_config, workers=1))
    rows = [json.loads(line) for line in (corpus.folder / DROPPED).read_text().splitlines()]
    reasons = Counter(row["reason"] for row in rows)
    assert reasons == corpus.manifest.removed and len(reasons) == 7
    stages = [stage.name for stage in corpus.manifest.stages]
    places = [stages.index(row["stage"]) for row in rows]
    assert places == sorted(places)
    examples = [
        line for s in corpus.manifest.stages for d in s.dropped.values() for line in d.examples
    ]
    shown = {f"{row['origin']}:{row['number']}" for row in rows}
    assert {example.split(": ")[0] for example in examples} <= shown
    duplicates = [row for row in rows if row["reason"] == "duplicate"]
    first = duplicates[0]
    assert (first["number"], first["like"]) == (120, f"{texts[0]}:3")
    assert duplicates[-1]["origin"] == str(texts[1])
    likes = {row["reason"] for row in rows if row["like"]}
    assert likes == {"duplicate", "near_duplicate"}
    assert next(row for row in rows if row["reason"] == "curly_braces")["shown"].count("limit 0.05")
    assert "words of CoLA" in next(r["shown"] for r in rows if r["reason"] == "contaminated")
    assert DROPPED in corpus.manifest.files
    assert "`dropped.jsonl` has a line" in (corpus.folder / "corpus_card.md").read_text()


def test_the_list_is_the_same_for_any_division_and_only_on_request(
    tmp_path: Path,
    texts: list[Path],
    text_config: Config,
    run: Callable[..., Corpus],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run(settings(tmp_path, texts, text_config, workers=1, corpus=str(tmp_path / "whole")))
    expected = (whole.folder / DROPPED).read_bytes()
    monkeypatch.setattr(plain_text, "RANGE_BYTES", 2000)
    monkeypatch.setattr(source, "TASK_SIZE", 3000)
    for name, data in {
        "two": {"workers": 2},
        "read here": {"max_documents": 10**6, "workers": 1},
    }.items():
        config = settings(tmp_path, texts, text_config, corpus=str(tmp_path / name), **data)
        assert (run(config).folder / DROPPED).read_bytes() == expected, name
    off = run(settings(tmp_path, texts, text_config, list_dropped=False, workers=1))
    assert not (off.folder / DROPPED).exists()

"""A stream that breaks, however often, gives every record once and in order."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from data_prep.sources import reconnect
from data_prep.sources.reconnect import is_network_error, reconnecting

WAITS = (0.0, 0.0)


class ReadError(Exception):
    """As HTTP clients raise it: no OSError."""


ReadError.__module__ = "httpx2._exceptions"


class Breaking:
    """A stream that breaks after some records, each time it is opened, until it has been opened often enough."""

    def __init__(self, open_stream: Callable[[], Any], breaks: list[int], error: type[Exception] = ReadError) -> None:
        self.open_stream, self.breaks, self.error, self.opened = open_stream, list(breaks), error, 0

    def __call__(self) -> Any:
        self.opened += 1
        stream = self.open_stream()
        after = self.breaks.pop(0) if self.breaks else None
        outer = self

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                for number, record in enumerate(stream):
                    if number == after:
                        raise outer.error("broken off")
                    yield record

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

        return Stream()


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], Any]:
    """A local data set of 1000 records in four files, opened as the hub's are."""
    import datasets

    for part in range(4):
        lines = [json.dumps({"text": f"record {250 * part + number}"}) for number in range(250)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{part}.jsonl") for part in range(4)]
    return lambda: datasets.load_dataset("json", data_files=files, split="train", streaming=True)


@pytest.mark.parametrize(("keep_state", "breaks"), [(True, [350, 0, 290, 260]), (False, [350, 0, 500, 990])])
def test_every_record_once_and_in_order(rows: Callable[[], Any], keep_state: bool, breaks: list[int]) -> None:
    stream = Breaking(rows, breaks)
    found = [record["text"] for record in reconnecting(stream, "test", WAITS, keep_state)]
    assert found == [f"record {number}" for number in range(1000)]
    assert stream.opened == len(breaks) + 1


def test_little_is_read_twice(rows: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "RECORDS_PER_STATE", 10)
    read = []

    def counted() -> Any:
        return rows().map(lambda record: read.append(1) or record)

    assert len(list(reconnecting(Breaking(counted, [905]), "test", WAITS))) == 1000
    assert len(read) < 1300  # whole files of records are passed over without reading, not more than one is read again


def test_after_all_waits_the_error_comes_through() -> None:
    stream = Breaking(lambda: range(10), [5, 5, 5, 5])
    records = reconnecting(stream, "test", WAITS)
    assert [next(records) for _ in range(5)] == list(range(5))
    with pytest.raises(ReadError):
        next(records)
    assert stream.opened == 3


def test_other_errors_are_not_repeated() -> None:
    stream = Breaking(lambda: range(10), [5], KeyError)
    with pytest.raises(KeyError):
        list(reconnecting(stream, "test", WAITS))
    assert stream.opened == 1


def test_no_network_while_opening_again_is_waited_for() -> None:
    answers: list[Any] = [Breaking(lambda: range(10), [5])(), UserError("no network"), range(10)]

    def open_stream() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert list(reconnecting(open_stream, "test", WAITS)) == list(range(10))


def test_which_errors_are_the_networks() -> None:
    assert all(map(is_network_error, (ConnectionError(), TimeoutError(), OSError(), ReadError())))
    assert not any(map(is_network_error, (ValueError(), KeyError(), UserError())))

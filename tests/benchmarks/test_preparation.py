"""The preparation's measurements, on some sentences: each side runs to its end."""

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def preparation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import preparation

    return preparation


def test_a_whole_preparation_is_measured(preparation: Any, tmp_path: Path) -> None:
    rng, text = random.Random(0), tmp_path / "text.txt"
    stock = [
        *("the of and to that with have be".split() * 30),
        *("".join(rng.choices("aeilmnorst", k=6)) for _ in range(300)),
    ]
    sentences = [" ".join(rng.choices(stock, k=30)) + "." for _ in range(400)]
    text.write_text("\n\n".join("\n".join(sentences[i : i + 4]) for i in range(0, 400, 4)))
    arguments = Namespace(threads=1, vocab_size=700, tasks=None, scratch=tmp_path)
    arguments.tokenizer = preparation.train_tokenizer([text], arguments)
    config = preparation.settings([text], tmp_path, "with near-duplicates", arguments)
    measured = preparation.measure(preparation.PREPARE, json.dumps(config), threads=1)
    assert (
        2 <= measured["bytes_per_token"] < 6
        and measured["documents"] > 0
        and measured["index_bytes"] > 0
    )

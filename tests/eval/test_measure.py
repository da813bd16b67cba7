"""`cramming measure`: what it adds to the log of a finished run."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.model.load import load_masked_lm
from cramming.record import load_record
from cramming.record_schema import read_record
from eval import measure
from eval.measure import main, pseudo_perplexity
from eval.report.facts import known_facts


@pytest.mark.parametrize("objective", ["mlm", "rtd"])
def test_a_measure_is_an_event_and_a_fact_of_the_report(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    monkeypatch.setattr(measure, "MIN_SECONDS", 0.0)
    run = train(f"objective={objective}")
    main(path=run, corpus=None, device="cpu")
    record = load_record(run)
    measured = record["measured"]
    assert measured["model_sha256"] == record["pretrain"]["final_sha256"]
    assert measured["tokens_per_second"] > 0 and measured["memory_bytes"] > 0
    has_head = objective == "mlm"
    assert (measured["pseudo_perplexity"] is not None) == has_head
    assert ("Pseudo-perplexity" in known_facts(read_record(record), "measures")) == has_head


def test_pseudo_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary(
    train: Callable[..., Path], tiny_corpus: Path
) -> None:
    model = load_masked_lm(train() / "final").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    vocab_size = model.config.vocab_size
    assert vocab_size is not None
    perplexity = pseudo_perplexity(model, Corpus.open(tiny_corpus))
    assert math.isclose(perplexity, vocab_size, rel_tol=1e-3)


def test_a_wrong_run_or_corpus_is_named_before_anything_is_written(
    train: Callable[..., Path], make_corpus: Callable[..., Path], tmp_path: Path
) -> None:
    run = train()
    size = (run / "run.jsonl").stat().st_size
    with pytest.raises(UserError, match="not the corpus of this run"):
        main(path=run, corpus=make_corpus(tmp_path / "other", documents=20), device="cpu")
    with pytest.raises(UserError, match="no trained model"):
        main(path=tmp_path / "nothing", corpus=None, device="cpu")
    assert (run / "run.jsonl").stat().st_size == size

"""`cramming diagnose`: each diagnosis on evidence that shows it and on evidence that does not, and counts of texts."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from cramming import launch
from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.invocation import Invocation
from cramming.objectives.masking import MaskedTargets
from cramming.plateau import plateau_line, unigram_entropy
from eval.archive import pack
from eval.diagnose import corpus_facts, main
from eval.diagnose.corpus_facts import Continuations, entropies, neighbour_gains, repetition
from eval.diagnose.evidence import CorpusFacts, Evidence, ModelFacts, RunFacts, shown_loss
from eval.diagnose.findings import STRONGEST, strength
from eval.diagnose.table import (
    CHECKS,
    diagnose,
    knows_frequencies_only,
    perspective,
    sentence_of,
)

CORPUS = CorpusFacts(
    vocab_size=1738,
    sampled_tokens=1_200_000,
    unigram=5.2,
    bigram=2.5,
    trigram=1.8,
    repeated=0.05,
    repeated_text="as old as the hills",
    repeated_times=38,
    unseen=0.0,
    unknown=0.0,
    tokens_per_word=1.23,
    used_entries=859,
    neighbour_gain=2.7,
    far_gain=1.8,
    tokens_per_document=60.0,
)
RUN = RunFacts(
    status="finished",
    steps=400,
    epochs=0.7,
    losses_S=np.linspace(7.5, 1.3, 400),
    norms_R=np.full(20, 1.2),
    clip=1.0,
    skipped=0,
    validations=((100, 3.4), (400, 1.2)),
    all_mask_loss=1.2,
    objective="mlm",
    predicts_tokens=True,
    rate=0.25,
    form=MaskedTargets(0.25, 0.8, 0.1),
    sequences_per_step=16,
    sequence_length=128,
    peak_rate=3e-3,
    precision="fp32",
)
MODEL = ModelFacts(
    changes={"embeddings": 3.0, "block": 2.5, "norm": 0.04, "decoder": 1.0},
    distance=2.6,
    distance_steps=100,
    turn=0.12,
    losses={-2: 12.0, -1: 12.5, 0: 1.2, 1: 12.2, 2: 12.1},
    order_use=1.3,
    context_use=1.4,
    order_loss=8.5,
)
HEALTHY = Evidence(CORPUS, RUN, MODEL)
POOR = {0: 5.16, 1: 5.4}
# Name of each diagnosis -> changes of the healthy evidence that show it, by part.
SHOWN: dict[str, dict[str, dict[str, Any]]] = {
    "repeated_text": {"corpus": {"repeated": 0.6}},
    "wrong_tokenizer": {"corpus": {"tokens_per_word": 3.8, "used_entries": 159}},
    "small_vocabulary": {"corpus": {"tokens_per_word": 3.4, "vocab_size": 100, "used_entries": 91}},
    "no_word_order": {"corpus": {"neighbour_gain": 0.49, "far_gain": 0.42}},
    "unseen_labels": {"corpus": {"unseen": 0.3}},
    "few_targets": {"run": {"rate": 0.02, "all_mask_loss": 5.2}},
    "few_words_left": {"run": {"rate": 0.9, "all_mask_loss": 5.2}},
    "small_batch": {"run": {"sequences_per_step": 1, "all_mask_loss": 5.2}},
    "short_sequences": {
        "run": {"sequence_length": 16, "sequences_per_step": 128, "all_mask_loss": 4.0}
    },
    "too_little_text": {"run": {"epochs": 40.0, "validations": ((100, 2.0), (400, 3.4))}},
    "rate_too_high": {
        "run": {"all_mask_loss": 5.16, "losses_S": np.full(400, 5.1), "peak_rate": 0.09},
        "model": {"distance": 24.0, "losses": POOR, "order_use": 1e-7, "context_use": 1e-7},
    },
    "rate_too_low": {
        "run": {"all_mask_loss": 6.5, "losses_S": np.linspace(7.5, 6.5, 400), "peak_rate": 3e-5},
        "model": {"distance": 0.1, "turn": 0.74, "losses": {0: 6.5}},
    },
    "loss_scale_stuck": {
        "run": {
            "precision": "fp16",
            "status": "diverged",
            "steps": 50,
            "skipped": 50,
            "losses_S": np.full(50, 7.5),
            "all_mask_loss": None,
        },
        "model": {"changes": {}, "distance": math.nan, "losses": {0: 7.5}},
    },
    "frozen_parameters": {"model": {"changes": {**MODEL.changes, "decoder": 0.0}}},
    "no_positions": {"model": {"order_use": 2e-7, "order_loss": 0.0}},
    "shifted_labels": {"model": {"losses": {-1: 12.0, 0: 12.5, 1: 0.9}}},
}


def changed(parts: dict[str, dict[str, Any]]) -> Evidence:
    """Return the healthy evidence with these fields of its parts changed."""
    return Evidence(
        replace(CORPUS, **parts.get("corpus", {})),
        replace(RUN, **parts.get("run", {})),
        replace(MODEL, **parts.get("model", {})),
    )


def test_every_diagnosis_has_a_sentence_and_evidence_that_shows_it() -> None:
    assert [check.__name__ for check in CHECKS] == list(SHOWN)
    for check in CHECKS:
        assert sentence_of(check).endswith(".") and ":" in sentence_of(check)


@pytest.mark.parametrize("name", SHOWN)
def test_a_diagnosis_is_named_first_on_evidence_that_shows_it(name: str) -> None:
    first = diagnose(changed(SHOWN[name]))[0]
    assert first.name == name
    assert 1 <= first.strength <= STRONGEST
    assert first.evidence and first.override


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_diagnosis_is_silent_on_healthy_and_on_missing_evidence(
    check: Callable[..., Any],
) -> None:
    assert check(HEALTHY) is None
    assert check(Evidence()) is None
    assert check(Evidence(CORPUS)) is None
    assert check(Evidence(None, RUN, None)) is None
    assert check(Evidence(CORPUS, RUN, ModelFacts())) is None


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("rate_too_high", {"losses_S": np.repeat([3.0, 5.0], 200), "norms_R": np.array([])}),
        ("rate_too_high", {"losses_S": np.repeat([3.0, 5.0], 200), "clip": None}),
        ("few_targets", {"losses_S": np.array([7.5]), "rate": 0.02}),
        ("small_batch", {"losses_S": np.array([7.5]), "sequences_per_step": 1}),
    ],
)
def test_evidence_names_no_number_that_is_not_known(name: str, run: dict[str, Any]) -> None:
    findings = diagnose(Evidence(CORPUS, replace(RUN, all_mask_loss=5.2, **run)))
    (evidence,) = [each.evidence for each in findings if each.name == name]
    assert "nan" not in evidence


@pytest.mark.parametrize("name", ["few_targets", "small_batch", "short_sequences", "rate_too_high"])
def test_settings_of_a_run_that_learns_are_no_fault(name: str) -> None:
    parts = SHOWN[name]
    assert diagnose(changed({**parts, "run": {**parts["run"], "all_mask_loss": 1.2}})) == []


def test_findings_are_ordered_by_strength() -> None:
    parts = {"corpus": {"repeated": 0.3}, "run": {"sequences_per_step": 1, "all_mask_loss": 5.2}}
    findings = diagnose(changed(parts))
    assert [each.name for each in findings] == ["small_batch", "repeated_text"]
    assert findings[0].strength == pytest.approx(512 / 128)


def test_a_strength_is_one_at_the_limit_and_finite() -> None:
    assert strength(3.0, 3.0) == 1.0
    assert strength(math.inf, 1.0) == STRONGEST
    assert strength(1.0, 0.0) == STRONGEST


def test_a_run_with_a_stuck_loss_scale_is_no_diverged_one() -> None:
    names = [each.name for each in diagnose(changed(SHOWN["loss_scale_stuck"]))]
    assert names == ["loss_scale_stuck"]
    parts = SHOWN["loss_scale_stuck"]
    other = changed({**parts, "run": {**parts["run"], "precision": "bf16"}})
    assert diagnose(other)[0].name == "rate_too_high"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (8.0, "above uniform entropy 7.46"),
        (6.0, "between uniform 7.46 and unigram entropy 5.20"),
        (2.0, "between bigram 2.50 and trigram entropy 1.80"),
        (1.2, "below trigram entropy 1.80"),
    ],
)
def test_a_loss_lies_between_two_entropies(loss: float, words: str) -> None:
    assert words in perspective(changed({"run": {"all_mask_loss": loss}}))


def test_a_loss_at_the_unigram_entropy_is_on_the_plateau() -> None:
    assert not knows_frequencies_only(HEALTHY)
    assert not knows_frequencies_only(Evidence(CORPUS))
    assert knows_frequencies_only(changed({"run": {"all_mask_loss": 5.1}}))


def test_the_loss_of_a_predictor_by_frequency_follows_from_its_entropy() -> None:
    """1,000 tokens of equal frequency; 80 % are hidden, and of the 20 % that show a token half show the right one."""
    entropy = math.log(1000)
    expected = 0.8 * entropy + 0.1 * (entropy + math.log(2)) + 0.1 * -math.log(0.5 + 0.5 / 1000)
    found = shown_loss(entropy, MaskedTargets(0.15, 0.8, 0.1))
    assert found == pytest.approx(expected, abs=0.001)
    assert shown_loss(entropy, None) == entropy
    assert shown_loss(entropy, MaskedTargets(0.3, 1.0, 0.0)) == entropy


def test_pretraining_points_to_the_diagnosis_of_a_run_that_ended_on_the_plateau() -> None:
    ids_N = np.repeat(np.arange(100), 5)
    assert unigram_entropy(ids_N) == pytest.approx(math.log(100))
    line = plateau_line(ids_N, 4.5, Path("runs/x"))
    assert line and "`cramming diagnose runs/x`" in line
    assert plateau_line(ids_N, 3.0, Path("runs/x")) is None
    assert plateau_line(ids_N, None, Path("runs/x")) is None


# Counts -------------------------------------------------------------------------------------------


def test_probabilities_after_a_context_sum_to_one() -> None:
    rng = np.random.default_rng(0)
    ids_N = rng.integers(0, 7, 500)
    counts = Continuations(ids_N[:-1], ids_N[1:], 8)
    beyond_V = np.full(8, 1 / 8)
    for context in range(8):  # the last was never seen
        contexts_V = np.full(8, context)
        p_V = counts.probabilities(contexts_V, np.arange(8), beyond_V)
        assert p_V.sum() == pytest.approx(1.0) and (p_V > 0).all()


def test_entropies_of_a_chain_are_those_of_the_chain() -> None:
    """The next token is the one before plus 1 or 2, with equal probability: log 2 nats by the one before."""
    rng = np.random.default_rng(0)
    ids_N = np.cumsum(rng.integers(1, 3, 200_000)) % 50
    unigram_V = np.full(50, 1 / 50)
    found = entropies(ids_N[:150_000], ids_N[150_000:], unigram_V, np.ones(50, dtype=bool))
    assert found == pytest.approx((math.log(50), math.log(2), math.log(2)), abs=0.01)


def test_order_is_seen_and_random_order_is_not() -> None:
    rng = np.random.default_rng(0)
    ids_N = np.cumsum(rng.integers(1, 3, 100_000)) % 50
    every = np.ones(50, dtype=bool)
    near, far = neighbour_gains(ids_N[:80_000], ids_N[80_000:], every)
    assert near - far > 0.5
    shuffled_N = rng.permutation(ids_N)
    near, far = neighbour_gains(shuffled_N[:80_000], shuffled_N[80_000:], every)
    assert abs(near - far) < 0.01


def test_repetition_counts_windows_that_were_there_before() -> None:
    rng = np.random.default_rng(0)
    line = np.arange(100, 112)
    parts = [rng.integers(0, 1_000_000, 12) for _ in range(50)]
    ids_N = np.concatenate([each for part in parts for each in (part, line)])
    share, times, window = repetition(ids_N, 12)
    assert times == 50 and window.tolist() == line.tolist()
    assert share == pytest.approx(49 / (len(ids_N) - 11))
    assert repetition(np.arange(5), 12)[0] == 0.0


@pytest.mark.parametrize(
    ("model", "entries", "beginnings"),
    [
        (models.WordPiece, ["[UNK]", "\u0120", "hu", "##s", "\u0120a"], [2, 1, 4]),
        (models.BPE, ["<s>", "\u0120hu", "s", "\u0120"], [1, 3]),
    ],
)
def test_entries_that_begin_a_word(model: Any, entries: list[str], beginnings: list[int]) -> None:
    """A text in Maltese has words that begin with the letter that marks words in byte-level BPE."""
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    arguments = {"merges": []} if model is models.BPE else {"unk_token": "[UNK]"}
    begins_V = corpus_facts.begins_word(Tokenizer(model(vocabulary, **arguments)), len(entries))
    assert set(np.flatnonzero(begins_V)) == set(beginnings)


def test_facts_of_the_tiny_corpus(tiny_corpus: Path) -> None:
    """Its documents are runs of consecutive words."""
    facts = corpus_facts.corpus_facts(Corpus.open(tiny_corpus))
    assert facts.vocab_size == 300 and facts.unknown == 0.0
    assert facts.bigram < 0.3 * facts.unigram
    assert facts.neighbour_gain > facts.far_gain - 0.2


# The verb -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> Path:
    """A run of 12 steps with a batch of one short sequence."""
    runs = tmp_path_factory.mktemp("diagnosed")
    one = ["train.batch_size=1", "train.micro_batch=1", "checkpoint.keep_at=[0,0.5]"]
    launch.main(compose(*tiny_overrides, *one), Invocation(runs=runs, name="one", device="cpu"))
    return runs / "one"


def test_a_run_is_diagnosed_from_its_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in run.rglob("*"))
    main.main(path=run, corpus=None, json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["name"] == "small_batch"
    assert "entropy" in told["perspective"]
    assert sorted(path for path in run.rglob("*")) == before


def test_findings_are_printed_with_their_overrides(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main.main(path=run, corpus=None, json=False)
    shown = capsys.readouterr().out
    assert "1. small_batch" in shown and "try: train.batch_size=" in shown


def test_the_facts_of_a_run_are_those_of_its_log(run: Path) -> None:
    evidence = main.gather(run, None)
    assert evidence.run and evidence.model and evidence.corpus
    assert len(evidence.run.losses_S) == evidence.run.steps == 12
    assert evidence.model.distance_steps == 6
    assert evidence.model.losses[0] == pytest.approx(evidence.run.all_mask_loss, abs=0.05)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("objective=rtd", "no loss to compare"),
        ("objective=causal-then-mlm", "nats for a hidden token"),
        ("train.packing=documents", "nats for a hidden token"),
        ("model=bert-base", "nats for a hidden token"),
    ],
)
def test_runs_of_all_kinds_are_diagnosed(
    override: str,
    words: str,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> None:
    kept = "checkpoint.keep_at=[0,0.5]"
    launch.main(
        compose(*tiny_overrides, override, kept), Invocation(runs=tmp_path, name="a", device="cpu")
    )
    evidence = main.gather(tmp_path / "a", None)
    assert words in perspective(evidence)
    assert evidence.model and len(evidence.model.changes) > 10
    # Steps of 256 tokens, of a text that counts through its words.
    assert {each.name for each in diagnose(evidence)} <= {"small_batch", "repeated_text"}


def test_an_archive_is_diagnosed_by_its_log(run: Path, tmp_path: Path, tiny_corpus: Path) -> None:
    archive = tmp_path / "one.record.zip"
    pack(run, archive, manifest=tiny_corpus / "manifest.json")
    evidence = main.gather(archive, None)
    assert evidence.model and not evidence.model.changes
    assert diagnose(evidence)[0].name == "small_batch"


def test_a_corpus_is_diagnosed(tiny_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.main(path=tiny_corpus, corpus=None, json=False)
    assert "entropies in nats per token" in capsys.readouterr().out


def test_a_folder_that_is_neither_is_refused_in_one_line(
    tmp_path: Path, run: Path, make_corpus: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match="no run and no corpus"):
        main.main(path=tmp_path, corpus=None, json=False)
    other = make_corpus(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="not the corpus of this run"):
        main.main(path=run, corpus=other, json=False)
    with pytest.raises(UserError, match=f"^--corpus={other}: "):
        main.main(path=other, corpus=other, json=False)


def test_a_run_without_its_corpus_and_checkpoints_is_diagnosed_by_its_log(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "run.jsonl").write_bytes((run / "run.jsonl").read_bytes())
    monkeypatch.setattr(main, "find_corpus", lambda record, given: None)
    evidence = main.gather(alone, None)
    assert evidence.corpus is None and evidence.model == ModelFacts()
    assert diagnose(evidence)[0].name == "small_batch"
    assert "no corpus at hand" in perspective(evidence)

"""Run folders as the verbs leave them, made up in the test: a valid record of the closed division to start from."""

import copy
import functools
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from cramming.journal import Journal, first_line_sha256

from cramming import environment, record
from cramming.cli import VERBS, _load
from cramming.config import build, choose, file_sha256
from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES, GLUE, OFFICIAL_SHA256
from cramming.model.config import ModelConfig, flops_per_token
from cramming.overrides import compose
from cramming.record import FORMAT_VERSION, RULES_VERSION
from cramming.schedule import SCHEDULES, learning_rate_factor
from cramming.scores import spread
from data_prep.again import overlap
from eval.finetune.history import PROTOCOL, history_file, stamp
from eval.rules.consistency import count_parameters_of
from eval.verify import Means

HYPERPARAMETERS = {"epochs": 5, "batch_size": 16, "learning_rate": 4e-5, "schedule": "cosine"}
SEEDS = [0, 1, 2]
FILES = {"config.json": "12" * 32, "model.safetensors": "ab" * 32, "tokenizer.json": "ef" * 32}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CREATED = "2030-01-01T00:00:00+00:00"
BEGAN = datetime.fromisoformat(CREATED).timestamp()
MADE_UP = (
    "model=tiny",
    "model.vocab_size=8192",
    "device=cpu",
    "precision=fp32",
    "train.batch_size=4",
    "train.micro_batch=4",
    "train.sequence_length=25",
    "train.log_every=1",
    "schedule=linear",
)


def _environment() -> dict[str, Any]:
    return {
        "python": "3.12.1",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "platform": "Linux",
        "cpu_count": 2,
        "device": {
            "kind": "cpu",
            "name": "Test CPU",
            "memory_bytes": 2**34,
            "peak_tflops": None,
            "count": 1,
        },
        "git": {"commit": "0123456789abcdef0123", "dirty": False, "diff_sha256": None},
    }


def glue_section(
    init: str, suite: str = "glue", base: float = 0.7, seeds: list[int] = SEEDS
) -> dict[str, Any]:
    """A complete `glue.<init>` of a record; every entry's median is `base` plus a little per entry."""
    tasks = {}
    for place, (name, (task, source)) in enumerate(ENTRIES.items()):
        if suite == "embedded" and name in ("mnli_mismatched", "wnli"):
            continue
        values = [base + 0.01 * place + 0.002 * seed for seed in range(len(seeds))]
        summary = spread(values)
        official = suite == "glue"
        tasks[name] = {
            "title": source.title,
            "task": task.name,
            "metrics": {metric: dict(summary) for metric in task.metrics},
            "main_metric": task.main_metric,
            "scored_epochs": [HYPERPARAMETERS["epochs"]] * len(seeds),
            "score": 100 * summary["median"],
            "problem": None,
            "notes": [],
            "train_examples": task.train.examples,
            "official_train_examples": task.train.examples if official else None,
            "eval_examples": source.examples,
            "official_eval_examples": source.examples if official else None,
            "subset": False,
            "texts_sha256": "34" * 32,
            "seen_in_training": 0,
            "data_sha256": OFFICIAL_SHA256.get(name, "cd" * 32) if official else "cd" * 32,
            "hyperparameters": dict(HYPERPARAMETERS),
            "seconds": 12.5,
        }
    section: dict[str, Any] = {
        "format": 1,
        "init": init,
        "model": "runs/first/final",
        "model_files": dict(FILES),
        "model_sha256": "ab" * 32 if init == "pretrained" else None,
        "environment": _environment(),
        "suite": suite,
        "split": "dev",
        "selection": "last epoch",
        "seeds": list(seeds),
        "hyperparameters": dict(HYPERPARAMETERS),
        "tasks": tasks,
        "absent": {},
    }
    section["averages"] = averages_of(section)
    return section | ({"tasks_corpus_sha256": "cd" * 32} if suite == "embedded" else {})


def averages_of(section: dict[str, Any]) -> dict[str, Any]:
    """The averages that the section's scores give."""
    found = {}
    for name, average in AVERAGES[section["suite"]].items():
        scores = {e: section["tasks"].get(e, {}).get("score") for e in average.entries}
        missing = [e for e, value in scores.items() if value is None]
        value = None if missing else statistics.fmean(scores.values())
        found[name] = {"value": value, "missing": missing, "definition": average.definition}
    return found


@functools.cache
def _config() -> dict[str, Any]:
    """Of 100 steps of 100 tokens in a minute."""
    config = compose(MADE_UP)
    config["budget"].update(hours=60 / 3600)
    return config


def _flops() -> float:
    """Of one token."""
    length, config = _config()["train"]["sequence_length"], _config()
    share = round(config["objective"]["rate"] * length) / length
    return flops_per_token(build(ModelConfig, config["model"], "model"), length, share)


def _seconds(step: int) -> float:
    """When a step had ended, on the budget's clock: the second process begins after 20 s, at step 40."""
    return 18.5 * step / 40 if step <= 40 else 23 + 36.5 * (step - 40) / 60


def journal_lines() -> list[dict[str, Any]]:
    """Two processes: one killed after 20 s, one that finished; a heartbeat every two seconds."""

    def event(kind: str, process: int, elapsed: float, steps: int, **more: Any) -> dict[str, Any]:
        wall = BEGAN + 30 * process + elapsed
        counters = {
            "steps": steps,
            "sequences": 4 * steps,
            "tokens": 100 * steps,
            "flops": 100 * steps * _flops(),
        }
        rest = {"skipped_steps": 0, "recompilations": 0, "data_wait_seconds": 0.595 * steps / 100}
        ended = {"last_step_seconds": _seconds(steps), "charged_flops": counters["flops"]}
        common = {"event": kind, "process": process, "elapsed": elapsed, "wall": wall}
        return {**common, **counters, **rest, **ended, **more}

    def beats(process: int, seconds: range) -> list[dict[str, Any]]:
        def steps(now: float) -> int:
            return sum(_seconds(step) <= now for step in range(1, 101))

        return [event("heartbeat", process, float(s), steps(20.0 * process + s)) for s in seconds]

    limit = {"unit": "hours", "limit": 60 / 3600, "corpus": "cd" * 32}
    return [
        event("start", 0, 1.0, 0, **limit),
        *beats(0, range(2, 19, 2)),
        event("checkpoint", 0, 19.0, 40, sha256="77" * 32),
        event("heartbeat", 0, 20.0, 40),
        event("start", 1, 2.0, 0, **limit),
        event("resume", 1, 3.0, 40, sha256="77" * 32),
        *beats(1, range(4, 40, 2)),
        event("end", 1, 41.0, 100, reason="finished"),
    ]


def _record(suite: str) -> dict[str, Any]:
    tasks = GLUE.values()
    budget = {
        "unit": "hours",
        "limit": 60 / 3600,
        "spent": 59.5 / 3600,
        "spent_seconds": 59.5,
        "overrun_seconds": 0.0,
        "journal_sha256": "filled in when written",
        "processes": [
            {"started": BEGAN + 1, "spent_seconds": 20.0, "ended": "killed"},
            {"started": BEGAN + 32, "spent_seconds": 41.0, "ended": "finished"},
        ],
    }
    validation = {
        "loss": 5.5,
        "accuracy": 0.21,
        "targets": 1000,
        "all_mask_loss": 5.75,
        "all_mask_accuracy": 0.18,
        "bits_per_byte": 1.875,
        "tokens": 7000,
    }
    pretrain = {
        "status": "finished",
        "objective": "mlm",
        "devices": 1,
        "budget": budget,
        **count_parameters_of(build(ModelConfig, _config()["model"], "model")),
        "precision": "fp32",
        "peak_learning_rate": _config()["optim"]["lr"],
        "recompilations": 0,
        "steps": 100,
        "tokens": 10_000,
        "sequences": 400,
        "exaflops": 10_000 * _flops() / 1e18,
        "train_loss": 5.4321,
        "corpus_epochs": 400 / (1_000_000 // 25 - 1),
        "validation": validation,
        "tokens_per_second": 10_000 / 59.5,
        "model_flops_utilization": None,
        "data_wait_share": 0.01,
        "peak_memory_bytes": 2**30,
        "skipped_steps": 0,
        "final_sha256": "ab" * 32,
        "final_files": dict(FILES),
        "seed": 0,
        "forced": [],
        "start": "random",
        "compile_cache": "own",
        "compiled": True,
    }
    decontamination = {
        "ngram": 13,
        "examples": {t.title: len(t.text) * sum(s.examples for s in t.scored) for t in tasks},
        "removed": dict.fromkeys([t.title for t in tasks], 0),
        "development": {
            f"{s.folder}/{s.file}": {"texts": len(t.text) * s.examples, "sha256": "34" * 32}
            for t in tasks
            for s in t.scored
        },
    }
    corpus = {
        "folder": "corpora/x",
        "manifest_sha256": "cd" * 32,
        "tokens": 1_000_000,
        "validation_tokens": 10_000,
        "documents": 5000,
        "vocab_size": 8192,
        "sources": [{"name": "wikipedia", "license": "CC BY-SA"}],
        "tokenizer": {"kind": "wordpiece", "lowercase": True, "sha256": "ef" * 32},
        "changed": {},
        "settings": {},
        "removed": {"empty": 3},
        "decontamination": decontamination,
    }
    return {
        "format": FORMAT_VERSION,
        "name": "first",
        "created": CREATED,
        "suite_version": "0.1.0",
        "rules_version": RULES_VERSION,
        "division_requested": "closed",
        "config": copy.deepcopy(_config()),
        "environment": _environment(),
        "resumed": [_environment()],
        "corpus": corpus,
        "pretrain": pretrain,
        "glue": {
            "pretrained": glue_section("pretrained", suite),
            "random": glue_section("random", suite, base=0.5),
        },
    }


def _fine_tunings(record: dict[str, Any], predictions_sha256: str) -> Iterator[dict[str, Any]]:
    """What the history has of the record's scores."""
    for init, section in record.get("glue", {}).items():
        made_with = {key: section.get(key) for key in PROTOCOL}
        for entry, task in section["tasks"].items():
            for seed, value in zip(
                section["seeds"], task["metrics"][task["main_metric"]]["per_seed"]
            ):
                run = {
                    "time": "2030-01-01T00:10:00+00:00",
                    "suite": section["suite"],
                    "init": init,
                    "task": task["task"],
                    "seed": seed,
                }
                digests = {
                    "model_sha256": section["model_sha256"],
                    "predictions_sha256": predictions_sha256,
                }
                more = {"subset": False, "version": 5, "git": section["environment"]["git"]}
                yield {**run, **made_with, **more, "scores": {entry: value}, **digests}


def _metrics() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    schedule, peak = choose(SCHEDULES, _config()["schedule"], "schedule"), _config()["optim"]["lr"]
    for step in range(1, 101):
        seconds, fall = _seconds(step), math.exp(-step / 25) - math.exp(-4)
        progress = seconds / 60
        common = {"step": step, "progress": progress, "seconds": seconds, "tokens": 100 * step}
        lr = peak * learning_rate_factor(schedule, progress)
        rows.append(
            {**common, "loss": 5.4321 + 4 * fall, "accuracy": 0.2, "lr": lr, "grad_norm": 1.0}
        )
        if step % 25 == 0:
            rows.append({**common, "validation_loss": 5.5 + 4 * fall, "validation_accuracy": 0.21})
    return rows


def _write_journal(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    journal = Journal(path, durable=False)
    for line in lines:
        journal.write(line)
    journal.close()


@pytest.fixture
def make_record(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """`make_record(suite="glue")`: a fresh record that passes every rule once its journal is beside it; in tests of
    `records_only` no settings make two of them one recipe."""
    without: dict[str, Any] = {"config": {}} if "records_only" in request.fixturenames else {}
    return lambda suite="glue": copy.deepcopy(_record(suite) | without)


@pytest.fixture
def make_section() -> Callable[..., dict[str, Any]]:
    """`make_section(init, suite, base, seeds)`: a fresh `glue.<init>` section."""
    return glue_section


@pytest.fixture
def recompute_averages() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The averages that a section's scores give, after a test has changed them."""
    return averages_of


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """`write_run(folder, record)`: a run folder with journal, history and metrics, their hashes in the record, and with
    weights of its own; `predictions` is what each file of these holds."""

    def write(
        folder: Path, record: dict[str, Any], predictions: bytes = b"as many as there are examples"
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        weights = hashlib.sha256(os.fsencode(folder.name)).hexdigest()
        record.update(json.loads(json.dumps(record).replace(FILES["model.safetensors"], weights)))
        path, past = folder / "budget.jsonl", history_file(folder)
        _write_journal(path, journal_lines())
        if "name" in record.get("config", {}):
            record["config"]["name"] = record["name"]
        settings = record.get("config", {}) | {"budget": _config()["budget"]}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        if "pretrain" in record:
            record["pretrain"]["budget"]["journal_sha256"] = file_sha256(path)
            record["pretrain"]["journal_start"] = first_line_sha256(path)
        lines = list(_fine_tunings(record, hashlib.sha256(predictions).hexdigest()))
        _write_journal(past, lines)
        for line in lines:
            if line["init"] == "pretrained":
                place = (
                    past.parent
                    / "pretrained"
                    / "predictions"
                    / f"{line['task']}-seed{line['seed']}.npz"
                )
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(predictions)
        if record.get("glue"):
            record["history"] = stamp(past)
        for section in record.get("glue", {}).values():
            section["history_entries"] = len(lines)
        (folder / "record.json").write_text(
            json.dumps(record, ensure_ascii=False), encoding="utf-8"
        )
        (folder / "environment.json").write_text(json.dumps(record.get("environment")))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _metrics()))
        return folder

    return write


@pytest.fixture
def records_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that change records alone: R27 finds no contradiction with the other files."""
    monkeypatch.setattr("eval.rules.load.contradictions", lambda *_: iter(()))


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., None]:
    """`write_tokenizer(folder, words)`: one of so many words, w0, w1, ..., behind BERT's five special tokens."""

    def write(folder: Path, words: int) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        vocabulary = [*SPECIAL, *(f"w{i}" for i in range(words))]
        tokenizer = Tokenizer(
            WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {f"{word.strip('[]').lower()}_token": word for word in SPECIAL}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


@pytest.fixture(scope="session")
def write_bert(write_tokenizer: Callable[..., None]) -> Callable[..., Path]:
    """`write_bert(folder, words, **shape)`: a tiny stock BERT with such a tokenizer."""

    def write(folder: Path, words: int = 20, **shape: Any) -> Path:
        import torch
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        small = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
        }
        config = BertConfig(
            vocab_size=len(SPECIAL) + words, **{**small, "max_position_embeddings": 24, **shape}
        )
        BertForMaskedLM(config).save_pretrained(folder)
        write_tokenizer(folder, words)
        return folder

    return write


# A closed-division run in seconds: all eight embedded tasks, three seeds, checkpoints, heartbeats.
HONEST_RUN = (
    "name=honest",
    "device=cpu",
    "precision=fp32",
    "data.size=20000",
    "tokenizer.vocab_size=300",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=48",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch=4",
    "train.log_every=10",
    "train.validations=2",
    "train.validation_tokens=512",
    "budget.steps=60",
    "budget.heartbeat_seconds=0.05",
    "checkpoint.every_steps=25",
    "eval.init=[pretrained]",
    "eval.seeds=[0,1,2]",
    "eval.workers=1",
    "eval.baselines=false",
    "eval.hyperparameters.epochs=1",
    "eval.hyperparameters.batch_size=400",
    "eval.hyperparameters.max_length=16",
)
CLEAN = {"commit": "0123456789abcdef0123", "dirty": False, "changed": [], "diff_sha256": None}
# The clock counts from the start of the process, so `pretrain` needs one of its own.
PRETRAIN = f"""
import sys
from cramming import cli, environment, record
environment.git_state, record.git = lambda: {CLEAN}, lambda *_: None
cli.run_verb("pretrain", sys.argv[1:])
"""


@pytest.fixture(scope="session")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run, `runs/honest`, trained and scored; `corpora/` lies beside `runs`. Read-only: tests
    copy it. Its code is said to be a clean commit, so that it is of the closed division."""
    place = tmp_path_factory.mktemp("honest")
    overrides = [*HONEST_RUN, f"runs={place / 'runs'}", f"corpora={place / 'corpora'}"]
    settings = compose(overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "git_state", lambda: CLEAN)
        for verb in ("prepare", "pretrain", "glue"):
            if verb == "pretrain":
                program = [sys.executable, "-c", PRETRAIN, *overrides]
                subprocess.run(
                    program,
                    check=True,
                    capture_output=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            else:
                _load(VERBS[verb].module)(settings)
    return place / "runs" / "honest"


@pytest.fixture
def clean_tree(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The code of this process is said to be a clean commit. Returns the overrides of the honest run."""
    monkeypatch.setattr(environment, "git_state", lambda: CLEAN)
    monkeypatch.setattr(record, "git", lambda *_: None)
    return HONEST_RUN


@pytest.fixture(scope="session")
def means(honest_run: Path) -> Means:
    """What a verifier has besides the honest run, or a copy of it. Its tasks are taken from its corpus, where they are
    as generated: to generate them for each test takes two seconds."""
    (corpus,) = honest_run.parents[1].glob("corpora/*")

    def embedded_tasks(folder: Path, seed: int, generator: str) -> bool:
        shutil.copytree(corpus / "tasks", folder, dirs_exist_ok=True)
        return True

    return Means(embedded_tasks, overlap)

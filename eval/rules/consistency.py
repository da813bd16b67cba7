"""R27: what a run's folder says twice must agree. This file: the rule, and what the run says of itself at its start;
the work and its clock: eval/rules/training_agrees.py; the scores: eval/rules/scores_agree.py.

A number that is forged in one place is contradicted in another: record.json repeats what config.yaml, the journal,
metrics.jsonl, environment.json, corpus.json and the model's own files say, and these repeat each other. R5, R7, R14 and
R26 compare some of it; here is the rest, with the ranges of numbers and what a device can do at all. A forger who makes
every place agree is not found by this (docs/rules.md, "What no check here can show").
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cramming.config import build, choose
from cramming.data.masking import BLOCK, OBJECTIVES, PER_BLOCK
from cramming.journal import JOURNAL
from cramming.model.config import ModelConfig, count_parameters, flops_per_token
from cramming.plan import cards
from cramming.record import setup_hash
from cramming.record_schema import Record
from cramming.schedule import SCHEDULES, PeakRate
from eval.rules.evidence import Outcome, all_or
from eval.rules.journal import Read, parsed
from eval.rules.scores_agree import scores_disagree
from eval.rules.training_agrees import (
    Evidence,
    clocks_disagree,
    counters_disagree,
    metrics_disagree,
    too_fast,
)

HEX_256 = re.compile(r"[0-9a-f]{64}")


def folder_agrees(record: Record) -> Outcome:
    """What the folder says twice agrees (record, configuration, journal, metrics, environment, corpus, model, scores,
    pieces, predictions and history), every number is in its range, and the work is what the device can do in its time.
    """
    if record.known:
        return True, "known by its SHA-256, from before version 5"
    if record.contradictions is None:
        return False, "the folder was not looked at"
    return all_or(
        record.contradictions, "record, configuration, journal, metrics, model and scores agree"
    )


def contradictions(
    folder: Path, read: Read, record: Record, rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Everything in which the folder contradicts itself, one line each, beginning with the file."""
    yield from (f"record.json: {problem}" for problem in record.problems)
    yield from (f"record.json: {path} is no SHA-256" for path in _no_hashes(record.raw, ""))
    if record.training.status == "finished" and (folder / JOURNAL).exists():
        yield from _each(TRAINING, lambda: _evidence(folder, read, record, rows))
    yield from _each({"glue": lambda found: scores_disagree(*found)}, lambda: (folder, record))


def _each(
    checks: Mapping[str, Callable[[Any], Iterator[str]]], read: Callable[[], Any]
) -> Iterator[str]:
    """The problems that the checks find, behind the file's name; a file in a form of its own is one, too."""
    found = None
    for file, check in checks.items():
        try:
            found = found or read()
            yield from [f"{file}: {problem}" for problem in check(found)]
        except Exception as error:  # of a damaged or a forged file nearly anything can come
            what = "this or record.json" if file != "record.json" else "this"
            yield f"{file}: {what} is not as the suite writes it ({type(error).__name__}: {str(error)[:80]})"


def _evidence(
    folder: Path, read: Read, record: Record, rows: Sequence[Mapping[str, Any]]
) -> Evidence:
    config = parsed((folder / "config.yaml").read_text(encoding="utf-8"))
    return Evidence(folder, record, read(), rows, _of_this_version(config))


def _of_this_version(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without settings that only another version of the suite has: they were off, or the numbers show it."""
    tables: dict[str, Mapping[str, type]] = {"objective": OBJECTIVES, "schedule": SCHEDULES}
    kinds = {name: table[config[name]["name"]] for name, table in tables.items()} | {
        "model": ModelConfig
    }
    known = {name: {field.name for field in fields(kind)} for name, kind in kinds.items()}
    kept = {
        name: {key: value for key, value in config[name].items() if key in known[name]}
        for name in known
    }
    return {**config, **kept, "train": {"batch_ramp": None, **config["train"]}}


def _is_hash(value: str) -> bool:
    return bool(HEX_256.fullmatch(value)) and len(set(value)) > 1


def _no_hashes(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """Where `sha256` stands in a name and no such number does: one of zeros is none."""
    of_files = path.endswith(("final_files", "model_files"))
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _no_hashes(value, f"{path}.{key}".lstrip("."))
        elif isinstance(value, str) and (of_files or "sha256" in key) and not _is_hash(value):
            yield f"{path}.{key}".lstrip(".")


def _configuration(e: Evidence) -> Iterator[str]:
    """config.yaml against the record's copy, and both against what the record says of the training."""
    config, training = e.config, e.training
    recorded = _of_this_version(json.loads(json.dumps(e.record.config)))
    yield from (
        f"{key} is not what the record has"
        for key in {**config, **recorded}
        if config.get(key) != recorded.get(key)
    )
    if e.record.name != str(config["name"]):
        yield f"name is {config['name']}, in the record {e.record.name}"
    objective = choose(OBJECTIVES, config["objective"], "objective")
    start = config["start"]
    told = {
        "seed": config["seed"],
        "start": start.get("name") or start["embeddings"],
        "objective": objective.kinds,
    }
    if config["precision"]["mode"] != "auto":
        told["precision"] = config["precision"]["mode"]
    residual = config["precision"].get("residual", "auto")
    if residual != "auto" and "residual" in training:  # records of before 2026-11-28 lack it
        told["residual"] = residual
    if config["runtime"]["compile"] != "off":
        told["compiled"] = True
    model = build(ModelConfig, {**config["model"], "vocab_size": _vocabulary(e)}, "model")
    peak = build(
        PeakRate,
        {field.name: config["optim"].get(field.name) for field in fields(PeakRate)},
        "optim",
    )
    rate = peak.peak_learning_rate(config["train"]["batch_size"], model.hidden_size)
    if not math.isclose(
        rate, training["peak_learning_rate"], rel_tol=1e-9
    ):  # powers have another last bit elsewhere
        yield f"the peak of the learning rate is {rate}, in the record {training['peak_learning_rate']}"
    if not objective.replaces_tokens:
        told |= count_parameters_of(model)
    yield from (
        f"{name} is {value}, pretrain.{name} of the record {training.get(name)}"
        for name, value in told.items()
        if training.get(name) != value
    )
    if not {trick for trick, state in e.record.training.gate.items() if state == "forced"} <= {
        *training["forced"]
    }:
        yield "the record's list of forced tricks lacks some of its gate"
    if objective.phases is None and not objective.replaces_tokens:
        length = config["train"]["sequence_length"]
        share = objective.targets_per_row(length) / length
        flops = (
            flops_per_token(model, length, share, config["attention"]["last_layer"])
            * training["tokens"]
            / 1e18
        )
        if not math.isclose(flops, training["exaflops"], rel_tol=1e-6):
            yield f"{training['tokens']} tokens are {flops:.6g} exaFLOPs, in the record {training['exaflops']:.6g}"


def count_parameters_of(model: ModelConfig) -> dict[str, int]:
    """As the record names them."""
    count = count_parameters(model)
    return {"parameters": count.total, "parameters_without_embeddings": count.without_embeddings}


def _vocabulary(e: Evidence) -> int:
    given, corpus = e.config["model"].get("vocab_size"), e.record.corpus.vocab_size or 0
    return int(given or (corpus + 63) // 64 * 64)


def _environment(e: Evidence) -> Iterator[str]:
    """environment.json and git.diff against the record, and the record's devices against themselves."""
    file, ran = e.folder / "environment.json", e.record.environment.raw
    if not file.exists():
        yield "is not beside the record"
    elif json.loads(file.read_text(encoding="utf-8")) != ran:
        yield "is not the record's environment"
    kind, devices = e.config["device"], [machine["device"] for machine in e.machines]
    if kind not in ("auto", devices[0]["kind"]):
        yield f"trained on {devices[0]['kind']}, by config.yaml on {kind}"
    for device in devices:
        card = (
            cards.find(device["name"], device.get("memory_bytes"))
            if device["kind"] == "cuda"
            else None
        )
        told = device.get("peak_tflops")
        if (
            card and told and not 0.5 <= told / card.tflops <= 2
        ):  # rows of the table are corrected at times
            yield f"{device['name']} has {card.tflops:g} TFLOP/s, the record says {told:g}"
    if (e.training["peak_memory_bytes"] or 0) > (devices[-1].get("memory_bytes") or math.inf):
        yield "more memory was used than the device has"
    for git in (
        *(machine["git"] for machine in e.machines),
        *(
            section.environment.raw["git"]
            for section in e.record.glue.values()
            if section.environment
        ),
    ):
        if git.get("dirty") is False and (git.get("changed") or git.get("diff_sha256")):
            yield "a clean git tree with changes"
    if ran["git"].get("dirty") is False and (e.folder / "git.diff").exists():
        yield "a clean git tree, and git.diff beside it"
    ran_here = map(
        setup_hash, e.machines
    )  # one for each process, and for some that ended before the journal knew
    if not all(setup in ran_here for setup in e.setups):
        yield "budget.jsonl has other environments (by their hashes)"


def _corpus(e: Evidence) -> Iterator[str]:
    """The manifest of what was read against its hash, which the journal has too, and against the record's words."""
    file, told = e.folder / "corpus.json", e.record.raw["corpus"]
    if not file.exists():
        if e.setups:  # a run from before 2026-11-25
            yield "is not beside the record"
        return
    manifest = json.loads(file.read_text(encoding="utf-8"))
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    content["sources"] = [
        {key: one[key] for key in one if key != "mtime_ns"} for one in manifest["sources"]
    ]
    if (
        hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        != told["manifest_sha256"]
    ):
        yield "is not the corpus that was read (by SHA-256 of the manifest)"
    splits, tokenizer = manifest["splits"], manifest["tokenizer"]
    described = {
        **{key: manifest[key] for key in ("sources", "settings", "removed", "decontamination")},
        "tokens": sum(shard["tokens"] for shard in splits["train"]),
        "validation_tokens": sum(shard["tokens"] for shard in splits["validation"]),
        "documents": sum(shard["documents"] for shard in splits["train"]),
        "vocab_size": tokenizer["vocab_size"],
        "tokenizer": {key: tokenizer[key] for key in told["tokenizer"]},
    }
    yield from (
        f"{key} is not what the record has"
        for key, value in described.items()
        if told.get(key) != value
    )


def _model(e: Evidence) -> Iterator[str]:
    """The weights' own header, without reading the weights, and the hash that the record has twice."""
    training, file = e.training, e.folder / "final" / "model.safetensors"
    if (
        training["final_files"].get("model.safetensors", training["final_sha256"])
        != training["final_sha256"]
    ):
        yield "the record names two SHA-256 of the weights"
    if not file.exists():
        return
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")  # of a damaged file anything
        header = json.loads(handle.read(min(length, file.stat().st_size)))
    count = sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )
    encoder_only = training["objective"] != "mlm" and "mlm" not in training["objective"]
    if count != training["parameters"] and not encoder_only:
        yield f"final/model.safetensors has {count} numbers, the record {training['parameters']} parameters"


def _ranges(e: Evidence) -> Iterator[str]:
    """Of the record's numbers."""
    training, validation = e.training, e.training["validation"]
    shares = {
        "data_wait_share": training["data_wait_share"],
        "validation.accuracy": validation["accuracy"],
    }
    shares |= {"validation.all_mask_accuracy": validation.get("all_mask_accuracy")}
    yield from (
        f"{name} is {value}"
        for name, value in shares.items()
        if value is not None and not 0 <= value <= 1.0001
    )
    amounts = {
        name: training[name] for name in ("steps", "tokens", "parameters", "exaflops", "train_loss")
    }
    amounts |= {name: validation.get(name) for name in ("loss", "all_mask_loss", "bits_per_byte")}
    yield from (
        f"{name} is {value}" for name, value in amounts.items() if value is not None and value <= 0
    )
    for loss, accuracy in (("loss", "accuracy"), ("all_mask_loss", "all_mask_accuracy")):
        if (
            validation.get(loss) is not None
            and validation[loss] < (1 - validation[accuracy]) * math.log(2) - 1e-9
        ):
            said = f"{loss} is {validation[loss]:.3f}, {accuracy} {validation[accuracy]:.3f}"
            yield f"{said}: a target that is not the likeliest costs ln 2 at least"
    tokens, targets, train = validation["tokens"], validation["targets"], e.config["train"]
    if tokens > (most := max(train["validation_tokens"], train["sequence_length"])):
        yield f"validated on {tokens} tokens, by config.yaml on {most} at most"
    if not 0.1 * tokens <= targets <= tokens // BLOCK * PER_BLOCK + min(tokens % BLOCK, PER_BLOCK):
        yield f"{targets} targets of {tokens} tokens"
    for name in ("accuracy", "all_mask_accuracy"):
        right = (validation.get(name) or 0) * targets
        if abs(right - round(right)) > 1e-6:
            yield f"validation.{name} is {validation[name]}, no share of {targets} targets"


# Behind the file that is named with the problem.
TRAINING: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "config.yaml": _configuration,
    "budget.jsonl": counters_disagree,
    "clock": clocks_disagree,
    "metrics.jsonl": metrics_disagree,
    "throughput": too_fast,
    "environment.json": _environment,
    "corpus.json": _corpus,
    "final": _model,
    "record.json": _ranges,
}

"""Ways to cheat or to err, each a change of an honest run's folder by who mends what obviously belongs to it.

Whoever changes the journal links its lines anew and puts its hashes into the record; who changes a score changes the
averages, too. `MISSED` are those that no check can see in the folder alone (docs/rules.md).
"""

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cramming.journal import first_line_sha256

from cramming.config import file_sha256
from cramming.data.task_files import GLUE
from cramming.scores import spread
from eval.archive import _signed, _text, list_of
from eval.finetune.history import stamp
from eval.rules.load import load_run
from eval.rules.scores_agree import scores_disagree
from eval.tasks.readers import read_file
from eval.verify import Means, verify_run

Change = Callable[[Path], None]
Rows = list[dict[str, Any]]


def record(change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of record.json."""

    def forge(run: Path) -> None:
        path = run / "record.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return forge


def put(path: str, value: Any) -> Change:
    """`value` (or a function of the old one) at a place of record.json, such as `pretrain.budget.limit`."""

    def change(node: Any) -> None:
        *keys, last = path.split(".")
        for key in keys:
            node = node[key]
        node[last] = value(node[last]) if callable(value) else value

    return record(change)


def settings(path: str, value: Any, *, in_record: bool = True) -> Change:
    """The same of config.yaml, and of the record's copy."""

    def forge(run: Path) -> None:
        file = run / "config.yaml"
        found = node = yaml.safe_load(file.read_text())
        *keys, last = path.split(".")
        for key in keys:
            node = node[key]
        node[last] = value
        file.write_text(yaml.safe_dump(found))
        if in_record:
            put(f"config.{path}", value)(run)

    return forge


def lines(name: str, change: Callable[[Rows], Rows | None]) -> Change:
    """A change of a file of JSON lines; where they are linked, linked anew, and named by the record."""

    def forge(run: Path) -> None:
        path = run / name
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        changed, previous, text = change(rows) or rows, "", b""
        for row in changed:
            linked = {**row, "previous": previous} if "previous" in row else row
            line = json.dumps(linked).encode()
            previous, text = hashlib.sha256(line).hexdigest(), text + line + b"\n"
        path.write_bytes(text)
        if name == "budget.jsonl":
            put("pretrain.budget.journal_sha256", file_sha256(path))(run)
            put("pretrain.journal_start", first_line_sha256(path))(run)
        elif name == "glue/history.jsonl":
            put("history", stamp(path))(run)

    return forge


def environment(path: str, value: Any) -> Change:
    """A value of the first process's environment, in both files that have it."""

    def change(found: dict[str, Any]) -> None:
        *keys, last = path.split(".")
        for key in keys:
            found = found[key]
        found[last] = value

    return both(as_json(E, change), put(f"environment.{path}", value))


def every(name: str, key: str, value: Callable[[Any], Any]) -> Change:
    """A field of each line that has it."""

    def change(rows: Rows) -> None:
        for row in rows:
            if row.get(key) is not None:
                row[key] = value(row[key])

    return lines(name, change)


def one(name: str, place: int, **values: Any) -> Change:
    """Fields of one line."""
    return lines(name, lambda rows: rows[place].update(values))


def both(*changes: Change) -> Change:
    """One after the other."""

    def forge(run: Path) -> None:
        for change in changes:
            change(run)

    return forge


def score(by: float, *, only_score: bool = False) -> Change:
    """SST-2 better by so much, with its seeds, statistics and averages."""

    def change(found: dict[str, Any]) -> None:
        section = found["glue"]["pretrained"]
        task = section["tasks"]["sst2"]
        task["score"] += 100 * by
        if not only_score:
            for metric in task["metrics"].values():
                metric["per_seed"] = [value + by for value in metric["per_seed"]]
                for name in ("median", "mean"):
                    metric[name] += by
                metric["mean_ci95"] = [end + by for end in metric["mean_ci95"]]
        for average in section["averages"].values():
            if average["value"] is not None:
                average["value"] = statistics.fmean(t["score"] for t in section["tasks"].values())

    return record(change)


def file(name: str, change: Callable[[bytes], bytes]) -> Change:
    """The bytes of a file."""
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes())) and None


def as_json(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """A file of JSON."""

    def edit(content: bytes) -> bytes:
        found = json.loads(content)
        change(found)
        return json.dumps(found).encode()

    return file(name, edit)


def without(name: str) -> Change:
    """The file is gone."""
    return lambda run: (run / name).unlink()


def flip(content: bytes) -> bytes:
    """One bit in the middle."""
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def halves(rows: Rows) -> None:
    """Every time of the journal halved."""
    for row in rows:
        for key in ("elapsed", "last_step_seconds"):
            if key in row:
                row[key] /= 2


def predictions(change: Callable[[str, int, dict[str, np.ndarray]], object]) -> Change:
    """A change of the arrays of each task and seed, whose hash is mended in pieces and history."""

    def forge(run: Path) -> None:
        def edit(line: dict[str, Any]) -> None:
            task, seed = line["task"], line["seed"]
            place = run / "glue" / "pretrained" / "predictions" / f"{task}-seed{seed}.npz"
            with np.load(place) as found:
                arrays = dict(found)
            change(task, seed, arrays)
            np.savez_compressed(place, **arrays)  # type: ignore[arg-type]
            line["predictions_sha256"] = file_sha256(place)
            piece = run / "glue" / "pretrained" / "pieces" / f"{task}-seed{seed}.json"
            as_json(
                str(piece.relative_to(run)),
                lambda p: p.update(predictions_sha256=file_sha256(place)),
            )(run)

        lines(H, lambda rows: [edit(row) for row in rows] and None)(run)

    return forge


def metrics(change: Callable[[str, str, float], float]) -> Change:
    """Another value of metrics, by entry and name: in each piece and the history, with all that follows from it in the
    record and glue.json. The predictions stay."""

    def forge(run: Path) -> None:
        place = run / "glue" / "pretrained"
        for file in place.glob("pieces/*.json"):
            found = json.loads(file.read_text())
            for entry, of in found["entries"].items():
                of["metrics"] = {
                    n: v if v is None else change(entry, n, v) for n, v in of["metrics"].items()
                }
            file.write_text(json.dumps(found))

        def rescored(rows: Rows) -> None:
            for row in rows:
                piece = json.loads(
                    (place / "pieces" / f"{row['task']}-seed{row['seed']}.json").read_text()
                )
                row["scores"] = {
                    entry: of["metrics"][GLUE[row["task"]].main_metric]
                    for entry, of in piece["entries"].items()
                }

        lines(H, rescored)(run)
        for name in ("record.json", "glue/pretrained/glue.json"):
            as_json(
                name,
                lambda found: summed_up(found.get("glue", {}).get("pretrained", found), change),
            )(run)

    return forge


def summed_up(section: dict[str, Any], change: Callable[[str, str, float], float]) -> None:
    """The section with other values of seeds, and what the suite makes of them."""
    for entry, task in section["tasks"].items():
        for name, found in task["metrics"].items():
            found.update(
                spread([v if v is None else change(entry, name, v) for v in found["per_seed"]])
            )
        task["score"] = 100 * task["metrics"][task["main_metric"]]["median"]
    scores = {entry: task["score"] for entry, task in section["tasks"].items()}
    for average in section["averages"].values():
        average["value"] = statistics.fmean(scores[entry] for entry in average["tasks"])


def in_record_and_glue(change: Callable[[dict[str, Any]], object]) -> Change:
    """Of each task of the section, in both files."""

    def edit(found: dict[str, Any]) -> None:
        for task in found.get("glue", {}).get("pretrained", found)["tasks"].values():
            change(task)

    return both(as_json("record.json", edit), as_json("glue/pretrained/glue.json", edit))


def best_seed_for_all(run: Path) -> None:
    """The files of seed 0 of each task become those of all, under keys of their own, and all numbers follow."""
    place = run / "glue" / "pretrained"
    for file in place.glob("pieces/*-seed[12].json"):
        own, best = json.loads(file.read_text()), f"{file.stem[:-1]}0"
        found = json.loads((place / "pieces" / f"{best}.json").read_text())
        file.write_text(json.dumps({**found, "key": own["key"]}))
        shutil.copy(
            place / "predictions" / f"{best}.npz", place / "predictions" / f"{file.stem}.npz"
        )
    first = {
        (entry, name): value
        for file in place.glob("pieces/*-seed0.json")
        for entry, of in json.loads(file.read_text())["entries"].items()
        for name, value in of["metrics"].items()
    }
    predictions(lambda *_: None)(run)
    metrics(lambda entry, name, _: first[entry, name])(run)


def made_from_labels(run: Path) -> None:
    """Predictions of SST-2 that are right, and its values 1 in every file."""
    tasks = Path(json.loads((run / "record.json").read_text())["corpus"]["folder"]) / "tasks"
    labels = read_file(
        tasks / "SST-2" / "dev.tsv", GLUE["sst2"], GLUE["sst2"].scored[0], labelled=True
    ).labels
    predictions(
        lambda task, _, arrays: arrays.update({"dev.sst2": labels}) if task == "sst2" else None
    )(run)
    metrics(lambda entry, _, value: 1.0 if entry == "sst2" else value)(run)


def raised(by: float = 0.01, entries: Collection[str] = ("rte", "sst2")) -> Change:
    """Some scores, in every file that has them; by a whole number of the 400 examples."""
    return metrics(lambda entry, _, value: value + by if entry in entries else value)


def listed_elsewhere(run: Path) -> None:
    """The list of the files of a submission, signed, names other checkpoints than the journal; none is there."""
    (run / "files.json").write_bytes(
        _text(
            _signed(
                {
                    **list_of(run),
                    "outside": {"checkpoints/step-00000050.pt": {"bytes": 9, "sha256": "ab" * 32}},
                }
            )
        )
    )
    shutil.rmtree(run / "checkpoints")


def lower_curve(run: Path) -> None:
    """Losses lower by a tenth in every file."""
    names = ("loss", "validation_loss", "validation_all_mask_loss")
    for name in names:
        every(M, name, lambda v: 0.9 * v)(run)
    every(M, "each_loss", lambda losses: [0.9 * loss for loss in losses])(run)
    every(M, "validation_bits_per_byte", lambda v: 0.9 * v)(run)
    last = [json.loads(line) for line in (run / M).read_text().splitlines()]
    put(P + "train_loss", [row["loss"] for row in last if "loss" in row][-1])(run)
    for name in ("loss", "all_mask_loss", "bits_per_byte"):
        put(P + f"validation.{name}", last[-1].get(f"validation_{name}", lambda v: 0.9 * v))(run)


def as_of_an_older_version(run: Path) -> None:
    """Without what versions before 2026-11-25 did not write."""
    lines(B, lambda rows: [row.pop("setup", None) for row in rows] and None)(run)
    lines(M, lambda rows: [rows[-1].pop(key) for key in list(rows[-1]) if key in WHOLE] and None)(
        run
    )
    (run / "corpus.json").unlink()


def other_weights(run: Path) -> None:
    """In final/, with their hash wherever that of the others was."""
    path = run / "final" / "model.safetensors"
    was = file_sha256(path)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    for name in ("record.json", "glue/pretrained/glue.json"):
        file(name, lambda text: text.replace(was.encode(), file_sha256(path).encode()))(run)
    every(H, "model_sha256", lambda _: file_sha256(path))(run)


B, M, H, E = "budget.jsonl", "metrics.jsonl", "glue/history.jsonl", "environment.json"
WHOLE = [f"validation_{name}" for name in ("all_mask_loss", "all_mask_accuracy", "bits_per_byte")]
P, G = "pretrain.", "glue.pretrained."
AWAY = put("corpus.folder", "on no machine of the verifier's")
PIECE = "glue/pretrained/pieces/sst2-seed0.json"
PREDICTIONS = "glue/pretrained/predictions/sst2-seed0.npz"
TASK: Mapping[str, str] = {"rte": G + "tasks.rte.", "sst2": G + "tasks.sst2."}

FORGERIES: dict[str, Change] = {
    # scores
    "score above its seeds": score(0.05, only_score=True),
    "seeds and averages raised alike": score(0.05),
    "seeds above one": score(1.0),
    "an average raised": record(
        lambda r: [
            a.update(value=(a["value"] or 0) + 5)
            for a in r["glue"]["pretrained"]["averages"].values()
        ]
    ),
    "the mean over seeds": put(TASK["sst2"] + "metrics.accuracy.mean", lambda v: v + 0.02),
    "the deviation hidden": put(TASK["sst2"] + "metrics.accuracy.std", 0.0),
    "the interval": put(TASK["sst2"] + "metrics.accuracy.mean_ci95", [0.9, 0.91]),
    "another main metric": put(G + "tasks.mrpc.main_metric", "accuracy"),
    "another definition of the average": record(
        lambda r: [
            a.update(definition="the best task")
            for a in r["glue"]["pretrained"]["averages"].values()
        ]
    ),
    "a bad task left out": record(lambda r: r["glue"]["pretrained"]["tasks"].pop("rte")),
    "two tasks exchanged": record(
        lambda r: r["glue"]["pretrained"]["tasks"].update(
            rte=r["glue"]["pretrained"]["tasks"]["qnli"]
        )
    ),
    "a test split": put(G + "split", "test"),
    "another suite": put(G + "suite", "glue"),
    "not a number": put(TASK["rte"] + "score", float("nan")),
    # seeds and selection
    "best seed three times": record(
        lambda r: [
            m.update(per_seed=[max(m["per_seed"])] * 3)
            for t in r["glue"]["pretrained"]["tasks"].values()
            for m in t["metrics"].values()
        ]
    ),
    "seeds renamed": put(G + "seeds", [3, 5, 8]),
    "one seed twice": put(G + "seeds", [0, 1, 1]),
    "one seed only": put(G + "seeds", [0]),
    "the best epoch": put(TASK["rte"] + "scored_epochs", [0, 0, 0]),
    "more epochs than stated": put(G + "hyperparameters.epochs", 0),
    "other hyperparameters for a task": put(
        TASK["rte"] + "hyperparameters", lambda v: {**v, "learning_rate": 1.0}
    ),
    "another learning rate": put(G + "hyperparameters.learning_rate", 0.5),
    "another selection": put(G + "selection", "best epoch"),
    # history
    "history without its first line": lines(H, lambda rows: rows[1:]),
    "history of one seed": lines(H, lambda rows: [row for row in rows if row["seed"] == 0]),
    "history with better scores": lines(
        H,
        lambda rows: (
            [row["scores"].update(dict.fromkeys(row["scores"], 0.99)) for row in rows] and None
        ),
    ),
    "history of other weights": every(H, "model_sha256", lambda _: "ab" * 32),
    "history of other predictions": every(H, "predictions_sha256", lambda _: "cd" * 32),
    "history before the run": every(H, "time", lambda _: "2020-01-01T00:00:00+00:00"),
    "history out of order": lines(H, lambda rows: rows[::-1]),
    "history gone": without(H),
    "history with a changed byte": file(H, flip),
    "a worse outcome taken out": lines(
        H, lambda rows: [*rows, {**rows[0], "scores": dict.fromkeys(rows[0]["scores"], 0.1)}]
    ),
    # predictions and pieces
    "predictions changed": file(PREDICTIONS, flip),
    "predictions gone": without(PREDICTIONS),
    "a piece with a better value": as_json(
        PIECE, lambda p: p["entries"]["sst2"]["metrics"].update(accuracy=0.99)
    ),
    "a piece of other predictions": as_json(
        PIECE, lambda p: p.update(predictions_sha256="ef" * 32)
    ),
    "a piece of another epoch": as_json(PIECE, lambda p: p.update(epoch=7)),
    "glue.json with other scores": as_json(
        "glue/pretrained/glue.json", lambda g: g["tasks"]["sst2"].update(score=99.0)
    ),
    "glue.json of another model": as_json(
        "glue/pretrained/glue.json", lambda g: g.update(model_sha256="ab" * 32)
    ),
    # journal and clock
    "clock halved": lines(B, halves),
    "clock halved, the record's too": both(
        lines(B, halves), put(P + "budget.spent_seconds", lambda v: v / 2)
    ),
    "heartbeats deleted": lines(
        B, lambda rows: [row for row in rows if row["event"] != "heartbeat"]
    ),
    "last line deleted": lines(B, lambda rows: rows[:-1]),
    "first line deleted": lines(B, lambda rows: rows[1:]),
    "two lines exchanged": lines(B, lambda rows: [rows[0], rows[2], rows[1], *rows[3:]]),
    "a line changed": file(B, lambda text: text.replace(b'"steps": 60', b'"steps": 61')),
    "more steps at the end": one(B, -1, steps=600),
    "fewer tokens at the end": one(B, -1, tokens=7),
    "less compute at the end": one(B, -1, flops=1.0, charged_flops=1.0),
    "elapsed time falls": one(B, -1, elapsed=0.1),
    "wall clock of another year": every(B, "wall", lambda w: w - 4e7),
    "wall clock at twice the speed": lines(
        B,
        lambda rows: (
            [
                row.update(wall=rows[0]["wall"] + 2 * (row["wall"] - rows[0]["wall"]) + 0.0)
                for row in rows[1:]
            ]
            and None
        ),
    ),
    "another limit in the journal": one(B, 0, limit=600.0),
    "another unit in the journal": one(B, 0, unit="tokens"),
    "another corpus in the journal": one(B, 0, corpus="ab" * 32),
    "a checkpoint of another file": lines(
        B,
        lambda rows: (
            [row.update(sha256="ab" * 32) for row in rows if row["event"] == "checkpoint"] and None
        ),
    ),
    "a resume that was not": lines(
        B, lambda rows: [*rows[:3], {**rows[2], "event": "resume", "sha256": "ab" * 32}, *rows[3:]]
    ),
    "training after the end": lines(
        B, lambda rows: [*rows, {**rows[-1], "event": "heartbeat", "steps": rows[-1]["steps"] + 9}]
    ),
    "ended otherwise": one(B, -1, reason="stopped"),
    "journal gone": without(B),
    "journal of no lines": file(B, lambda _: b""),
    "journal with CRLF": file(B, lambda text: text.replace(b"\n", b"\r\n")),
    # budget and work on record
    "a longer limit": put(P + "budget.limit", 600),
    "a longer limit everywhere but the journal": both(
        put(P + "budget.limit", 600), settings("budget.steps", 600)
    ),
    "another unit": put(P + "budget.unit", "hours"),
    "less spent": put(P + "budget.spent", 10),
    "less time": put(P + "budget.spent_seconds", 0.01),
    "an overrun": put(P + "budget.overrun_seconds", 12.0),
    "an overrun hidden as null": put(P + "budget.overrun_seconds", None),
    "no processes": put(P + "budget.processes", []),
    "fewer steps": put(P + "steps", 6),
    "more tokens": put(P + "tokens", lambda v: 10 * v),
    "more compute": put(P + "exaflops", lambda v: 10 * v),
    "fewer sequences": put(P + "sequences", 1),
    "fewer rounds of the corpus": put(P + "corpus_epochs", lambda v: 0.96 * v),
    "fewer parameters": put(P + "parameters", 1000),
    "fewer without embeddings": put(P + "parameters_without_embeddings", 10),
    "a status": put(P + "status", "interrupted"),
    "a speed that no device has": both(
        put(P + "tokens_per_second", 1e12), every(M, "tokens_per_second", lambda _: 1e12)
    ),
    "training as fast as light": both(
        every(M, "seconds", lambda v: v / 1e9),
        every(B, "last_step_seconds", lambda v: v / 1e9),
        put(P + "budget.spent_seconds", 1e-9),
    ),
    "a lower final loss": put(P + "train_loss", 0.5),
    "a lower validation loss": put(P + "validation.loss", 0.5),
    "a better accuracy": put(P + "validation.accuracy", 1.2),
    "fewer bits": put(P + "validation.bits_per_byte", lambda v: 0.98 * v),
    "fewer than no bits": put(P + "validation.bits_per_byte", -1.0),
    "a lower loss behind [MASK]": put(P + "validation.all_mask_loss", lambda v: 0.98 * v),
    "more accurate behind [MASK]": put(P + "validation.all_mask_accuracy", lambda v: 0.5 * v),
    "fewer bits, and no witness": both(
        put(P + "validation.bits_per_byte", lambda v: 0.98 * v),
        lines(M, lambda rows: [rows[-1].pop(key) for key in WHOLE] and None),
    ),
    "another learning rate on record": put(P + "peak_learning_rate", 1.0),
    "skipped steps below none": put(P + "sequences", -8),
    # metrics
    "a smoother curve": every(M, "lr", lambda v: 0.5 * v + 1e-4),
    "a row less": lines(M, lambda rows: rows[1:]),
    "the last row lower": lines(
        M,
        lambda rows: (
            [row.update(loss=0.1) for row in rows if row.get("step") == 60 and "loss" in row]
            and None
        ),
    ),
    "steps counted twice": every(M, "step", lambda v: 2 * v),
    "tokens counted twice": every(M, "tokens", lambda v: 2 * v),
    "progress shifted": every(M, "progress", lambda v: v / 2),
    "time falls": one(M, -2, seconds=0.0),
    "accuracy above one": every(M, "accuracy", lambda _: 1.5),
    "negative losses": every(M, "loss", lambda v: -v),
    "last validation lower": every(M, "validation_loss", lambda v: v - 1),
    "metrics gone": without(M),
    # configuration
    "another seed": settings("seed", 7),
    "another objective": put(P + "objective", "rtd"),
    "another model": settings("model.num_layers", 12),
    "another batch": settings("train.batch_size", 64),
    "longer sequences": settings("train.sequence_length", 512),
    "another schedule": settings("schedule", {"name": "constant", "start": 0.0, "warmup": 0.0}),
    "a higher rate": settings("optim.lr", 1.0),
    "a higher rate for the batch": settings("optim.lr_scale", {"rule": "linear", "base_batch": 2}),
    "bf16 that was fp32": settings("precision.mode", "bf16"),
    "another budget": settings("budget.steps", 6000),
    "only the file": settings("model.num_layers", 12, in_record=False),
    "only the record": put("config.model.num_layers", 12),
    "config gone": without("config.yaml"),
    "pretrained weights": put(P + "start", "checkpoint"),
    # identity, machine, code, data
    "zeros for the journal's hash": put(P + "budget.journal_sha256", "0" * 64),
    "zeros for the weights": both(
        put(P + "final_sha256", "0" * 64), put(G + "model_sha256", "0" * 64)
    ),
    "zeros for the corpus": put("corpus.manifest_sha256", "0" * 64),
    "no hash for the predictions": put("history.sha256", None),
    "another model scored": put(G + "model_sha256", "ab" * 32),
    "weights exchanged": file("final/model.safetensors", flip),
    "tokenizer exchanged": file("final/tokenizer.json", flip),
    "weights named twice": put(P + "final_files", lambda v: {**v, "model.safetensors": "ab" * 32}),
    "another machine": put("environment.device.name", "RTX 2080 Ti"),
    "another machine, and its file gone": both(
        put("environment.device.name", "RTX 2080 Ti"), without(E)
    ),
    "another commit, and the machine's file gone": both(
        put("environment.git.commit", "feed" * 10), without(E)
    ),
    "another machine in both files": environment("device.name", "RTX 2080 Ti"),
    "another commit in both files": environment("git.commit", "feed" * 10),
    "the machine as a second one": both(
        record(lambda r: r.update(resumed=[r["environment"]])),
        environment("device.name", "RTX 2080 Ti"),
    ),
    "another machine, as of an older version": both(
        environment("device.name", "RTX 2080"), as_of_an_older_version
    ),
    "another kind of device": put("environment.device.kind", "cuda"),
    "many devices": put(P + "devices", 8),
    "clean code that was not": put("environment.git.changed", ["cramming/engine.py"]),
    "another commit": put("environment.git.commit", "feedfeedfeedfeedfeed"),
    "dirty code": put("environment.git.dirty", True),
    "forced checks": put(P + "forced", ["fp8"]),
    "another name": put("name", "somebody else's"),
    "one target more": put(P + "validation.targets", lambda v: v + 1),
    "one target less": put(P + "validation.targets", lambda v: v - 1),
    "GLUE among the sources": record(
        lambda r: r["corpus"]["sources"].append({**r["corpus"]["sources"][0], "name": "GLUE/SST-2"})
    ),
    "no licence": record(
        lambda r: [source.update(license=None) for source in r["corpus"]["sources"]]
    ),
    "a corpus that was written to": put("corpus.changed", {"train-00000.bin": "overwritten"}),
    "an older format": put("format", 0),
    "rules of old": put("rules_version", "1"),
    "rules to come": put("rules_version", "99"),
    "embedded tasks called official": record(
        lambda r: [
            t.update(subset=False, official_train_examples=t["train_examples"])
            for t in r["glue"]["pretrained"]["tasks"].values()
        ]
    ),
    # scores, in every file
    "a score raised in every file": raised(),
    "scored with other labels": metrics(lambda entry, _, value: 0.9 if entry == "stsb" else value),
    "predictions in another order": predictions(
        lambda task, seed, arrays: arrays.update(
            {name: values[::-1] for name, values in arrays.items()}
        )
    ),
    "MNLI's two sets exchanged": predictions(
        lambda task, seed, arrays: (
            arrays.update(
                {
                    "dev.mnli_matched": arrays["dev.mnli_mismatched"],
                    "dev.mnli_mismatched": arrays["dev.mnli_matched"],
                }
            )
            if task == "mnli"
            else None
        )
    ),
    "fewer examples": both(
        predictions(
            lambda task, seed, arrays: arrays.update(
                {name: values[:200] for name, values in arrays.items()}
            )
        ),
        in_record_and_glue(lambda task: task.update(eval_examples=200)),
    ),
    "the best seed's files for all": best_seed_for_all,
    "another generator, and scores raised": both(
        record(lambda r: [source.update(sha256="ab" * 32) for source in r["corpus"]["sources"]]),
        raised(),
    ),
    "predictions that are not finite, and their scores": predictions(
        lambda task, seed, arrays: (
            arrays[f"dev.{task}"].put(0, math.nan) if task in ("sst2", "stsb") else None
        )
    ),
    "predictions made from the labels": made_from_labels,
    # training, in every file
    "a checkpoint exchanged on the disk": file("checkpoints/step-00000050.pt", flip),
    "other checkpoints in the list of files": listed_elsewhere,
    "a corpus described otherwise": put("corpus.documents", 10**6),
    "a corpus that is not there, described otherwise": both(AWAY, put("corpus.documents", 10**6)),
    "such a corpus, described otherwise in its manifest too": both(
        AWAY,
        put("corpus.removed", {"empty": 1}),
        as_json("corpus.json", lambda m: m.update(removed={"empty": 1})),
    ),
    "such a corpus, and its manifest gone": both(
        AWAY, put("corpus.documents", 10**6), without("corpus.json")
    ),
    "other weights in every file": other_weights,
    "validated on more text": both(
        put(P + "validation.tokens", 5120),
        put(P + "validation.targets", lambda v: 10 * v),
        every(M, "validation_tokens", lambda _: 5120),
    ),
    "one loss of each row lower": every(
        M, "each_loss", lambda losses: [losses[0] - 0.5, *losses[1:]]
    ),
    "one accuracy of each row higher": every(
        M, "each_accuracy", lambda shares: [shares[0] + 0.1, *shares[1:]]
    ),
    "a rate a little lower": every(M, "lr", lambda v: 0.999 * v),
    "a lower curve in every file": lower_curve,
}

ROOT = Path(__file__).parents[2]
MISSED = (
    "predictions made from the labels",
    "a lower curve in every file",
    "other weights in every file",
    "another machine, as of an older version",
)


def test_what_is_missed_is_little_and_written_down() -> None:
    rules = " ".join((ROOT / "docs" / "rules.md").read_text(encoding="utf-8").split())
    assert len(FORGERIES) >= 100 and len(MISSED) <= 0.05 * len(FORGERIES)
    assert all(f"*{name}*" in rules for name in MISSED)


@pytest.fixture
def copied(honest_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest_run, tmp_path / "honest")


def test_the_honest_run_is_of_the_closed_division(honest_run: Path, means: Means) -> None:
    found = verify_run(honest_run, means)
    assert found.in_order and found.division == "closed", (found.problems, found.findings)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_run_is_not_of_the_closed_division(name: str, copied: Path, means: Means) -> None:
    FORGERIES[name](copied)
    found = verify_run(copied, means)
    assert (bool(found.problems) or found.division != "closed") == (name not in MISSED)


def test_no_score_is_of_predictions_that_are_not_finite(copied: Path) -> None:
    """Of classes or numbers, whether the labels are at hand or not."""
    FORGERIES["predictions that are not finite, and their scores"](copied)
    found = " ".join(scores_disagree(copied, load_run(copied).record))
    assert all(
        f"{task}-seed0.npz has predictions of {task} that are not finite" in found
        for task in ("sst2", "stsb")
    )


def test_each_word_of_the_record_on_its_corpus_has_a_witness(copied: Path) -> None:
    """corpus.json, where the corpus itself is not at hand: whatever `Corpus.describe` puts into a record."""
    file = copied / "record.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    told = record["corpus"].keys() - {"folder", "manifest_sha256", "validation", "changed"}
    assert {"sources", "settings", "documents"} <= told
    for key in told:
        file.write_text(
            json.dumps({**record, "corpus": {**record["corpus"], key: None}}), encoding="utf-8"
        )
        assert any(
            problem.startswith("corpus.json: ")
            for problem in load_run(copied).record.contradictions or ()
        ), key

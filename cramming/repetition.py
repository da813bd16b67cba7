"""Steps of a recorded run done once more, and what they give held against the record (the verb `replay`).

Everything is done by the code that trained: the state is built, or loaded from its checkpoint, as for a resume, and the
loop is that of `pretrain`, by a clock that repeats the progress on record. Files go to a temporary folder.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from cramming import checkpoint
from cramming import device as devices
from cramming.bench.gate import LEAST, MULTIPLE, REPETITIONS, WINDOW, NoiseFloor, distances, judge
from cramming.bench.tricks import COARSE, SAME, Trick
from cramming.bench.worker import perturb
from cramming.checks import Config
from cramming.config import file_sha256, require
from cramming.data.batches import PINNED
from cramming.finish import export, take_average, validate_fully
from cramming.journal import Saved
from cramming.parallel.mesh import Mesh
from cramming.parallel.offload import HostOptimizer
from cramming.pretrain import train
from cramming.record import MetricsLog, load_metrics
from cramming.recorded import RecordedClock, RecordedRun, Segment
from cramming.train_state import RunData, TrainState, environment_here, fit_to_corpus, start_engine

SAME_BITS = (
    "cpu",
    "torch",
    "threads",
)  # of the environment: where these are the same, a CPU gives the same bits
HOW = (
    "attention",
    "memory",
    "runtime",
    "parallel",
)  # sections that say how it is computed, not what
WORK = (
    "steps",
    "sequences",
    "tokens",
    "flops",
    "skipped_steps",
)  # of a checkpoint's counters: those not of time
# Of a validation: the loss that the run is judged by, one of two, and what is made of it for other runs.
LOSSES = ("loss", "replaced_token_loss")
VALIDATED = (*LOSSES, "all_mask_loss", "bits_per_byte")
Tensors = dict[str, Tensor]


@dataclass
class Outcome:
    """What came out of one comparison: mean loss in nats, recorded and replayed, the largest difference of a step, and
    what was allowed there. `state`: of weights and optimizer at the end; `problems`: what shows another training."""

    what: str
    steps: int = 0
    recorded: float | None = None
    replayed: float | None = None
    difference: float | None = None
    allowed: float = 0.0
    state: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Repetition:
    """Steps done once more: the log's row of each, validations by step, and the state at the end if it compares."""

    rows: dict[int, dict[str, Any]]
    validations: dict[int, dict[str, Any]]
    state: Tensors

    @property
    def losses(self) -> list[float]:
        """Of each step."""
        return [_number(row["loss"]) for row in self.rows.values()]


@dataclass(frozen=True)
class Replay:
    """What all comparisons share. `rounding`: by which the weights of repetitions are perturbed, from which tolerances
    are measured; None where all is to be the same bit for bit."""

    run: RecordedRun
    config: Config
    data: RunData
    device: torch.device
    rounding: float | None
    how: str

    @classmethod
    def of(cls, run: RecordedRun, settings: Mapping[str, Any]) -> "Replay":
        """By the run's own settings. UserError where its corpus is not here, or is another, and where one process here
        has other numbers than the run's."""
        device = devices.select(settings["device"])
        differing = ", ".join(differences_of_place(run, device))
        refuse_other_numbers(run, device)
        own = settings_of(run, settings, HOW if differing and not has_dropout(run) else ())
        config = Config.of(own)
        data = RunData.open(own, config, verify=True)
        for was, now in zip(_corpora(run.record["corpus"]), _corpora(data.describe()), strict=True):
            require(
                was.get("manifest_sha256") == now.get("manifest_sha256"),
                f"{now.get('folder')}: not the corpus of the run in {run.folder} (its manifest differs); give that one"
                " with data.corpus=<folder> (or train.validation_corpus)",
            )
        config = replace(config, model=fit_to_corpus(config.model, data.corpus))
        if not differing:
            return cls(run, config, data, device, None, "compared bit for bit")
        is_fp32 = config.precision.mode == "fp32" and not config.precision.tf32
        how = f"compared within a measured tolerance, as this place differs: {differing}"
        return cls(run, config, data, device, SAME if is_fp32 else COARSE, how)

    @property
    def repetitions(self) -> int:
        """How many times each step is done."""
        return 1 if self.rounding is None else 1 + REPETITIONS

    def outcome(self, segment: Segment) -> Outcome:
        """Of one segment."""
        begins = f"after step {segment.start.steps}" if segment.start else "from the seed"
        found = Outcome(begins, segment.last - segment.first + 1)
        if segment.start and (altered := self._altered(segment.start)):
            found.problems.append(altered)
            return found
        once, *twins = (self.repeat(segment, twin) for twin in range(self.repetitions))
        if found.steps:
            allowed = self._compare_losses(found, segment, once, twins)
            found.problems += self._other_rows(segment, once)
            found.problems += self._other_validations(segment, once, allowed)
        if segment.end:
            self._compare_state(found, segment.end, once, twins)
        return found

    def end(self) -> list[Outcome]:
        """What the run's last checkpoint gives: the validation on record, and the weights of final/."""
        section, run = self.run.record["pretrain"], self.run
        saved = next((saved for saved in run.checkpoints if saved.steps == run.last), None)
        if not section.get("validation"):
            return []
        found = Outcome("final/ and its validation")
        if saved is None or not run.path_of(saved).exists():
            found.state = "not compared: no last checkpoint"
            return [found]
        if altered := self._altered(saved):
            return [replace(found, problems=[altered])]
        (again, exported), *twins = (self._finish(saved, twin) for twin in range(self.repetitions))
        recorded = section["validation"]
        found.recorded, found.replayed = _validation_loss(recorded), _validation_loss(again)
        apart = {name: _apart(recorded.get(name), again.get(name)) for name in VALIDATED}
        allowed = dict.fromkeys(VALIDATED, 0.0)
        if self.rounding is not None:
            each = [twin for twin, _ in twins]
            allowed = {
                name: _allowed([_apart(twin.get(name), again.get(name)) for twin in each])
                for name in VALIDATED
            }
        found.difference, found.allowed = max((apart[name], allowed[name]) for name in LOSSES)
        is_near = all(apart[name] <= allowed[name] for name in VALIDATED)
        if not is_near or (self.rounding is None and again != recorded):
            found.problems.append(
                f"record.json has the validation {recorded}, the last checkpoint gives {again}"
            )
        found.state = "equal" if exported == section.get("final_sha256") else "differs"
        if found.state != "equal":
            found.problems.append(
                "model.safetensors on record is not what the last checkpoint gives"
            )
        weights = run.folder / "final" / "model.safetensors"
        if weights.exists() and file_sha256(weights) != exported:
            found.problems.append(f"{weights} is not what the last checkpoint gives")
        return [found]

    def repeat(self, segment: Segment, twin: int = 0) -> Repetition:
        """Do the steps, and the validations that the log has among them; a `twin` begins with perturbed weights."""
        validated = [
            s
            for s in self.run.validations
            if segment.first <= s <= segment.last and s != self.run.last
        ]
        title = f"replay {segment.first}-{segment.last}"
        with TemporaryDirectory(prefix="cramming-replay-") as scratch:
            state = self._state_at(segment.start, Path(scratch), twin)
            for state.clock.last in sorted({*validated, segment.last}):  # type: ignore[union-attr]
                train(
                    state, lambda: False, title
                )  # a signal ends it at once: nothing is to be saved
                if state.work.steps in validated:
                    state.validate(self.run.validations[state.work.steps]["progress"])
            log = load_metrics(state.folder)
            contents = checkpoint.contents(state.engine, state.work)
        rows = {row["step"]: row for row in log if "loss" in row}
        validations = {row["step"]: row for row in log if "loss" not in row}
        return Repetition(rows, validations, _tensors_in(contents) if segment.end else {})

    def _finish(self, saved: Saved, twin: int) -> tuple[dict[str, Any], str]:
        with TemporaryDirectory(prefix="cramming-replay-") as scratch:
            state = self._state_at(saved, Path(scratch), twin)
            take_average(state)
            return validate_fully(state), export(state)["model.safetensors"]

    def _state_at(self, start: Saved | None, folder: Path, twin: int) -> TrainState:
        """The state that a process of the run would begin with."""
        mesh, config = Mesh.solo(self.device), self.config
        saved = self.run.path_of(start) if start else None
        engine, work = start_engine(config, self.data, folder, mesh, self.device, saved)
        if twin:
            assert self.rounding is not None
            perturb(engine.parameters, self.rounding, twin)
            if isinstance(engine.optimizer, HostOptimizer):
                engine.optimizer.take_weights()
        clock = RecordedClock(config.budget, work, self.run.steps)
        validation = self.data.held_out.batches(PINNED, config.train.rows)
        return TrainState(
            folder,
            config,
            mesh,
            self.data,
            engine,
            work,
            work.steps,
            [],
            {},
            clock,
            MetricsLog(folder),
            validation,
        )

    def _altered(self, saved: Saved) -> str | None:
        """What to say of a checkpoint that is not there, or not the journal's."""
        path = self.run.path_of(saved)
        if not path.exists():
            return f"{path.parent} has no checkpoint of step {saved.steps}, which the journal has; put it back"
        return (
            None
            if file_sha256(path) == saved.sha256
            else f"{path} is not the file that the journal has (SHA-256)"
        )

    def _compare_losses(
        self, found: Outcome, segment: Segment, once: Repetition, twins: Sequence[Repetition]
    ) -> list[float]:
        """What is allowed in each window of steps, in nats."""
        recorded = [
            _number(self.run.loss_of(step)) for step in range(segment.first, segment.last + 1)
        ]
        replayed = once.losses
        found.recorded, found.replayed = (
            sum(recorded) / len(recorded),
            sum(replayed) / len(replayed),
        )
        each = [0.0 if a == b else abs(a - b) for a, b in zip(recorded, replayed, strict=True)]
        if self.rounding is None:
            found.difference = max(each)
            at, passed = each.index(found.difference) + segment.first, not any(each)
            allowed = [0.0] * len(each)
        else:
            # Of steps that both sides skipped nothing is compared.
            skipped = {n for n, (a, b) in enumerate(zip(recorded, replayed)) if a == b == math.inf}
            reference, *others, claimed = (
                [0.0 if step in skipped else loss for step, loss in enumerate(losses)]
                for losses in (replayed, *(t.losses for t in twins), recorded)
            )
            if not all(map(math.isfinite, reference)):
                found.problems.append(
                    "replayed, the loss of a step is not finite where the log's is"
                )
                return [math.inf] * len(reference)
            floor = NoiseFloor(self.rounding, [distances(reference, other) for other in others])
            allowed = floor.tolerance()
            verdict = judge(Trick("replay", {}, self.rounding, ""), reference, claimed, floor)
            found.difference, found.allowed, passed = (
                verdict.distance,
                verdict.tolerance,
                verdict.passed,
            )
            at = segment.first - 1 + verdict.at_step
        if not passed:
            found.problems.append(
                f"the losses differ most at step {at}, by {found.difference} nats"
            )
        return allowed

    def _other_rows(self, segment: Segment, once: Repetition) -> Iterator[str]:
        """What else the log says of the steps."""
        for step, row in self.run.rows.items():
            if not segment.first <= step <= segment.last:
                continue
            again, is_exact = once.rows[step], self.rounding is None
            for name in ("tokens", "lr", "grad_norm") if is_exact else ("tokens", "lr"):
                if not math.isclose(
                    _number(row.get(name)), _number(again[name]), rel_tol=0.0 if is_exact else 1e-9
                ):
                    yield f"metrics.jsonl has {name} {row.get(name)} at step {step}, replayed {again[name]}"
        for step, again in once.rows.items():
            (progress,) = again["each_progress"]
            recorded = self.run.steps.get(step)
            if recorded and recorded.progress != progress:
                yield f"metrics.jsonl lets step {step} begin at {recorded.progress}, replayed {progress}"

    def _other_validations(
        self, segment: Segment, once: Repetition, allowed: Sequence[float]
    ) -> Iterator[str]:
        for step, again in once.validations.items():
            recorded = self.run.validations[step]
            strayed = abs(_validation_loss(recorded) - _validation_loss(again))
            if not strayed <= allowed[(step - segment.first) // WINDOW]:
                yield (
                    f"metrics.jsonl has a validation loss of {_validation_loss(recorded)} at step {step}, replayed"
                    f" {_validation_loss(again)}"
                )

    def _compare_state(
        self, found: Outcome, end: Saved, once: Repetition, twins: Sequence[Repetition]
    ) -> None:
        """With the checkpoint that the segment ends at, tensor by tensor."""
        path = self.run.path_of(end)
        if altered := self._altered(end):
            found.problems.append(altered)
        if not path.exists():
            return
        saved = _tensors_in(checkpoint.read(path))
        if self.rounding is not None:  # random states differ between kinds of devices
            saved, once_state = (
                {k: v for k, v in s.items() if k != "rng"} for s in (saved, once.state)
            )
        else:
            once_state = once.state
        strayed = _distances(once_state, saved)
        allowed = dict.fromkeys(strayed, 0.0)
        if self.rounding is not None:
            each = [_distances(once_state, twin.state) for twin in twins]
            counts = {
                name
                for name, value in saved.items()
                if value.ndim == 0 and not value.is_floating_point()
            }
            allowed = {
                name: _allowed(
                    [distance[name] for distance in each], 0.0 if name in counts else LEAST
                )
                for name in strayed
            }
        far = [name for name, distance in strayed.items() if not distance <= allowed[name]]
        found.state = "equal" if not any(strayed.values()) else f"{max(strayed.values()):.1e} apart"
        if far:
            worst = max(far, key=lambda name: strayed[name])
            found.problems.append(
                f"{len(far)} of {len(strayed)} tensors of {path.name} are not what training gives; farthest: {worst}"
            )


def differences_of_place(run: RecordedRun, device: torch.device) -> Iterator[str]:
    """Why numbers need not be the same bit for bit here; nothing where they are."""
    here = environment_here(device)
    if run.record["pretrain"].get("devices", 1) != 1:
        yield "the run had several processes"
    for there in (run.record["environment"], *run.record.get("resumed", [])):
        if {device.type, there["device"]["kind"]} != {"cpu"}:
            yield f"a GPU's sums have no fixed order ({there['device']['name']}, here {here['device']['name']})"
            return
        for name in SAME_BITS:
            if there.get(name) != here[name]:
                yield f"{name} {there.get(name)}, here {here[name]}"


def has_dropout(run: RecordedRun) -> bool:
    """Whether its losses depend on which random numbers are drawn, and so on how it is computed."""
    model = run.record["config"]["model"]
    return any(model.get(name) for name in ("dropout", "attention_dropout"))


def refuse_other_numbers(run: RecordedRun, device: torch.device) -> None:
    """UserError for a run whose losses one process here does not come near, however honest they are: compression needs
    the gradients of each process, dropout the random numbers of each process and kind of device."""
    processes = run.record["pretrain"].get("devices", 1)
    compression = run.record["config"]["parallel"].get("compression", {}).get("name", "none")
    places = (run.record["environment"], *run.record.get("resumed", []))
    drawn_on = {_generator(there["device"]) for there in places}
    here = _generator(asdict(devices.describe(device)))
    for what, is_so in {
        f"parallel.compression={compression} on {processes} processes": processes > 1
        and compression != "none",
        f"dropout on {processes} processes, each with random numbers of its own": processes > 1
        and has_dropout(run),
        f"dropout by random numbers of {' and '.join(sorted(drawn_on))}": has_dropout(run)
        and drawn_on != {here},
    }.items():
        require(
            not is_so,
            f"{run.folder}: trained with {what}, which one process on {here} does not repeat, so a replay here cannot"
            " judge it; `cramming verify` looks at what the folder says",
        )


def _generator(device: Mapping[str, Any]) -> str:
    """Whose random numbers: devices of one name draw the same from one seed, and CPUs do in the same code."""
    return "a CPU" if device["kind"] == "cpu" else str(device["name"])


def settings_of(
    run: RecordedRun, settings: Mapping[str, Any], own: Sequence[str]
) -> dict[str, Any]:
    """The run's settings, but for where its corpora are, what only says when to log, and the sections `own`, which are
    those of this call."""
    recorded, section = run.record["config"], run.record["pretrain"]
    train, validation_corpus = recorded["train"], settings["train"]["validation_corpus"]
    return {
        **recorded,
        **{name: settings[name] for name in own},
        "data": {
            **recorded["data"],
            "corpus": settings["data"]["corpus"] or run.record["corpus"]["folder"],
        },
        "train": {
            **train,
            "log_every": 1,
            "validations": 0,
            "micro_batch": section.get("micro_batch") or train["micro_batch"],
            "validation_corpus": validation_corpus or train["validation_corpus"],
        },
        "checkpoint": {"every_minutes": sys.float_info.max, "every_steps": None},
        "precision": {**recorded["precision"], "mode": section["precision"]},
    }


def _corpora(section: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The record's section `corpus`, and that of the text it was validated on, if that is another's."""
    return section, section.get("validation") or {}


def _number(value: Any) -> float:
    """Infinite where it is none, or was not finite: then it compares as one."""
    return value if isinstance(value, int | float) else math.inf


def _apart(a: Any, b: Any) -> float:
    """By how much two numbers differ; 0 where both are none."""
    return 0.0 if _number(a) == _number(b) else abs(_number(a) - _number(b))


def _validation_loss(row: Mapping[str, Any]) -> float:
    """Of a row of the log, or of the record's section."""
    names = (*(f"validation_{name}" for name in LOSSES), *LOSSES)
    return _number(next((row[name] for name in names if row.get(name) is not None), None))


def _allowed(strayed: Sequence[float], least: float = LEAST) -> float:
    """By how much a number may differ, as the repetitions differ from the first (bench/gate.py)."""
    return max(least, MULTIPLE * max(strayed))


def _tensors_in(node: Any, path: str = "") -> Tensors:
    """Everything in a checkpoint's contents but times, flat; what is no number is part of its name."""
    children = (
        node.items()
        if isinstance(node, Mapping)
        else enumerate(node)
        if isinstance(node, list | tuple)
        else None
    )
    if children is not None:
        found: Tensors = {}
        for name, child in children:
            if path == "work" and name not in WORK:
                continue
            if path or name != "cuda_rng":
                found |= _tensors_in(child, f"{path}.{name}".lstrip("."))
        return found
    if isinstance(node, Tensor):
        return {path: node.detach().cpu()}
    if isinstance(node, int | float):
        return {
            path: torch.tensor(node, dtype=torch.int64 if isinstance(node, int) else torch.float64)
        }
    return {f"{path}={node}": torch.zeros(())}


def _distances(found: Tensors, saved: Tensors) -> dict[str, float]:
    """The distance of each tensor relative to its length; infinite where one is not there, or has another shape."""
    return {
        name: _distance(found.get(name), saved.get(name))
        for name in sorted(found.keys() | saved.keys())
    }


def _distance(found: Tensor | None, saved: Tensor | None) -> float:
    if found is None or saved is None or found.shape != saved.shape:
        return math.inf
    if torch.equal(found, saved):
        return 0.0
    difference = (found.double() - saved.double()).norm().item()
    return (
        difference / max(saved.double().norm().item(), 1e-12)
        if math.isfinite(difference)
        else math.inf
    )

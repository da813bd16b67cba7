"""The timed part in one process: exact repetition, exact resume, and mistakes told in one line.

Each run here takes 12 steps of a model of some 20,000 parameters. What needs a process of its own (kill -9, the time
budget, Ctrl-C) is in tests/end_to_end.
"""

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import device as devices
from cramming import gate, parts, pretrain, tricks
from cramming.budget import processes_of, read_journal
from cramming.config import UserError
from cramming.engine import Engine
from cramming.model import attention
from cramming.model.heads import MaskedLM
from cramming.record import load_metrics, load_record

Start = Callable[..., Path]
TOKENS = ["budget=tokens", "budget.steps=null"]


@pytest.fixture
def start(tmp_path: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]) -> Start:
    """`start("name=a", ...)` trains and returns the run folder."""

    def call(*overrides: str, runs: Path = tmp_path / "runs") -> Path:
        settings = compose(*tiny_overrides, f"runs={runs}", *overrides)
        pretrain.main(settings)
        return runs / str(settings["name"])

    return call


@pytest.fixture(scope="module")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> Path:
    """The run that the others are compared with."""
    runs = tmp_path_factory.mktemp("unbroken")
    pretrain.main(compose(*tiny_overrides, f"runs={runs}", "name=a", "checkpoint.every_steps=3"))
    return runs / "a"


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in load_metrics(run) if "loss" in row]


def result(run: Path) -> Any:
    section = load_record(run)["pretrain"]
    keys = ("status", "final_sha256", "steps", "tokens", "sequences", "exaflops", "train_loss", "validation")
    return {key: section[key] for key in keys}


def break_at(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do `action` before the step number `step` (counted from 1 in this process)."""
    original, calls = Engine.step, [0]

    def counted(self: Engine, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            action()
        return original(self, *arguments, **named)

    monkeypatch.setattr(Engine, "step", counted)


class Crash(BaseException):
    """Nobody catches it: the process would be gone."""


def crash() -> None:
    raise Crash


def test_a_run_learns_and_leaves_everything_behind(unbroken: Path) -> None:
    found = load_record(unbroken)
    section = found["pretrain"]
    assert section["status"] == "finished"
    assert section["steps"] == 12
    assert section["sequences"] == 12 * 8
    assert section["tokens"] == 12 * 8 * 32
    assert section["budget"]["unit"] == "steps"
    assert section["budget"]["spent"] == section["budget"]["limit"] == 12
    assert section["budget"]["overrun_seconds"] == 0
    assert section["validation"]["targets"] == 16 * 8
    assert [step for step, _ in losses(unbroken)] == list(range(1, 13))
    assert losses(unbroken)[-1][1] < losses(unbroken)[0][1]
    assert section["train_loss"] == losses(unbroken)[-1][1]
    assert {"config", "environment", "corpus", "pretrain"} <= found.keys()
    names = {p.name for p in unbroken.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "budget.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "final",
        "record.json",
    } <= names
    assert len(list((unbroken / "checkpoints").iterdir())) == 2
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (unbroken / "final").iterdir()}
    assert not [p for p in unbroken.rglob("*") if ".tmp" in p.name or ".old" in p.name]
    rates = [row["lr"] for row in load_metrics(unbroken) if "lr" in row]
    assert rates[0] == 0.0  # progress 0 of a schedule with warm-up
    assert max(rates) == pytest.approx(found["config"]["optim"]["lr"])
    assert sum("validation_loss" in row for row in load_metrics(unbroken)) == 3 - 1  # half way, and the end


def test_final_loads_in_stock_transformers(unbroken: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(unbroken / "final")
    assert model(torch.arange(10)[None]).logits.isfinite().all()


def test_special_tokens_spelled_otherwise_reach_the_exported_tokenizer(
    start: Start, make_corpus: Callable[..., Path], tmp_path: Path
) -> None:
    """As in the cramming paper's own corpus: it must not end in an error after the training."""
    corpus = make_corpus(tmp_path / "corpus", spelling="<pad>")
    run = start("name=a", "budget.steps=2", f"data.corpus={corpus}")
    saved = json.loads((run / "final" / "special_tokens_map.json").read_text())
    assert (saved["pad_token"], saved["mask_token"]) == ("<pad>", "<mask>")


def test_files_that_the_run_did_not_make_outlive_a_budget_without_a_step(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not one step"):
        start("name=a", *TOKENS, "budget.tokens=10")
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(start: Start, unbroken: Path) -> None:
    again = start("name=a", "checkpoint.every_steps=5")  # when it saves must not matter
    assert losses(again) == losses(unbroken)
    assert result(again) == result(unbroken)
    other = start("name=b", "seed=1", "budget.steps=2")
    assert losses(other)[0] != losses(unbroken)[0]


@pytest.mark.parametrize("settings", [[], ["schedule=triangle", "model.dropout=0.2", "train.packing=documents"]])
def test_stopped_and_resumed_equals_unbroken_bit_for_bit(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    """SIGTERM in step 5, SIGTERM again in the second process, then to the end. Also with a batch ramp and dropout."""
    whole = start("name=whole", *settings) if settings else unbroken
    for resume in ("false", "true"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            break_at(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
            start("name=a", f"resume={resume}", *settings)
        assert ended.value.code == 128 + signal.SIGTERM
    stopped = load_record(whole.parent.parent / "runs" / "a") if settings else None
    assert stopped is None or (stopped["pretrain"]["status"], stopped["pretrain"]["steps"]) == ("interrupted", 8)
    run = start("name=a", "resume=true", *settings)
    assert losses(run) == losses(whole)
    assert result(run) == result(whole)
    assert [p["ended"] for p in processes_of(read_journal(run / "budget.jsonl"))] == ["stopped", "stopped", "finished"]


def test_a_stop_between_micro_batches_takes_the_step_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the first of the fifth step's two micro-batches: its dropout must not be drawn twice."""
    whole = start("name=whole", "model.dropout=0.2")
    original, calls = MaskedLM.forward, [0]

    def counted(self: MaskedLM, *arguments: Any) -> Any:
        calls[0] += self.training
        if calls[0] == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(MaskedLM, "forward", counted)
        start("name=a", "model.dropout=0.2")
    assert calls[0] == 9
    assert result(start("name=a", "model.dropout=0.2", "resume=true")) == result(whole)


@pytest.mark.parametrize("setting", ["attention.kernel=varlen", "optim.name=adamw8bit"])
def test_a_mistake_found_before_the_first_step_leaves_the_name_free(start: Start, tmp_path: Path, setting: str) -> None:
    if setting.endswith("8bit") and importlib.util.find_spec("torchao"):
        pytest.skip("torchao is there")
    with pytest.raises(UserError):
        start("name=a", setting)
    assert not (tmp_path / "runs" / "a").exists()


def test_a_diverged_run_is_no_result(start: Start, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not finite after 12 steps.*lower optim.lr"):
        start("name=a", "optim.lr=1e30", "train.validations=0")
    assert load_record(tmp_path / "runs" / "a")["pretrain"]["status"] == "diverged"
    assert not (tmp_path / "runs" / "a" / "final").exists()


def test_a_flipped_byte_is_refused(start: Start, make_corpus: Callable[..., Path], tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    shard = corpus / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00001\.bin"):
        start("name=a", f"data.corpus={corpus}")


IN_BACKWARD = ["memory=in-backward", "optim.clip=null", "train.micro_batch=8"]


@pytest.mark.parametrize("settings", [["memory=offload-all"], ["memory=offload-optimizer"], IN_BACKWARD])
def test_memory_tricks_change_no_bit_of_a_run(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    """Stopped in step 5 and resumed, too."""
    plain = start("name=plain", *settings[1:]) if settings == IN_BACKWARD else unbroken
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        break_at(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start("name=a", *settings)
    run = start("name=a", "resume=true", *settings)
    assert losses(run) == losses(plain)
    assert result(run) == result(plain)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["memory=in-backward"], "train.micro_batch=8"),
        (["memory=in-backward", "train.micro_batch=8"], "optim.clip=null"),
        (["memory=offload-weights", "runtime=compile"], "runtime.compile=off"),
        (["precision=fp8"], "fp8"),
    ],
)
def test_settings_that_exclude_each_other_leave_no_run_behind(start: Start, settings: list[str], names: str) -> None:
    with pytest.raises(UserError, match=names):
        start("name=a", *settings)
    assert start("name=a", "budget.steps=1").exists()  # the name is still free


def test_ctrl_c_ends_in_order_and_a_second_one_at_once(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        break_at(patch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
        start("name=a")
    assert ended.value.code == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_at(patch, 3, twice)
        start("name=a", "resume=true")
    run = start("name=a", "resume=true")
    assert result(run) == result(unbroken)
    assert [p["ended"] for p in processes_of(read_journal(run / "budget.jsonl"))] == ["stopped", "failed", "finished"]


def test_a_time_budget_is_used_and_never_passed(start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds, as if this process had just begun (with `unbroken` its imports are done); stopped, resumed."""
    limit = 4.0
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    hours = ["budget=hours", "budget.steps=null", f"budget.hours={limit / 3600}", "train.log_every=10"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        break_at(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start("name=a", *hours)
    run = start("name=a", "resume=true", *hours)
    section = load_record(run)["pretrain"]
    assert section["status"] == "finished"
    assert section["steps"] > 6
    assert section["budget"]["overrun_seconds"] == 0.0
    assert limit - 1 < section["budget"]["spent_seconds"] <= limit
    rows = [row for row in load_metrics(run) if "loss" in row]
    assert all(row["seconds"] <= limit for row in rows)
    assert [row["progress"] for row in rows] == sorted(row["progress"] for row in rows)
    assert load_metrics(run)[-1]["step"] == section["steps"]


def test_crashed_and_resumed_equals_unbroken_bit_for_bit(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dies in step 9 with a checkpoint at 6, resumes with the newest checkpoint damaged: goes on from step 3."""
    with monkeypatch.context() as patch, pytest.raises(Crash):
        break_at(patch, 9, crash)
        start("name=a", "checkpoint.every_steps=3")
    files = sorted((tmp_path / "runs/a/checkpoints").iterdir())
    assert [f.name for f in files] == ["step-00000003.pt", "step-00000006.pt"]
    files[-1].write_bytes(files[-1].read_bytes()[:-1000])
    assert load_record(tmp_path / "runs" / "a")["pretrain"]["status"] == "running"
    run = start("name=a", "checkpoint.every_steps=3", "resume=true")
    assert losses(run) == losses(unbroken)
    assert result(run) == result(unbroken)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["step"] == 5 for line in lines) == 2  # done twice, counted once


def test_a_crash_before_the_first_checkpoint_starts_again_but_stays_charged(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Crash):
        break_at(patch, 4, crash)
        start("name=a")
    run = start("name=a", "resume=true")
    assert result(run) == result(unbroken)
    processes = load_record(run)["pretrain"]["budget"]["processes"]
    assert len(processes) == 2
    assert load_record(run)["pretrain"]["budget"]["spent_seconds"] > processes[0]["spent_seconds"]


def test_micro_batches_do_not_change_the_result(start: Start, unbroken: Path) -> None:
    for size in (8, 2):
        run = start(f"name=m{size}", f"train.micro_batch={size}")
        assert [loss for _, loss in losses(run)] == pytest.approx([loss for _, loss in losses(unbroken)], rel=1e-4)


@pytest.mark.parametrize("setting", ["memory=checkpoint", "memory=selective", "memory=offload", "runtime.prefetch=1"])
def test_memory_settings_do_not_change_a_bit(start: Start, unbroken: Path, setting: str) -> None:
    assert result(start("name=a", setting)) == result(unbroken)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_our_own_optimizers_resume_bit_for_bit(start: Start, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    optimizer = (f"optim={name}", "checkpoint.every_steps=3")
    with monkeypatch.context() as patch, pytest.raises(Crash):
        break_at(patch, 9, crash)
        start("name=a", *optimizer)
    assert result(start("name=a", "resume=true", *optimizer)) == result(start("name=b", *optimizer))


def test_a_trick_that_failed_the_gate_here_is_refused_unless_forced(start: Start, tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    where = gate.place(devices.describe(torch.device("cpu")).name, torch.__version__)
    gate.save(gates, where, [gate.Verdict("checkpoint all", False, None, 0.02, 10, 200, 1.0)])
    with pytest.raises(UserError, match="failed the correctness gate"):
        start("name=a", "memory=checkpoint", f"gates={gates}")
    assert not (tmp_path / "runs" / "a").exists()
    section = load_record(start("name=a", "memory=checkpoint", f"gates={gates}", "forced=[checkpoint all]"))["pretrain"]
    assert section["forced"] == ["checkpoint all"] and section["gate"]["checkpoint all"] == "forced"


def test_an_automatic_attention_kernel_hides_no_trick(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `auto` would take a kernel that failed the gate, the run is refused as with that kernel named."""
    gates = tmp_path / "gates.json"
    where = gate.place(devices.describe(torch.device("cpu")).name, torch.__version__)
    gate.save(gates, where, [gate.Verdict("attention varlen", False, None, 0.05, 10, 200, 1.0)])
    monkeypatch.setattr(
        tricks, "TRICKS", tuple(replace(t, device="any") if t.name == "attention varlen" else t for t in tricks.TRICKS)
    )
    assert load_record(start("name=a", f"gates={gates}"))["pretrain"]["attention_kernels"] == ["sdpa"]
    monkeypatch.setattr(attention, "choose", lambda *_: "varlen")
    with pytest.raises(UserError, match=r"attention.kernel=varlen.*'attention varlen' failed"):
        start("name=b", f"gates={gates}")


@pytest.mark.parametrize("override", ["optim=adamw8bit", "precision=fp8"])
def test_a_missing_package_is_found_before_anything_is_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setattr(parts, "create_run_folder", lambda *_, **__: pytest.fail("too late"))
    for module in ("cramming.optim.build", "cramming.precision"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package torchao; pip install 'cramming\[lowbit\]'"):
        start("name=a", override)
    assert not (tmp_path / "runs" / "a").exists()


def test_an_automatic_micro_batch_is_recorded_and_changes_nothing(start: Start, unbroken: Path) -> None:
    """Here the whole batch of 8 fits: the same run, bit for bit, as with that number given."""
    run, given = start("name=auto", "train.micro_batch=auto"), start("name=m8", "train.micro_batch=8")
    assert result(run) == result(given)
    section = load_record(run)["pretrain"]
    assert section["micro_batch"] == 8
    assert section["micro_batch_found"].startswith("auto, predicted for cpu with ")
    assert [loss for _, loss in losses(run)] == pytest.approx([loss for _, loss in losses(unbroken)], rel=1e-4)


def test_a_resume_takes_the_recorded_micro_batch(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from cramming import device, probe

    given = start("name=m8", "train.micro_batch=8", "checkpoint.every_steps=3")
    break_at(monkeypatch, 6, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        start("name=auto", "train.micro_batch=auto", "checkpoint.every_steps=3")
    monkeypatch.undo()
    monkeypatch.setattr(device, "available_bytes", lambda: 0)  # nothing would fit now
    monkeypatch.setattr(probe, "find_micro_batch", None)
    run = start("name=auto", "train.micro_batch=auto", "checkpoint.every_steps=3", "resume=true")
    assert result(run) == result(given)
    assert load_record(run)["pretrain"]["micro_batch"] == 8


@pytest.mark.parametrize(
    ("budget", "steps"),
    [([*TOKENS, "budget.tokens=1000"], 3), ([*TOKENS, "budget.tokens=1024"], 4), (["budget.steps=1"], 1)],
)
def test_budgets_in_tokens_and_steps_are_never_passed(start: Start, budget: list[str], steps: int) -> None:
    section = load_record(start("name=a", *budget))["pretrain"]
    assert section["steps"] == steps
    assert section["tokens"] == steps * 8 * 32
    assert section["budget"]["spent"] <= section["budget"]["limit"]


def test_a_budget_in_exaflops(start: Start, unbroken: Path) -> None:
    per_step = load_record(unbroken)["pretrain"]["exaflops"] / 12
    section = load_record(start("name=a", "budget=exaflops", "budget.steps=null", f"budget.exaflops={3.5 * per_step}"))[
        "pretrain"
    ]
    assert section["steps"] == 3
    assert section["budget"]["spent"] == pytest.approx(3 * per_step)


def test_a_resume_that_finds_nothing_says_so(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("name=first")
    assert "no run" not in capsys.readouterr().out
    run = start("name=frist", "resume=true")
    said = f"resume=true: no run in {run} to go on with, a new one begins; did you mean name=first?"
    assert said in " ".join(capsys.readouterr().out.split())
    start("name=frist", "resume=true")
    assert "no run" not in capsys.readouterr().out


def test_a_finished_run_is_refused_or_with_resume_left_alone(start: Start, unbroken: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in unbroken.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="already has a finished run"):
        start("name=a", runs=unbroken.parent)
    start("name=a", "resume=true", runs=unbroken.parent)
    assert {p: p.stat().st_mtime_ns for p in unbroken.rglob("*") if p.is_file()} == before


class TestMistakes:
    def refused(self, start: Start, *overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            start("name=a", *overrides)
        message = str(caught.value)
        assert "\n" not in message
        return message

    @pytest.mark.parametrize(
        ("overrides", "names"),
        [
            (["budget=hours", "budget.steps=null", "budget.hours=0"], "budget: hours=0 is not above 0"),
            (["budget.steps=-5"], "budget: steps=-5 is not above 0"),
            (["budget.steps=2.5"], "budget.steps=2.5"),
            (["budget.hours=1"], "budget: exactly one limit counts, found hours=1 and steps=12"),
            (["train.batch_size=9"], "train.batch_size=9 is not a multiple of train.micro_batch=4"),
            (["train.batch_size=9"], "; set train.micro_batch=3 or train.batch_size=12"),
            (["attention.kernel=varlen"], "attention.kernel=varlen: runs on CUDA only; set it to auto"),
            (["train.micro_batch=0"], "train: micro_batch=0"),
            (["train.micro_batch=most"], "train.micro_batch='most': expected a whole number or one of auto"),
            (["train.sequence_length=1024"], "train.sequence_length=1024 is above model.max_length=512"),
            (["model.hidden_size=33"], "model: hidden_size=33 is not a multiple of num_heads=2"),
            (["model.vocab_size=100"], "model.vocab_size=100: the tokenizer of"),
            (["model.norm=batch"], "model.norm='batch': choose one of"),
            (["train.packing=tight"], "train.packing='tight': choose one of rows, documents"),
            (["objective.rate=1.5"], "objective: rate=1.5"),
            (["optim.lr=0"], "optim: lr=0"),
            (["optim.name=lion"], "optim.name='lion': choose one of adamw"),
            (["schedule.decay=2"], "schedule: decay=2"),
            (["precision.mode=fp4"], "precision.mode='fp4'"),
            (["checkpoint.every_steps=0"], "checkpoint: "),
            (["memory.checkpoint_every=-1"], "memory: checkpoint_every=-1"),
            (["parallel.backend=mpi"], "parallel.backend='mpi'"),
            (["data.corpus=nowhere"], "nowhere: no corpus here"),
            (["name=a/b"], "name='a/b'"),
            ([*TOKENS, "budget.tokens=10"], "not one step of train.batch_size=8 fits"),
        ],
    )
    def test_one_line_and_nothing_is_left(self, start: Start, tmp_path: Path, overrides: list[str], names: str) -> None:
        assert names in self.refused(start, *overrides)
        assert not (tmp_path / "runs" / "a").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there(self, start: Start, tmp_path: Path) -> None:
        assert "device=cuda" in self.refused(start, "device=cuda")
        assert not (tmp_path / "runs" / "a").exists()

    def test_an_unfinished_run_and_a_resume_with_other_settings(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch, pytest.raises(Crash):
            break_at(patch, 4, crash)
            start("name=a", "optim.lr=0.001")
        assert "resume=true" in self.refused(start)
        message = self.refused(start, "resume=true", "optim.lr=0.5")
        assert message.startswith("optim.lr=0.5: ")
        assert "optim.lr=0.001" in message

    def test_a_resume_with_another_corpus_in_the_same_place(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, make_corpus: Callable[..., Path], tmp_path: Path
    ) -> None:
        corpus = make_corpus(tmp_path / "corpus", documents=50)
        with monkeypatch.context() as patch, pytest.raises(Crash):
            break_at(patch, 4, crash)
            start("name=a", f"data.corpus={corpus}")
        corpus.rename(tmp_path / "old")
        make_corpus(corpus, documents=50, seed=1)
        assert "not the one" in self.refused(start, "resume=true", f"data.corpus={corpus}")

    def test_a_damaged_journal(self, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with monkeypatch.context() as patch, pytest.raises(Crash):
            break_at(patch, 4, crash)
            start("name=a")
        journal = tmp_path / "runs" / "a" / "budget.jsonl"
        journal.write_text("{}\n" + journal.read_text())
        assert "budget.jsonl:1: damaged budget journal" in self.refused(start, "resume=true")


def test_a_prediction_of_the_next_step_is_on_the_safe_side() -> None:
    pace = pretrain.Pace()
    assert pace.step_seconds(4) == 0.0  # the first step is simply tried
    assert pace.update_seconds() > 0.0
    for seconds in (1.0, 3.0, 2.0):
        pace.note(2, seconds, seconds / 10)
    assert pace.step_seconds(4) >= 6.0
    assert pace.update_seconds() >= 0.3
    for _ in range(8):  # a slow step is forgotten
        pace.note(2, 1.0, 0.1)
    assert pace.step_seconds(2) < 1.5

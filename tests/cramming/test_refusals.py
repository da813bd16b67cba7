"""What `pretrain` refuses is told in one line, before anything is written; the name stays free."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import device as devices
from cramming import train_state
from cramming.bench import gate, tricks
from cramming.checks import Config, Place, attention_kernels, check
from cramming.config import UserError
from cramming.model import attention
from cramming.record import load_record
from cramming.runlog import Event, EventLog, Steps

Start = Callable[..., Path]
Refused = Callable[..., str]
TOKENS = ["budget.steps=null"]


def test_a_full_disk_before_the_first_step_leaves_the_name_free(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC)
        )  # as a failed write says it: without a file

    with monkeypatch.context() as patch:
        patch.setattr(train_state, "build_engine", full)
        with pytest.raises(
            UserError, match=r"runs/a: No space left on device; make room there, then run again"
        ):
            start("name=a")
    assert not (tmp_path / "runs" / "a").exists()
    start("name=a", "budget.steps=1")


def test_a_linked_run_folder_stays_and_is_empty_after_a_mistake(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"varlen"):
        start("name=a", "attention.kernel=varlen")
    assert (tmp_path / "runs" / "a").is_symlink() and list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't"),
    ],
)
def test_a_model_that_is_too_large_leaves_the_name_free(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def too_large(*_: object) -> None:
        raise error

    monkeypatch.setattr(train_state, "build_engine", too_large)
    with pytest.raises(UserError, match=r"model: cpu ran out of memory before the first step"):
        start("name=a")
    assert not (tmp_path / "runs" / "a").exists()


def test_another_runtime_error_is_our_own_defect_and_leaves_the_name_free(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train_state, "build_engine", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        start("name=a")
    assert not (tmp_path / "runs" / "a").exists()


def test_a_full_disk_later_on_keeps_the_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = EventLog.append

    def full(self: EventLog, event: Event, *, sync_now: bool = True) -> str:
        if isinstance(event, Steps) and event.step > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, event, sync_now=sync_now)

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "append", full)
        with pytest.raises(
            UserError, match=r"runs/a: No space left on device; .* with resume=true"
        ):
            start("name=a")
    start("name=a", "resume=true")


def test_a_flipped_byte_is_refused(
    start: Start, make_corpus: Callable[..., Path], tmp_path: Path
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    shard = corpus / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00001\.bin"):
        start("name=a", f"data.corpus={corpus}")


def test_a_trick_that_failed_the_gate_here_is_refused_unless_forced(
    start: Start, tmp_path: Path
) -> None:
    gates = tmp_path / "gates.json"
    where = gate.device_key(devices.describe(torch.device("cpu")).name, torch.__version__)
    gate.save(gates, where, [gate.Verdict("checkpoint all", False, None, 0.02, 10, 200, 1.0)])
    with pytest.raises(UserError, match="failed the correctness gate"):
        start("name=a", "memory.checkpoint_every=1", f"gates={gates}")
    assert not (tmp_path / "runs" / "a").exists()
    section = load_record(
        start("name=a", "memory.checkpoint_every=1", f"gates={gates}", "forced=[checkpoint all]")
    )["pretrain"]
    assert section["forced"] == ["checkpoint all"] and section["gate"]["checkpoint all"] == "forced"


def test_an_automatic_attention_kernel_hides_no_trick(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `auto` would take a kernel that failed the gate, the run is refused as with that kernel named."""
    gates = tmp_path / "gates.json"
    where = gate.device_key(devices.describe(torch.device("cpu")).name, torch.__version__)
    gate.save(gates, where, [gate.Verdict("attention varlen", False, None, 0.05, 10, 200, 1.0)])
    monkeypatch.setattr(
        tricks,
        "TRICKS",
        tuple(
            replace(t, device="any") if t.name == "attention varlen" else t for t in tricks.TRICKS
        ),
    )
    assert load_record(start("name=a", f"gates={gates}"))["pretrain"]["attention_kernels"] == [
        "sdpa"
    ]
    monkeypatch.setattr(attention, "choose", lambda *_: "varlen")
    with pytest.raises(UserError, match=r"attention.kernel=varlen.*'attention varlen' failed"):
        start("name=b", f"gates={gates}")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["attention.kernel=varlen"],
            "attention.kernel=varlen: FlashAttention computes in 16 bits, not in float32",
        ),
        (
            ["attention.kernel=varlen", "precision=bf16", "model.attention_dropout=0.1"],
            "model.attention_dropout=0.1",
        ),
        (
            ["attention.kernel=flex", "model.attention_dropout=0.1"],
            "attention.kernel=flex: has no dropout",
        ),
        (["attention.kernel=varlen", "precision=bf16"], None),
        (["attention.kernel=flex"], None),
    ],
)
def test_a_kernel_without_this_number_format_or_dropout_is_found_by_the_check(
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    names: str | None,
) -> None:
    """On a GPU, which is only asked for its properties."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = Config.of(compose(*tiny_overrides, *overrides))
    with pytest.raises(UserError, match=names) if names else nullcontext():
        assert attention_kernels(config, torch.device("cuda")) == [config.attention.kernel]


@pytest.mark.parametrize("override", ["optim=adamw8bit", "precision=fp8"])
def test_a_missing_package_is_found_before_the_model_is_built(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setattr(train_state, "build_engine", lambda *_, **__: pytest.fail("too late"))
    monkeypatch.setattr("cramming.checks.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"needs the package torchao; pip install 'cramming\[lowbit\]'"
    ):
        start("name=a", override)
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["budget.hours=1"], "budget: exactly one limit counts, found hours=1 and steps=12"),
        (
            ["train.batch_size=9"],
            "train.batch_size=9 is not a multiple of train.micro_batch=4 x 1 process(es); take train.batch_size=8 or",
        ),
        (
            ["attention.kernel=varlen"],
            "attention.kernel=varlen: runs on CUDA only. Set it to auto, sdpa or padded",
        ),
        (
            ["attention.kernel=flex"],
            "attention.kernel=flex: trains on CUDA only. Set it to auto, sdpa or padded",
        ),
        (["memory.offload_weights=true", "runtime.compile=model"], "runtime.compile=off"),
        (
            ["train.sequence_length=1024"],
            "train.sequence_length=1024 is above model.max_length=512",
        ),
        (["model.hidden_size=33"], "model: hidden_size=33 is not a multiple of num_heads=2"),
        (["model.vocab_size=100"], "model.vocab_size=100: the tokenizer of"),
        (["train.packing=tight"], "train.packing='tight': choose one of rows, documents"),
        (
            ["train.batch_ramp={start: 0.25, until: 0.5}"],
            "train.micro_batch=4 x 1 process(es): train.batch_ramp lets the batch grow by a number",
        ),
        (
            ["objective=rtd", "model.tie_embeddings=false"],
            "model.tie_embeddings=false: the generator of objective=rtd",
        ),
        (
            ["objective=rtd", "model.late_layers=2"],
            "model.late_layers=2: saves nothing in the encoder of objective=rtd",
        ),
        (["objective.name=xyz"], "objective.name='xyz': choose one of mlm, rtd"),
        (
            ["memory.checkpoint=selective"],
            "memory: checkpoint=selective does nothing with checkpoint_every=0",
        ),
        (
            ["precision.residual=bf16"],
            "precision.residual=bf16: goes with products in bf16 or fp8, and they are",
        ),
        (
            ["precision.fp8_scaling=rowwise"],
            "precision.fp8_scaling=rowwise does nothing with products in fp32",
        ),
        (
            ["precision.emulate_fp8=true"],
            "precision.emulate_fp8=true does nothing with products in fp32",
        ),
        (["precision=fp9"], "precision.mode='fp9': choose one of auto, fp32, bf16, fp16, fp8"),
        (["data.corpus=nowhere"], "nowhere: no corpus here"),
        (["name=a/b"], "name='a/b'"),
        ([*TOKENS, "budget.tokens=10"], "not one step of train.batch_size=8 fits"),
        (
            [*TOKENS, "budget.tokens=null", "budget.minutes=0.0001", "start=cooccurrence"],
            "s had passed by then, counting of start=cooccurrence included). Raise the budget",
        ),
    ],
)
def test_one_line_and_nothing_is_left(
    tmp_path: Path, overrides: list[str], names: str, refused: Refused
) -> None:
    assert names in refused(*overrides)
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize(
    "override", ["runtime.compile=blocks", "optim=adamw8bit", "optim=adamw4bit"]
)
def test_the_cpu_clock_refuses_what_compiles_in_other_processes(
    compose: Callable[..., dict[str, Any]], override: str
) -> None:
    """torchao's optimizers do without being asked."""
    place = Place("cpu", "a CPU", "fp32")
    check(Config.of(compose(override)), place)
    with pytest.raises(
        UserError, match=r"budget\.clock=cpu: does not see the compiler's processes"
    ):
        check(Config.of(compose(override, "budget.clock=cpu")), place)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_a_batch_that_grows_is_cut_for_all_processes(
    compose: Callable[..., dict[str, Any]], processes: int
) -> None:
    """Of 120 sequences it grows by 12 at a time."""
    config = Config.of(
        compose(
            "train.batch_ramp={start: 0.1, until: 0.5}",
            "train.batch_size=120",
            "train.micro_batch=20",
        )
    )
    place = Place("cpu", "a CPU", "fp32", processes=processes)
    with pytest.raises(UserError, match=rf"20 x {processes} process\(es\)"):
        check(config, place)
    if 12 % processes == 0:
        check(replace(config, train=replace(config.train, micro_batch=12 // processes)), place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, refused: Refused) -> None:
    assert "device=cuda" in refused("device=cuda")
    assert not (tmp_path / "runs" / "a").exists()

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
from cramming import run as run_module
from cramming.bench import gate, tricks, verdicts
from cramming.config import UserError
from cramming.model import attention
from cramming.recipe import Config, Hardware, attention_kernels, check
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
        patch.setattr(run_module, "build_engine", full)
        with pytest.raises(UserError, match=r"runs/a: No space left on device\. .* run again"):
            start(name="a")
    assert not (tmp_path / "runs" / "a").exists()
    start("budget.steps=1", name="a")


def test_a_linked_run_folder_stays_and_is_empty_after_a_mistake(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"varlen"):
        start("attention.kernel=varlen", name="a")
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

    monkeypatch.setattr(run_module, "build_engine", too_large)
    with pytest.raises(UserError, match=r"model: cpu ran out of memory before the first step"):
        start(name="a")
    assert not (tmp_path / "runs" / "a").exists()


def test_another_runtime_error_is_our_own_defect_and_leaves_the_name_free(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(run_module, "build_engine", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        start(name="a")
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
        with pytest.raises(UserError, match=r"runs/a: No space left on device. .* with --resume"):
            start(name="a")
    start(name="a", resume=True)


def test_a_flipped_byte_is_refused(
    start: Start, make_corpus: Callable[..., Path], tmp_path: Path
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    shard = corpus / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00001\.bin"):
        start(f"data.corpus={corpus}", name="a")


def test_a_trick_that_failed_the_gate_here_is_refused_unless_forced(
    start: Start, tmp_path: Path
) -> None:
    gates = tmp_path / "gates.json"
    where = verdicts.device_key(devices.describe(torch.device("cpu")).name, torch.__version__)
    gate.save(gates, where, [verdicts.Verdict("checkpoint all", False, None, 0.02, 10, 200, 1.0)])
    with pytest.raises(UserError, match="failed the correctness gate"):
        start("memory.checkpoint_every=1", f"gates={gates}", name="a")
    assert not (tmp_path / "runs" / "a").exists()
    section = load_record(
        start("memory.checkpoint_every=1", f"gates={gates}", "forced=[checkpoint all]", name="a")
    )["pretrain"]
    assert section["forced"] == ["checkpoint all"] and section["gate"]["checkpoint all"] == "forced"


def test_an_automatic_attention_kernel_hides_no_trick(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `auto` selects a kernel that failed the gate, the run is refused as with that kernel named."""
    gates = tmp_path / "gates.json"
    where = verdicts.device_key(devices.describe(torch.device("cpu")).name, torch.__version__)
    gate.save(gates, where, [verdicts.Verdict("attention varlen", False, None, 0.05, 10, 200, 1.0)])
    monkeypatch.setattr(
        tricks,
        "TRICKS",
        tuple(
            replace(t, device="any") if t.name == "attention varlen" else t for t in tricks.TRICKS
        ),
    )
    assert load_record(start(f"gates={gates}", name="a"))["pretrain"]["attention_kernels"] == [
        "sdpa"
    ]
    monkeypatch.setattr(attention, "choose", lambda *_: "varlen")
    with pytest.raises(UserError, match=r"attention.kernel=varlen.*'attention varlen' failed"):
        start(f"gates={gates}", name="b")


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
    monkeypatch.setattr(run_module, "build_engine", lambda *_, **__: pytest.fail("too late"))
    monkeypatch.setattr("cramming.recipe.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"needs the package torchao\. Run pip install 'cramming\[lowbit\]'"
    ):
        start(override, name="a")
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["budget.hours=1"], "budget.steps=12: "),
        (["train.batch_size=9"], "Set train.batch_size=8 or 12."),
        (["attention.kernel=varlen"], "attention.kernel=varlen: runs on CUDA only"),
        (["model.vocab_size=100"], "model.vocab_size=100: the tokenizer of"),
        (["data.corpus=nowhere"], "nowhere: no corpus here"),
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


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_batch_that_grows_is_cut_for_all_processes(
    compose: Callable[..., dict[str, Any]], processes: int
) -> None:
    """It grows by 12 of 120 sequences at a time."""
    config = Config.of(
        compose(
            "train.batch_ramp={start: 0.1, until: 0.5}",
            "train.batch_size=120",
            "train.micro_batch=20",
        )
    )
    hardware = Hardware("cpu", "a CPU", "fp32", processes=processes)
    setting = "micro_batch=20" if 120 % (20 * processes) == 0 else "batch_size=120"
    with pytest.raises(UserError, match=rf"^train\.{setting}: .*{processes} process"):
        check(config, hardware)
    if 12 % processes == 0:
        check(config.replace(train=config.train.replace(micro_batch=12 // processes)), hardware)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, refused: Refused) -> None:
    assert "device=cuda" in refused(device="cuda")
    assert not (tmp_path / "runs" / "a").exists()

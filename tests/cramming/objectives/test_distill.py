"""Distillation: the gradient of the plain formula, a teacher that no part of training touches, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cramming.config import UserError
from cramming.engine import build_engine
from cramming.model.config import ModelConfig
from cramming.model.distillation import DistilledLM
from cramming.model.heads import MaskedLM
from cramming.model.load import load_masked_lm
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config
from cramming.record import load_record
from cramming.starts.teacher import take_over

CPU = torch.device("cpu")
TARGETS = 21
Make = Callable[..., DistilledLM]


@pytest.fixture
def make(teacher: Path) -> Make:
    """`make(weight=..., loss_chunk=...)`: a student of the teacher's sizes, with another architecture."""

    def call(
        weight: float = 0.5, temperature: float = 2.0, loss_chunk: int | None = None, **model: Any
    ) -> DistilledLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 48}
        config = ModelConfig(**{"vocab_size": 320, **sizes, **model})
        return DistilledLM(config, teacher, None, weight, temperature, loss_chunk=loss_chunk)

    return call


def leaves(model: DistilledLM) -> list[Tensor]:
    return [model.decoder(), model.decoder_bias]


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 2.0), (1.0, 1.0), (0.9, 4.0)])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_loss_and_gradient_are_those_of_whole_logits(
    make: Make, rows: int, weight: float, temperature: float
) -> None:
    model = make(weight, temperature, rows * 320)
    hidden_MD = torch.randn(TARGETS, 32, requires_grad=True)
    taught_MD = torch.randn(TARGETS, 32)
    targets_M = torch.randint(0, 320, (TARGETS,))
    targets_M[::4] = -100
    counted = targets_M >= 0
    loss, hits = model.mixed_loss(hidden_MD, taught_MD, targets_M)
    inputs = [hidden_MD, *leaves(model)]
    actual = torch.autograd.grad(0.37 * loss, inputs)

    logits = model.decode(hidden_MD)[counted]
    taught = model.teacher.decode(taught_MD)[counted].detach()
    plain = F.cross_entropy(logits, targets_M[counted], reduction="sum")
    divergence = F.kl_div(
        (logits / temperature).log_softmax(-1), (taught / temperature).softmax(-1), reduction="sum"
    )
    mix = (1 - weight) * plain + weight * temperature**2 * divergence
    expected = torch.autograd.grad(0.37 * mix, inputs)
    torch.testing.assert_close(loss, plain)
    assert hits == (logits.argmax(-1) == targets_M[counted]).sum()
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_with_a_weight_of_zero_it_is_masked_language_modelling(
    make: Make, tiny_source: Any
) -> None:
    inputs = tiny_source.batch(0, 4).inputs
    students = []
    for weight, dropout in ((0.0, 0.2), (0.5, 0.2)):
        torch.manual_seed(3)
        students.append(make(weight, dropout=dropout))
    plain = MaskedLM(students[0].config)
    plain.load_state_dict(students[0].state_dict())
    results = []
    for model in (*students, plain):
        torch.manual_seed(4)
        loss, hits = model(*inputs)
        loss.backward()
        results.append([loss.detach(), hits, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(results[0], results[2], strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(results[1][0], results[2][0])  # the value, whatever the gradient
    assert not torch.allclose(results[1][-1], results[2][-1])
    evaluated = [model.eval()(*inputs)[0] for model in (students[1], plain)]
    assert torch.equal(*evaluated)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_no_part_of_training_has_the_teacher(
    teacher: Path, compose: Callable[..., Any], tiny_source: Any, mode: str
) -> None:
    words = ["objective=distill", f"objective.teacher={teacher}", "train.sequence_length=16"]
    config = Config.of(compose(*words, f"precision.mode={mode}", "model.hidden_size=32"))
    config = config.replace(model=ModelConfig(vocab_size=320, hidden_size=32, num_heads=2))
    engine = build_engine(config, Mesh(config.parallel, CPU), CPU)
    engine.step([tiny_source.batch(0, 4)], 1e-2)
    model = engine.model
    assert isinstance(model, DistilledLM)
    assert model.state_dict().keys() == MaskedLM(model.config).state_dict().keys()
    trained = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}
    assert not model.teacher.training and model.training
    for name, parameter in load_masked_lm(teacher).named_parameters():
        here = model.teacher.get_parameter(name)
        assert torch.equal(here, parameter) and here.grad is None and id(here) not in trained
    model.double()
    assert {p.dtype for p in model.teacher.parameters()} == {torch.float64}


def test_a_student_begins_with_what_it_shares(make: Make) -> None:
    model = make(mlp="plain", norm_order="pre")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    taken, total = take_over(model)
    theirs = dict(model.teacher.named_parameters())
    copied = 0
    for name, parameter in model.named_parameters():
        is_shared = name in theirs and theirs[name].shape == parameter.shape
        assert torch.equal(parameter, theirs[name] if is_shared else before[name]), name
        copied += parameter.numel() if is_shared else 0
    assert 0 < copied == taken < total == sum(p.numel() for p in model.parameters())


def _bare(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["CrammingModel"]  # as objective=rtd exports it
    (folder / "config.json").write_text(json.dumps(config))


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("w17", "w17x"))


@pytest.mark.parametrize(
    ("damage", "overrides", "message"),
    [
        (None, ["objective.teacher=null"], "objective.teacher=null: no teacher"),
        (shutil.rmtree, [], r"objective\.teacher=.*: no config\.json"),
        (_bare, [], r"objective\.teacher=.*: an encoder without a masked-LM head"),
        (_other_tokenizer, [], r"objective\.teacher=.*: its tokenizer\.json is not that of"),
        (None, ["objective.teacher_sha256=ab"], "objective.teacher_sha256=ab: the weights in"),
        (None, ["model.vocab_size=384"], r"objective\.teacher=.*: it has 320 entries"),
        (None, ["train.sequence_length=65"], r"train\.sequence_length=65: above the 64"),
    ],
)
def test_a_wrong_teacher_is_refused_in_one_line(
    teacher: Path,
    tmp_path: Path,
    start: Callable[..., Path],
    damage: Callable[[Path], None] | None,
    overrides: list[str],
    message: str,
) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(teacher, folder)
    if damage:
        damage(folder)
    words = ["objective=distill", f"objective.teacher={folder}", *overrides]
    with pytest.raises(UserError, match=message) as refused:
        start(*words, name="a")
    assert "\n" not in str(refused.value) and not (tmp_path / "runs" / "a").exists()


def test_the_record_says_that_the_weights_are_not_random(
    teacher: Path, start: Callable[..., Path]
) -> None:
    words = ("objective=distill", f"objective.teacher={teacher}", "start=teacher")
    section = load_record(start(*words, name="a"))["pretrain"]
    assert (section["objective"], section["start"]) == ("distill", "teacher")

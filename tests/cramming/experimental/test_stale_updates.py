"""The update rules of asynchronous pipelines: ages by the papers' formulas, gradients by hand."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cramming.config import UserError
from cramming.engine import Engine
from cramming.experimental import pipeline_study
from cramming.experimental.stale_updates import DECAY, RULES, Stages, StaleTraining
from cramming.invocation import Invocation
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision, PrecisionConfig

CPU = torch.device("cpu")

HERE = Invocation("s", device="cpu")


def draw_losses(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    assert rows.keys() == RULES.keys()
    return "<svg/>"


class Chain(MaskedLM):
    """Two matrices, one in each of two stages: loss = |b a x|^2 / 2, so all gradients are known."""

    def __init__(self, width: int = 3) -> None:
        nn.Module.__init__(self)
        self.config = ModelConfig(
            vocab_size=8, hidden_size=4, num_heads=2, num_layers=2, tie_embeddings=False
        )
        self.encoder = nn.Module()  # type: ignore[assignment]
        self.encoder.blocks = nn.ModuleList(
            nn.Linear(width, width, bias=False).double() for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        first, second = self.encoder.blocks
        return second(first(x)).square().sum() / 2, torch.tensor(0)


@dataclass
class Given:
    """A batch of one vector."""

    x: Tensor
    num_targets: int = 1

    @property
    def inputs(self) -> tuple[Tensor]:
        return (self.x,)

    def to(self, device: torch.device) -> "Given":
        return self


def engine_of(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> Engine:
    precision = Precision(PrecisionConfig(mode="fp32", tf32=False), CPU)
    return Engine(model, kind(model.parameters(), lr=1.0), precision, None, Mesh.solo(CPU), CPU)


def matrices(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def gradients(forward: list[Tensor], backward: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the gradients of the chain's loss, computed by hand with other weights in the backward pass."""
    (a, b), b_back = forward, backward[1]
    out = b @ a @ x
    return [torch.outer(b_back.T @ out, x), torch.outer(out, a @ x)]


@pytest.mark.parametrize(("name", "stages"), [("synchronous", 4), ("pipedream", 1)])
def test_no_age_is_plain_training_bit_for_bit(
    make_model: Callable[..., Any], tiny_source: Any, name: str, stages: int
) -> None:
    plain, stale = (make_model(num_layers=4, tie_embeddings=False) for _ in range(2))
    engine = engine_of(plain, torch.optim.AdamW)
    other = StaleTraining(engine_of(stale, torch.optim.AdamW), RULES[name], Stages(stages, 2), 5)
    for step in range(4):
        batches = [tiny_source.batch(8 * step + 4 * k, 4) for k in range(2)]
        assert engine.step(batches, 1e-3) == other.step(batches, 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(matrices(plain), matrices(stale), strict=True))


def test_ages_are_those_of_the_papers() -> None:
    for stages in (Stages(4, 1), Stages(4, 4), Stages(8, 3), Stages(5, 16)):
        for stage in range(stages.number):
            every = {
                name: [rule.age(stages, stage, n) for n in range(stages.micro_batches)]
                for name, rule in RULES.items()
            }
            assert set(every["synchronous"]) == {0}
            assert set(every["pipedream"]) == {stages.number - 1 - stage}
            assert set(every["2bw"]) == {1}
            expected = (2 * (stages.number - 1 - stage) + 1) / stages.micro_batches
            assert (
                statistics.fmean(every["pipemare"])
                == pytest.approx(expected)
                == stages.mean_age(stage)
            )


@pytest.mark.parametrize("name", ["pipedream", "2bw", "pipemare", "pipemare-t1", "pipemare-t1-t2"])
def test_updates_are_those_that_are_calculated_by_hand(name: str) -> None:
    torch.manual_seed(0)
    rule, stages, rate, annealing = RULES[name], Stages(2, 2), 0.05, 4
    model = Chain()
    training = StaleTraining(engine_of(model), rule, stages, annealing)
    versions, velocity = [matrices(model)], [torch.zeros(3, 3).double()] * 2
    for step in range(6):
        xs = [torch.randn(3).double() for _ in range(2)]
        training.step([Given(x) for x in xs], rate)  # type: ignore[misc]
        total = [torch.zeros(3, 3).double()] * 2
        for n, x in enumerate(xs):
            seen = [
                versions[max(0, step - rule.age(stages, stage, n))][stage] for stage in range(2)
            ]
            newest = versions[-1]
            if rule.corrects:
                newest = [
                    w - v * (2 * (1 - s) + 1) / 2 for s, (w, v) in enumerate(zip(newest, velocity))
                ]
            grads = gradients(seen, seen if rule.stashes else newest, x)
            total = [a + b / 2 for a, b in zip(total, grads)]  # the engine's mean over targets
        rates = [rate / 1.5 ** (1 - min(step / annealing, 1)) if rule.slows else rate, rate]
        versions.append([w - r * g for w, r, g in zip(versions[-1], rates, total)])
        keep = [DECAY ** (1 / 1.5), DECAY ** (1 / 0.5)]
        moved = [after - before for after, before in zip(versions[-1], versions[-2])]
        velocity = [k * v + (1 - k) * d for k, v, d in zip(keep, velocity, moved)]
        for found_now, expected in zip(matrices(model), versions[-1], strict=True):
            torch.testing.assert_close(found_now, expected, rtol=1e-12, atol=1e-12)


def test_a_tied_matrix_is_refused(make_model: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="tie_embeddings=false"):
        StaleTraining(engine_of(make_model()), RULES["2bw"], Stages(2, 2), 1)


def test_the_study_is_written_and_continued(
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = compose(*tiny_overrides, "budget.steps=3", "train.micro_batch=2")
    pipeline_study.main(settings, HERE, 2, [0], tmp_path, draw_losses)
    text = (tmp_path / "study.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in [*RULES, "gpipe", "1f1b", "zbv"])
    assert "20.0% | 20.0%" in text  # (p - 1) / (m + p - 1) with p = 2, m = 4
    assert (tmp_path / "study.svg").exists()
    assert "micro-batch 3" in (tmp_path / "time-gpipe.svg").read_text()
    monkeypatch.setattr(pipeline_study, "_train", lambda *_: pytest.fail("is done already"))
    pipeline_study.main(settings, HERE, 2, [0], tmp_path, draw_losses)
    with pytest.raises(UserError, match=r"--stages=3 is above model.num_layers=2"):
        pipeline_study.main(settings, HERE, 3, [0], tmp_path, draw_losses)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("objective=rtd", "generator of objective=rtd"),
        ("objective=mlm-by-loss", "objective=mlm"),
        ("start=cooccurrence", "start=random"),
    ],
)
def test_what_is_not_simulated_is_refused(
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    override: str,
    problem: str,
) -> None:
    settings = compose(*tiny_overrides, "budget.steps=3", "train.micro_batch=2", override)
    with pytest.raises(UserError, match=rf"study pipelines: .*{problem}"):
        pipeline_study.main(settings, HERE, 2, [0], tmp_path, draw_losses)


@pytest.mark.parametrize("lost", [["2bw"], ["synchronous"], ["synchronous", "2bw"]])
def test_a_run_that_diverged_says_so(
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    lost: list[str],
) -> None:
    """Its loss is not finite, and nothing is compared with it: of the same seed, of whichever rule."""
    losses = {rule: float("nan") if name in lost else 2.5 for name, rule in RULES.items()}
    monkeypatch.setattr(
        pipeline_study,
        "_train",
        lambda _, __, rule, stages: {"rows": [], "validation_loss": losses[rule]},
    )
    settings = compose("model=tiny", "budget.steps=3", "train.micro_batch=2")
    for _ in range(2):  # the second time as stored
        pipeline_study.main(settings, HERE, 2, [0, 1], tmp_path, draw_losses)
        rows = (
            line.strip("| ").split(" | ")
            for line in (tmp_path / "study.md").read_text().splitlines()
        )
        cells = {row[0]: row[3:] for row in rows if row[0] in RULES}
        assert {name for name, row in cells.items() if row[0] == "diverged"} == set(lost)
        against = "–" if "synchronous" in lost else "+0.000"
        assert all(row == ["diverged", "–", "–"] for name, row in cells.items() if name in lost)
        assert all(
            row == ["2.500", "0.000", against] for name, row in cells.items() if name not in lost
        )

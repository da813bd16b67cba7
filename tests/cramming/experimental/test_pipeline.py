"""A pipeline trains as one process does, whatever the schedule; what it cannot do is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from cramming.config import UserError
from cramming.data.batches import BERT_MASKING
from cramming.experimental.stages import ORDERS
from cramming.experimental.timeline import actions
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config, Hardware, check
from tests.cramming.experimental.pipeline_ranks import CPU, HALF, opened, start, train
from tests.cramming.parallel.rank_worker import launch

SCRIPT = Path(__file__).with_name("pipeline_ranks.py")
MODEL = [
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "train.sequence_length=16",
    "train.micro_batch=2",
    "train.batch_size=8",
    "train.validation_tokens=128",
    "model.convolution=1",
]
SPLITTING_TORCH = "2.13"  # older ones do not run the schedules that split the backward pass
RUNNABLE = [
    name
    for name, order in ORDERS.items()
    if torch.__version__ >= SPLITTING_TORCH or not order.splits_backward
]
TWO = {name: ["parallel=pp", f"parallel.schedule={name}", "parallel.pp=2"] for name in RUNNABLE}
FOUR = {
    f"{name}-pp{stages}": ["parallel=pp", f"parallel.schedule={name}", f"parallel.pp={stages}"]
    for stages, names in (
        (4, ("gpipe", "1f1b", "interleaved", "zero_bubble")),
        (2, ("1f1b", "zbv")),
    )
    for name in names
    if name in RUNNABLE
}


@pytest.mark.parametrize(
    ("ranks", "settings", "layers"), [(2, TWO, 4), (4, FOUR, 8)], ids=["two", "four"]
)
def test_losses_are_those_of_one_process(
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    ranks: int,
    settings: dict[str, list[str]],
    layers: int,
) -> None:
    """Over 30 steps, with the state gathered and loaded in between; the last state is one that one process loads.

    On four ranks also two pipelines of two stages, each with half of the samples."""
    model = [*MODEL, f"model.num_layers={layers}"]
    every = {name: compose(*tiny_overrides, *model, *changes) for name, changes in settings.items()}
    launch(
        tmp_path,
        {name: {"settings": recipe, "ranks": ranks} for name, recipe in every.items()},
        SCRIPT,
    )

    config, data = opened(compose(*tiny_overrides, *model))
    single = start(config, Mesh.solo(CPU))
    expected = train(single, config, data, range(2 * HALF))
    validation = single.evaluate(data.held_out.batches(BERT_MASKING, config.train.rows))
    for name in settings:
        outcome = torch.load(tmp_path / name, weights_only=True)
        torch.testing.assert_close(
            torch.tensor(outcome["steps"]), torch.tensor(expected), rtol=1e-5, atol=0
        )
        assert outcome["validation"] == pytest.approx(validation, rel=1e-5), name
        assert outcome["counts"] < sum(p.numel() for p in single.parameters), (
            f"{name}: rank 0 has a part of the model"
        )
        stages = every[name]["parallel"]["pp"]
        counted = actions(every[name]["parallel"]["schedule"], stages, 8 // (2 * ranks // stages))
        assert outcome["order"][:: ranks // stages] == counted, (
            f"{name}: what was computed is what the bubble counts"
        )
        weights, optimizer = outcome["state"]
        other = start(config, Mesh.solo(CPU))
        other.model.load_state_dict(weights)
        other.optimizer.load_state_dict(optimizer)
        for a, b in zip(other.model.parameters(), single.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    other.optimizer.state[a][key],
                    single.optimizer.state[b][key],
                    rtol=1e-3,
                    atol=1e-6,
                )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["model.unet_skips=true"], "model.unet_skips=true: not with parallel=pp"),
        (["train.micro_batch=auto"], "train.micro_batch=auto: not with parallel=pp"),
        (["runtime.compile=model"], "runtime.compile=model: not with parallel=pp"),
        (["optim=muon"], "optim.name=muon: not with parallel=pp"),
        (["parallel.pp=4"], "parallel.pp=4: too many for model.num_layers=2"),
        (["parallel.schedule=zbv"], "parallel.pp=2: too many for model.num_layers=2.*schedule=zbv"),
        (["model.late_layers=2"], "parallel.pp=2: too many for .*model.late_layers=2"),
        (
            ["train.micro_batch=8"],
            "train.micro_batch=8: 1 micro-batches in a step are not a multiple of 2",
        ),
        (
            ["parallel.schedule=dualpipev", "model.num_layers=4"],
            "train.micro_batch=4: 2 micro-batches in a step are not a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str], changes: list[str], says: str
) -> None:
    config = Config.of(compose(*tiny_overrides, "parallel=pp", *changes))
    with pytest.raises(UserError, match=says):
        check(config, Hardware("cpu", "cpu", "fp32", processes=config.parallel.pp))


@pytest.mark.parametrize("schedule", ORDERS)
def test_an_old_torch_runs_the_schedules_with_one_backward_pass(
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    changes = ("parallel=pp", f"parallel.schedule={schedule}", "model.num_layers=4")
    config = Config.of(compose(*tiny_overrides, *changes, "train.micro_batch=1"))
    hardware = Hardware("cpu", "cpu", "fp32", processes=2)
    if ORDERS[schedule].splits_backward:
        with pytest.raises(UserError, match=rf"parallel.schedule={schedule}: needs torch"):
            check(config, hardware)
    else:
        check(config, hardware)


def test_stages_without_a_pipeline_are_refused(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> None:
    with pytest.raises(UserError, match=r"parallel.pp=2: stages are for parallel=pp"):
        Config.of(compose(*tiny_overrides, "parallel.pp=2"))

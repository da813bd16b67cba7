"""The prediction for many devices agrees with closed forms, and with one device's where there is only one."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from cramming.config import UserError, build
from cramming.plan.main import main
from cramming.plan.scaling import (
    NETWORKS,
    Link,
    Network,
    Split,
    device_bytes,
    gradient_seconds,
    predictions,
    splits,
)
from cramming.plan.search import PlanConfig, Target, explore, find_target, planned_config
from cramming.recipe import Config, check

NETWORK = Network(4, Link(100.0, 0.0), Link(10.0, 0.0), "")


SMALL = (
    "model=bert-base",
    "model.hidden_size=64",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.intermediate_size=128",
    "tokenizer.vocab_size=1000",
    "train.sequence_length=32",
    "train.batch_size=16",
    "train.micro_batch=8",
    "plan.device=H100",
)


@pytest.fixture
def planned(compose: Callable[..., dict[str, Any]]) -> tuple[Config, Target]:
    """A small model on a card of the table."""
    settings = compose(*SMALL)
    config = planned_config(settings)
    return config, find_target(build(PlanConfig, settings["plan"], "plan"), "auto", config)


def test_collectives_move_what_the_closed_forms_say():
    assert NETWORK.scatter_seconds(1000, 1) == 0
    assert NETWORK.scatter_seconds(1000, 4) == pytest.approx(0.75 * 1000 / 100)
    # two nodes: inside three quarters of the bytes, between nodes half of each device's quarter
    assert NETWORK.reduce_seconds(1000, 8) == pytest.approx(
        2 * (0.75 * 1000 / 100 + 0.5 * 250 / 10)
    )
    # four devices on four nodes, as replicas on four devices each have them
    assert NETWORK.scatter_seconds(1000, 4, stride=4) == pytest.approx(0.75 * 1000 / 10)


def test_each_latency_is_paid_once_a_round():
    slow = Network(8, Link(float("inf"), 1.0), Link(float("inf"), 100.0), "")
    assert slow.scatter_seconds(1, 8) == 3
    assert slow.scatter_seconds(1, 1024) == 3 + 700


def test_zero_moves_one_and_a_half_times_the_bytes_once_weights_are_sharded():
    def seconds(strategy):
        return gradient_seconds(Split(strategy, 4), 1e9, 1, 0.0, 10**9, NETWORK)

    assert seconds("zero2") == pytest.approx(seconds("zero3") * 2 / 3)
    assert seconds("ddp") == 0 + 2 * NETWORK.scatter_seconds(1e9, 4)


def test_state_shrinks_as_zero_says():
    peak = {
        "weights": 4,
        "gradients": 4,
        "optimizer": 8,
        "activations": 0,
        "head": 0,
        "workspace": 0,
    }
    held = {
        s: device_bytes(Split(s, 8), peak, 1, 10**9) for s in ("ddp", "zero1", "zero2", "zero3")
    }
    assert held == pytest.approx({"ddp": 16, "zero1": 9.5, "zero2": 6, "zero3": 2})


def test_one_device_is_as_fast_as_alone(planned):
    config, target = planned
    fastest = max(
        option.tokens_per_second
        for option in explore(config, target)
        if option.memory == config.memory
    )
    found = predictions(config, target, NETWORKS["nvlink"], [1])
    assert {p.split for p in found} == {
        Split(strategy, 1) for strategy in ("ddp", "zero1", "zero2", "zero3")
    }
    for p in found:
        assert p.exposed_seconds == p.bubble_seconds == 0
        assert p.tokens_per_second >= fastest


def test_no_split_is_faster_than_ideal(planned):
    config, target = planned
    one, *_ = predictions(config, target, NETWORKS["pcie"], [1])
    found = predictions(config, target, NETWORKS["pcie"], [2, 16])
    assert {p.split.devices for p in found} == {2, 16}
    assert {(p.split.tp, p.split.pp) for p in found} == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4)}
    for p in found:
        assert p.step_seconds >= one.step_seconds / p.split.devices


def test_a_batch_that_does_not_divide_has_no_replicas_alone(planned):
    config, target = planned
    config = config.replace(train=config.train.replace(batch_size=6, micro_batch=1))
    assert {
        (p.split.dp, p.split.tp, p.split.pp)
        for p in predictions(config, target, NETWORKS["pcie"], [4])
    } == {
        (2, 2, 1),
        (1, 4, 1),
    }


@pytest.mark.parametrize(
    ("overrides", "strategies"),
    [
        (["train.micro_batch=auto"], {"ddp", "zero1", "zero2", "zero3", "tp", "pp"}),
        (["optim=muon"], {"ddp"}),
        (["optim=adamw8bit"], {"ddp"}),
        (["train.average={start: 0.3, every: 0.1}"], {"ddp"}),
        (["start=cooccurrence"], {"ddp", "zero1", "zero2", "zero3", "tp"}),
        (["runtime.compile=blocks"], {"ddp", "zero1", "zero2", "zero3", "pp"}),
        (
            ["tokenizer.vocab_size=961", "model.vocab_size=961"],
            {"ddp", "zero1", "zero2", "zero3", "pp"},
        ),
        (["parallel=tp"], {"ddp", "zero1", "zero2", "zero3", "tp", "pp"}),
    ],
)
def test_only_what_pretrain_accepts_is_predicted(compose, planned, overrides, strategies):
    config = planned_config(compose(*SMALL, *overrides))
    found = splits(config, planned[1].place, 2, NETWORKS["nvlink"])
    assert {"tp" if s.tp > 1 else "pp" if s.pp > 1 else s.strategy for s in found} == strategies


def test_a_batch_that_grows_is_predicted_in_micro_batches_that_pretrain_accepts(compose, planned):
    config, target = (
        planned_config(compose(*SMALL, "train.batch_ramp={start: 0.5, until: 0.5}")),
        planned[1],
    )
    found = predictions(config, target, NETWORKS["nvlink"], [2])
    assert {p.split.pp for p in found} == {1, 2}
    for p in found:
        check(*p.split.as_run(config, target.place, p.micro_batch))


def test_settings_that_cannot_be_spread_are_refused_with_the_reason(compose):
    with pytest.raises(UserError, match=r"train\.batch_size=16: not a multiple .* x 3 process"):
        main(compose(*SMALL, "plan.devices=[2,3]"))
    with pytest.raises(UserError, match=r"memory\.offload_weights=true: not with several"):
        main(compose(*SMALL, "plan.devices=[2]", "memory.offload_weights=true"))


def test_the_verb_shows_and_writes_them(compose, tmp_path, capsys):
    main(compose(*SMALL, "plan.devices=[8]", f"plan.json={tmp_path / 'plan.json'}"))
    rows = json.loads((tmp_path / "plan.json").read_text())["devices"]
    assert {row["split"]["dp"] * row["split"]["tp"] * row["split"]["pp"] for row in rows} == {8}
    shown = capsys.readouterr().out
    assert "parallel=zero3" in shown and "fastest that fits" in shown and "parallel.tp=4" in shown

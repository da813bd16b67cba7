"""What the schedules cost in time and memory, counted from their actions."""

import itertools

import pytest

from cramming.experimental.stages import ORDERS, holders, layers_of_stage
from cramming.experimental.timeline import (
    actions,
    bubble,
    expected_bubble,
    peak_activations,
    timeline,
)

SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_the_bubble_is_that_of_the_formula(schedule: str, ranks: int, micro_batches: int) -> None:
    """Issue 21 asks for 10 %; with even stages and no time for messages it is exact."""
    assert bubble(timeline(schedule, ranks, micro_batches), ranks) == pytest.approx(
        expected_bubble(schedule, ranks, micro_batches), rel=1e-9
    )


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 16)])
def test_later_schedules_are_idle_for_less(ranks: int, micro_batches: int) -> None:
    shares = [bubble(timeline(name, ranks, micro_batches), ranks) for name in ORDERS]
    for earlier, later in itertools.pairwise(shares):
        assert later <= earlier + 1e-9


@pytest.mark.parametrize("schedule", ORDERS)
def test_every_pass_is_done_once_on_the_rank_of_its_stage(schedule: str) -> None:
    ranks, micro_batches = 4, 8
    order, stages = ORDERS[schedule], 4 * ORDERS[schedule].stages_per_rank
    every = [
        (rank, action)
        for rank, passes_of_rank in enumerate(actions(schedule, ranks, micro_batches))
        for action in passes_of_rank
    ]
    assert all(order.rank_of(action.stage, ranks) == rank for rank, action in every)
    for kinds in ("F", "BI", "BW"):
        done = sorted(
            (action.stage, action.micro_batch) for _, action in every if action.kind in kinds
        )
        assert done == list(itertools.product(range(stages), range(micro_batches)))


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    assert peak_activations(timeline("gpipe", 4, 16), 4) == [16] * 4
    assert peak_activations(timeline("1f1b", 4, 16), 4) == [4, 3, 2, 1]


def test_stages_have_all_layers_once() -> None:
    for stages, layers in ((1, 5), (2, 4), (3, 7), (4, 4), (5, 9)):
        layers_by_stage = [list(layers_of_stage(stage, stages, layers)) for stage in range(stages)]
        assert list(itertools.chain(*layers_by_stage)) == list(range(layers))
        assert max(map(len, layers_by_stage)) - min(map(len, layers_by_stage)) <= 1


def test_every_parameter_is_of_a_stage(make_model) -> None:  # type: ignore[no-untyped-def]
    for tied in (True, False):
        model = make_model(num_layers=4, tie_embeddings=tied, convolution=1)
        of = {name: holders(name, model.config, 4) for name, _ in model.named_parameters()}
        assert {stage for stages in of.values() for stage in stages} == {0, 1, 2, 3}
        assert all(of.values())
        assert [name for name, stages in of.items() if len(stages) > 1] == [
            "encoder.embeddings.tokens.weight"
        ] * tied

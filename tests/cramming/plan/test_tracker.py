"""The tracker counts what tensors hold, and what operations compute, exactly."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from cramming.plan.tracker import HOST, Operation, StorageTracker


def test_a_storage_counts_from_its_first_use_to_its_last() -> None:
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        a = torch.ones(1000)
        view = a[10:].view(-1, 10)
        assert tracker.total == 4000
        b = a + 1
        assert tracker.total == 8000
        del a
        assert tracker.total == 8000  # the view holds it
        del view
        assert tracker.total == 4000
        b.add_(1)
        assert (tracker.total, tracker.peak) == (4000, 8000)
        del b
    assert tracker.total == 0


def test_categories_and_the_parts_of_the_peak() -> None:
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        tracker.category = "weights"
        weight = torch.ones(100)
        tracker.category = "activations"
        x = torch.ones(50, dtype=torch.bfloat16)
        y = x * 2
        tracker.reclassify(y, "gradients")
        z = x * 3
        del y, z
        assert tracker.category_of(weight) == "weights"
    assert +tracker.peak_by_category == {"weights": 400, "activations": 200, "gradients": 100}


def test_what_is_on_the_host_and_computed_there_is_not_counted() -> None:
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        tracker.category = HOST
        home = torch.empty(1000)
        tracker.category = "weights"
        there = torch.empty_like(home, device="cpu").copy_(home)
        assert tracker.total == 4000
        tracker.category = "optimizer"
        moments = [torch.zeros_like(home), home * 2]
        torch._foreach_add_(moments, [home, home])
        assert tracker.total == 4000
        mixed = there + home
        assert tracker.category_of(mixed) == "optimizer"
        tracker.reclassify(home, "gradients")
        assert +tracker.live == {"weights": 4000, "optimizer": 4000}


@pytest.mark.parametrize("fake", [True, False])
def test_a_backward_pass_holds_what_autograd_really_holds(fake: bool) -> None:
    """A residual of width 64: saved are the input of the product, and x; gradients of both ways are summed in place."""

    def peak() -> int:
        with StorageTracker("cpu") as tracker:
            weight = nn.Parameter(torch.ones(64, 64))
            x = torch.ones(1000, 64)
            for _ in range(3):
                x = x + F.linear(x, weight)
            tracker.reset_peak()
            x.sum().backward()
            return tracker.peak

    if fake:
        with FakeTensorMode():
            found = peak()
    else:
        found = peak()
    block, matrix = 1000 * 64 * 4, 64 * 64 * 4
    # three saved inputs and the gradients of both ways; the weight, its gradient and the next to be added to it; the
    # loss and its gradient
    assert found == 3 * block + 2 * block + 3 * matrix + 8


def test_operations_are_counted_with_their_bytes() -> None:
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        a, b = torch.ones(8, 16), torch.ones(16, 32)
        tracker.reset_peak()
        c = a @ b
        c.t()  # a view costs nothing
        c.relu_()
        torch.empty(1000)
    sizes = 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert tracker.operations["pass"] == {
        Operation(2 * 8 * 16 * 32, sizes): 1,
        Operation(0, 2 * 4 * 8 * 32): 1,
    }

"""A synchronous parameter server takes the steps of one process; an asynchronous one counts how old gradients are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from cramming.engine import build_engine
from cramming.parallel.mesh import Mesh


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import parameter_server

    monkeypatch.setattr(parameter_server, "INTERFACE", "lo")
    return parameter_server


def gradient(task: Any, engine: Any, first: int, rows: int) -> torch.Tensor:
    gradients = engine.accumulate([task.source.batch(first, rows)])
    flat = torch.cat([p.grad.flatten() for p in engine.parameters])
    engine.discard(gradients)
    return flat


def test_the_synchronous_server_takes_the_steps_of_one_process(
    bench: Any, tiny_corpus: Any
) -> None:
    task, rows = bench.Task(tiny_corpus, samples=96), bench.ROWS
    plain, server = (
        build_engine(task.config, Mesh.solo(bench.DEVICE), bench.DEVICE),
        bench.Server(task, needed=2),
    )
    worker = build_engine(task.config, Mesh.solo(bench.DEVICE), bench.DEVICE)
    plain.model.load_state_dict(server.engine.model.state_dict())
    for first in (0, 2 * rows, 4 * rows):
        torch.nn.utils.vector_to_parameters(server.weights(), worker.parameters)
        gradients = [gradient(task, worker, first + k * rows, rows) for k in range(2)]
        early = server.push(gradients[0], server.updates)
        assert not early.done()
        late = server.push(gradients[1], server.updates)
        assert torch.equal(early.value()[0], late.value()[0])
        plain.step([task.source.batch(first + k * rows, rows) for k in range(2)], task.rate(first))
    torch.testing.assert_close(
        server.weights(), parameters_to_vector(plain.parameters).detach(), atol=1e-5, rtol=0
    )
    assert server.ages == [0] * 6


def test_the_asynchronous_server_answers_each_gradient_and_counts_its_age(
    bench: Any, tiny_corpus: Any
) -> None:
    server = bench.Server(bench.Task(tiny_corpus, samples=96), needed=1)
    push = torch.ones_like(server.weights())
    versions = [server.push(push, age_of).value()[1] for age_of in (0, 0, 2, 1)]
    assert versions == [1, 2, 3, 4] and server.ages == [0, 1, 0, 2]


def test_the_server_sends_all_of_it_for_every_worker_and_the_ring_at_most_twice(bench: Any) -> None:
    for workers in (2, 4, 8):
        (through, seconds), (ring, ring_seconds) = (
            bench.theory(m, workers, 1000, 8) for m in ("synchronous", "ring")
        )
        assert through == 8000 * workers and ring == 16000 * (workers - 1) / workers
        assert seconds / ring_seconds == pytest.approx(workers**2 / (workers - 1))
        assert bench.theory("asynchronous", workers, 1000, 8) == (through, seconds / 2)

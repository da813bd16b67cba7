"""What each rank of test_rank_memory.py runs: the memory of every tensor in this process, in the middle of a step."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from cramming.data.batches import BatchSource
from cramming.data.corpus import TokenStream
from cramming.engine import build_engine
from cramming.objectives.masking import Masker
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config
from tests.cramming.parallel.rank_worker import CPU, be_ranks, own_cases


def held() -> int:
    """Return the bytes of all tensors, each storage once."""
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    sizes = {}
    for tensor in tensors:
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def noting(
    passing: Callable[[bool], AbstractContextManager[object]], seen: list[int]
) -> Callable[[bool], object]:
    """`passing`, which first notes what is held before a step's last micro-batch."""

    def noted(is_last: bool) -> AbstractContextManager[object]:
        if is_last:
            seen.append(held())
        return passing(is_last)

    return noted


def main(folder: Path) -> None:
    """Write for each case the bytes per parameter in its second step."""
    for name, case in own_cases(folder):
        config = Config.of(case["settings"])
        mesh = Mesh(config.parallel, CPU)
        stream = TokenStream.of_array(
            torch.randint(5, 999, (9999,)).numpy(), torch.zeros(1, dtype=torch.int64).numpy()
        )
        source = BatchSource(
            stream, Masker(config.objective.at(0.0), 1024, 4, (0, 1, 2, 3, 4), 0), 32, "rows", 0
        )
        gc.collect()
        before, seen = held(), list[int]()
        engine = build_engine(config, mesh, CPU)
        assert engine.strategy
        engine.strategy.micro_batch = noting(engine.strategy.micro_batch, seen)  # type: ignore[method-assign,assignment]
        for step in range(2):
            engine.step([source.batch(2 * step, 1), source.batch(2 * step + 1, 1)], 1e-3)
        if mesh.is_main:
            (folder / name).write_text(str((seen[-1] - before) / config.parameters.total))
        del engine
        mesh.close()


if __name__ == "__main__":
    be_ranks(main)

"""Numbers of 4 and 8 bits by torchao: fp8 products, optimizer states of few bits."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming import checkpoint
from cramming.budget import Work
from cramming.engine import Engine
from cramming.hooks import StepResult
from cramming.model.config import ModelConfig
from cramming.model.export import save_pretrained

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is an extra")

Make = Callable[..., Engine]
Train = Callable[..., list[StepResult]]
Weights = Callable[[Engine], list[Tensor]]
LOW_BIT = (
    pytest.param("adamw8bit", 0.02),
    pytest.param("adamw4bit", 0.2),
)  # relative, of the losses of five steps
MEMORY: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint_every": 1},
    "selective": {"checkpoint_every": 1, "checkpoint": "selective"},
    "activations": {"offload_activations": True},
    "weights": {"offload_weights": True},
    "optimizer": {"offload_optimizer": True},
}


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize(("name", "tolerance"), LOW_BIT)
def test_low_bit_states_are_near_and_resume_exactly(
    make_engine: Make,
    tiny_source: Any,
    tmp_path: Path,
    name: str,
    tolerance: float,
    train: Train,
    weights: Weights,
    small_model: ModelConfig,
) -> None:
    wide = replace(
        small_model, hidden_size=64, intermediate_size=64, num_layers=1
    )  # smaller matrices stay fp32 there
    with torch.compiler.set_stance("force_eager"):
        unbroken, first, second, plain = (
            make_engine(seed, model=wide, optim={"name": kind})
            for seed, kind in ((0, name), (0, name), (1, name), (0, "adamw"))
        )
        actual, expected = (train(e, tiny_source, range(5)) for e in (unbroken, plain))
        train(first, tiny_source, range(3))
        with checkpoint.Saver() as saver:
            saver.save(tmp_path, first, Work(steps=3), lambda _: None, retain=False)
            train(first, tiny_source, range(3, 4))
        checkpoint.load(tmp_path / "step-00000003.pt", second)
        train(second, tiny_source, range(3, 5))
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], rel=tolerance)
    assert [s.loss for s in actual] != [s.loss for s in expected]
    assert same_bits(weights(second), weights(unbroken))


def test_low_bit_goes_with_an_offloaded_optimizer(
    make_engine: Make, tiny_source: Any, train: Train, weights: Weights, small_model: ModelConfig
) -> None:
    wide = replace(small_model, hidden_size=64, intermediate_size=64, num_layers=1)
    with torch.compiler.set_stance("force_eager"):
        engines = [
            make_engine(model=wide, optim={"name": "adamw8bit", "clip": None}, **memory)
            for memory in (MEMORY["optimizer"], {})
        ]
        for engine in engines:
            train(engine, tiny_source, range(3))
    assert same_bits(*map(weights, engines))


def test_fp8_converts_the_blocks_only_and_exports_fp32(
    make_engine: Make, tiny_source: Any, tiny_corpus: Path, tmp_path: Path, train: Train
) -> None:
    from safetensors.torch import load_file

    engine, plain = make_engine(mode="fp8"), make_engine()
    kinds = {
        n: type(m).__name__
        for n, m in engine.model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    assert {k for n, k in kinds.items() if ".blocks." in n} == {"Float8Linear"}
    assert {k for n, k in kinds.items() if ".blocks." not in n} == {"Linear"}
    actual, expected = (train(e, tiny_source, range(3)) for e in (engine, plain))
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], rel=0.02)
    assert [s.loss for s in actual] != [s.loss for s in expected]
    files = []
    for trained, folder in ((engine, tmp_path / "fp8"), (plain, tmp_path / "plain")):
        save_pretrained(trained.model, folder, tiny_corpus / "tokenizer.json")  # type: ignore[arg-type]
        files.append(load_file(folder / "model.safetensors"))
    assert [(k, v.dtype, v.shape) for k, v in files[0].items()] == [
        (k, v.dtype, v.shape) for k, v in files[1].items()
    ]
    assert {v.dtype for v in files[0].values()} == {torch.float32}


def test_fp8_multiplies_rounded_numbers(make_engine: Make) -> None:
    """The output of a layer is the product of scaled operands with 3 bits of mantissa."""
    layer = make_engine(mode="fp8").model.encoder.blocks[0].attn.out  # type: ignore[union-attr]
    x = torch.randn(16, 32)

    def rounded(t: Tensor) -> Tensor:
        scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().max()
        return (t * scale).to(torch.float8_e4m3fn).float() / scale

    torch.testing.assert_close(
        layer(x), rounded(x) @ rounded(layer.weight).T + layer.bias, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["checkpoint", "selective", "activations", "weights", "optimizer"])
def test_fp8_goes_with(make_engine: Make, tiny_source: Any, name: str, train: Train) -> None:
    ours, plain = (make_engine(mode="fp8", **memory) for memory in (MEMORY[name], {}))
    assert train(ours, tiny_source, range(2)) == train(plain, tiny_source, range(2))

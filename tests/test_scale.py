"""`scale=` sets the shape of whatever model preset is chosen, by one rule."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from cramming.config import build, config_folder
from cramming.model.config import ModelConfig, count_parameters

NAMES = sorted(path.stem for path in (config_folder() / "scale").glob("*.yaml"))
SHAPE = {"hidden_size", "num_layers", "num_heads", "intermediate_size"}


@pytest.fixture(params=NAMES)
def scale(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_scale_follows_the_rule_and_has_the_parameters_of_its_name(
    compose: Callable[..., dict[str, Any]], scale: str
) -> None:
    counts = []
    for preset, per_width in (("crammed-bert", 1.5), ("bert-base", 2.25)):
        model = build(
            ModelConfig,
            compose(f"model={preset}", f"scale={scale}")["model"] | {"vocab_size": 32768},
            "",
        )
        width = model.hidden_size
        assert (model.head_size, width % 64, model.num_layers) == (64, 0, round(width / 48))
        assert model.intermediate_size == per_width * width
        counts.append(count_parameters(model).total)
    gated, plain = counts
    assert gated == pytest.approx(float(scale.removesuffix("M")) * 1e6, rel=0.15)
    assert plain == pytest.approx(gated, rel=0.05)  # bert-base has positions and a head besides


def test_every_experiment_leaves_its_shape_to_the_preset_and_the_scale() -> None:
    """Settings of an experiment override `scale=`: a shape there would disable it."""
    for path in (config_folder() / "experiment").glob("*.yaml"):
        assert (
            not SHAPE & (yaml.safe_load(path.read_text(encoding="utf-8")).get("model") or {}).keys()
        ), path.name


def test_a_scale_goes_with_an_experiment_and_gives_way_to_a_setting(
    compose: Callable[..., dict[str, Any]],
) -> None:
    model = compose("experiment=crammed-bert-day", "scale=10M", "model.num_layers=2")["model"]
    assert [model[name] for name in sorted(SHAPE)] == [256, 384, 4, 2]

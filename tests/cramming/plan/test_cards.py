"""The table of cards: each number agrees with the others, and a name means one card: never a sibling."""

import re
from pathlib import Path

import pytest

from cramming.plan.cards import ALIASES, CARDS, Card, find
from cramming.precision import FP8_CAPABILITY

ROOT = Path(__file__).parents[3]
each_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti, GeForce RTX 2080 Ti, 2080ti"),
        ("V100 16GB", "Tesla V100-SXM2-16GB"),
        ("V100 PCIe 32GB", "Tesla V100-PCIE-32GB"),
        ("T4", "Tesla T4"),
        ("RTX 3060", "3060, rtx3060 12gb"),
        ("RTX 3060 Ti", "RTX-3060ti"),
        ("RTX 4060 Ti 16GB", "4060 Ti 16 GB"),
        ("RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("RTX A4000", "a4000"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("A10G", "NVIDIA A10G"),
        ("A100 40GB", "NVIDIA A100-SXM4-40GB, a100"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB, A100-80GB"),
        ("A100 PCIe 40GB", "A100-PCIE-40GB"),
        ("A100 PCIe 80GB", "NVIDIA A100 80GB PCIe"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("H100", "NVIDIA H100 80GB HBM3, h100 sxm5"),
        ("H100 NVL", "NVIDIA H100 NVL"),
        ("H200", "NVIDIA H200, NVIDIA H200 141GB HBM3e"),
        ("H200 NVL", "NVIDIA H200 NVL"),
        ("MI300X", "AMD Instinct MI300X, mi300x"),
    ],
)
def test_a_card_has_its_drivers_name_and_those_that_people_type(row: str, names: str) -> None:
    for name in names.split(", "):
        match = find(name)
        assert match and match.name == row, name


@each_card
def test_a_sibling_is_another_card(card: Card) -> None:
    assert find(f"NVIDIA {card.name}") is card
    for other in ("Ti Laptop GPU", "D", "SUPER", "Max-Q", "Ada Generation", "MIG 1g.5gb", "GRID"):
        assert find(f"NVIDIA {card.name} {other}") is not card, other


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GH200 480GB",
        "Quadro RTX 6000",
        "NVIDIA RTX 4000 Ada Generation",
        "Tesla V100S-PCIE-32GB",
        "RTX 4090 D",
    ]
    + ["NVIDIA GeForce RTX 3060 8GB", "A100-SXM-64GB", "NVIDIA TITAN V", "AMD EPYC", "NVIDIA", ""],
)
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    assert find(name) is None


def test_of_several_sizes_the_drivers_memory_tells_which() -> None:
    for gib, row in ((9.77, "RTX 3080 10GB"), (11.77, "RTX 3080 12GB")):
        match = find("NVIDIA GeForce RTX 3080", gib * 2**30)
        assert match and match.name == row


def test_names_are_unique_and_aliases_lead_to_one() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
    for alias, name in ALIASES.items():
        match = find(alias)
        assert match and match.name == name


@each_card
def test_a_cards_numbers_agree_with_each_other(card: Card) -> None:
    """A slip in a row shows: advertised rates with sparsity or with sums in fp16 are twice what is meant."""
    geforce = re.match(r"RTX [2-5]0", card.name) is not None
    ratio = card.tflops / card.fp32_tflops
    if geforce:
        assert ratio == pytest.approx(4 if card.capability < (8, 0) else 2, rel=0.02)
    elif card.capability in ((8, 6), (8, 9)):
        halved = card.name in ("A10G", "L40")  # by their data sheets
        assert ratio == pytest.approx(2 if halved else 4, rel=0.02)
    else:
        assert 7.9 < ratio < 16.1
    assert (card.fp8_tflops is not None) == (card.capability >= FP8_CAPABILITY)
    assert card.fp8_tflops is None or card.fp8_tflops / card.tflops == pytest.approx(2, rel=0.02)
    assert 40 < card.tflops * 1e3 / card.bandwidth < 430  # FLOP a byte
    assert 0.14 < card.tflops / card.watts < 2.3
    assert card.kind == "HBM" or card.bandwidth < 1800
    name = re.search(r"(\d+)GB", card.name)
    assert name is None or int(name[1]) == card.memory


@pytest.mark.parametrize(
    "page", ["README.md", "docs/tutorials/first_gpu_day.md", "cramming/cli.py"]
)
def test_cards_that_are_named_to_users_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r'--device "([A-Z][^"]+)"', text) + re.findall(r'by name\W+"([^"]+)"', text)
    named += re.findall(r"^\| ((?:RTX|[AH]\d00|T4)[^|]*) \|", text, re.MULTILINE)
    assert named and all(find(name) for name in named)

"""Graphics cards by their makers' numbers: the one table that planning, utilisation and the GPU benchmarks read.

Products are dense matrix products of 16-bit numbers with sums in fp32, as training computes; advertised rates are often
twice that (2:4 sparsity) or four times (sums in fp16 as well). On GeForce cards sums in fp32 halve the rate.
"""

import re
from typing import Literal, NamedTuple

# Of the memory a card is sold with, what torch reports as its total. From reports of users who ran out of it: 10.76 GiB
# of a 2080 Ti, 23.65 of a 4090; with error correction in GDDR 14.75 of a T4, 22.2 of an A10G; 79.15 of an 80 GB A100.
REPORTED_SHARE = {"GDDR": 0.975, "GDDR, ECC": 0.92, "HBM": 0.985}

# Turing, by compute capability: CUDA 13 compiles for no older GPU, nor do torch's builds for CUDA 12.8 from 2.11 on
# (pytorch/pytorch#172352). A V100 needs the build for CUDA 12.6 (cu126), which torch 2.15 no longer has (#190385).
OLDEST_IN_CUDA_13 = (7, 5)

# Where a number comes from. `cores x clock`: fp32 is 2 FLOP per core and cycle at the boost clock, products as above.
# `from memory`: entered without the maker's document at hand; to be checked against it.
Source = Literal[
    "Turing whitepaper",
    "GA102 whitepaper",
    "Ada whitepaper",
    "RTX Blackwell whitepaper",
    "data sheet",
    "cores x clock",
    "from memory",
]


class Card(NamedTuple):
    """TFLOP/s of dense 16-bit products with sums in fp32, of fp32 and of fp8 products; GB/s; watts of the board."""

    name: str
    memory: int  # GiB as sold; a name ends in it where a card comes in several sizes
    kind: Literal["GDDR", "GDDR, ECC", "HBM"]
    tflops: float
    fp32_tflops: float
    fp8_tflops: float | None
    bandwidth: int
    watts: int
    capability: tuple[int, int]  # as torch gives it
    source: Source

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 (and TF32) in hardware: Ampere and later."""
        return self.capability >= (8, 0)

    @property
    def needs_cuda_12(self) -> bool:
        """Whether torch has kernels for it only in builds for CUDA 12.6 (cu126): before Turing, from torch 2.11 on."""
        return self.capability < OLDEST_IN_CUDA_13

    @property
    def is_amd(self) -> bool:
        """Whether it is AMD's and not NVIDIA's."""
        return self.name.startswith("MI")

    @property
    def memory_bytes(self) -> int:
        """What torch reports."""
        return int(self.memory * REPORTED_SHARE[self.kind] * 2**30)


CARDS = (  # of one model the smaller first: it is meant where no size is given
    Card("RTX 2080 Ti", 11, "GDDR", 53.8, 13.4, None, 616, 250, (7, 5), "Turing whitepaper"),
    Card("TITAN RTX", 24, "GDDR", 130.5, 16.3, None, 672, 280, (7, 5), "Turing whitepaper"),
    Card("T4", 16, "GDDR, ECC", 65.0, 8.1, None, 320, 70, (7, 5), "data sheet"),
    Card("V100 PCIe 16GB", 16, "HBM", 112.0, 14.0, None, 900, 250, (7, 0), "data sheet"),
    Card("V100 PCIe 32GB", 32, "HBM", 112.0, 14.0, None, 900, 250, (7, 0), "data sheet"),
    Card("V100 16GB", 16, "HBM", 125.0, 15.7, None, 900, 300, (7, 0), "data sheet"),
    Card("V100 32GB", 32, "HBM", 125.0, 15.7, None, 900, 300, (7, 0), "data sheet"),
    Card("RTX 3060", 12, "GDDR", 25.5, 12.7, None, 360, 170, (8, 6), "cores x clock"),
    Card("RTX 3060 Ti", 8, "GDDR", 32.4, 16.2, None, 448, 200, (8, 6), "from memory"),
    Card("RTX 3070", 8, "GDDR", 40.6, 20.3, None, 448, 220, (8, 6), "GA102 whitepaper"),
    Card("RTX 3070 Ti", 8, "GDDR", 43.5, 21.7, None, 608, 290, (8, 6), "from memory"),
    Card("RTX 3080 10GB", 10, "GDDR", 59.5, 29.8, None, 760, 320, (8, 6), "GA102 whitepaper"),
    Card("RTX 3080 12GB", 12, "GDDR", 61.3, 30.6, None, 912, 350, (8, 6), "cores x clock"),
    Card("RTX 3080 Ti", 12, "GDDR", 68.2, 34.1, None, 912, 350, (8, 6), "cores x clock"),
    Card("RTX 3090", 24, "GDDR", 71.0, 35.6, None, 936, 350, (8, 6), "GA102 whitepaper"),
    Card("RTX 3090 Ti", 24, "GDDR", 80.0, 40.0, None, 1008, 450, (8, 6), "Ada whitepaper"),
    Card("RTX 4060", 8, "GDDR", 30.2, 15.1, 60.4, 272, 115, (8, 9), "cores x clock"),
    Card("RTX 4060 Ti 8GB", 8, "GDDR", 44.1, 22.1, 88.2, 288, 160, (8, 9), "cores x clock"),
    Card("RTX 4060 Ti 16GB", 16, "GDDR", 44.1, 22.1, 88.2, 288, 165, (8, 9), "cores x clock"),
    Card("RTX 4070", 12, "GDDR", 58.3, 29.1, 116.6, 504, 200, (8, 9), "cores x clock"),
    Card("RTX 4070 SUPER", 12, "GDDR", 71.0, 35.5, 141.9, 504, 220, (8, 9), "from memory"),
    Card("RTX 4070 Ti", 12, "GDDR", 80.2, 40.1, 160.4, 504, 285, (8, 9), "cores x clock"),
    Card("RTX 4070 Ti SUPER", 16, "GDDR", 88.2, 44.1, 176.4, 672, 285, (8, 9), "cores x clock"),
    Card("RTX 4080", 16, "GDDR", 97.5, 48.7, 194.9, 717, 320, (8, 9), "Ada whitepaper"),
    Card("RTX 4080 SUPER", 16, "GDDR", 104.4, 52.2, 208.9, 736, 320, (8, 9), "from memory"),
    Card("RTX 4090", 24, "GDDR", 165.2, 82.6, 330.3, 1008, 450, (8, 9), "Ada whitepaper"),
    Card("RTX 5060", 8, "GDDR", 38.4, 19.2, 76.7, 448, 145, (12, 0), "from memory"),
    Card("RTX 5060 Ti 8GB", 8, "GDDR", 47.4, 23.7, 94.8, 448, 180, (12, 0), "cores x clock"),
    Card("RTX 5060 Ti 16GB", 16, "GDDR", 47.4, 23.7, 94.8, 448, 180, (12, 0), "cores x clock"),
    Card("RTX 5070", 12, "GDDR", 61.7, 30.9, 123.5, 672, 250, (12, 0), "RTX Blackwell whitepaper"),
    Card(
        "RTX 5070 Ti", 16, "GDDR", 87.9, 43.9, 175.8, 896, 300, (12, 0), "RTX Blackwell whitepaper"
    ),
    Card("RTX 5080", 16, "GDDR", 112.6, 56.3, 225.1, 960, 360, (12, 0), "RTX Blackwell whitepaper"),
    Card(
        "RTX 5090", 32, "GDDR", 209.5, 104.8, 419.0, 1792, 575, (12, 0), "RTX Blackwell whitepaper"
    ),
    Card("RTX A4000", 16, "GDDR", 76.7, 19.2, None, 448, 140, (8, 6), "data sheet"),
    Card("RTX A4500", 20, "GDDR", 94.6, 23.7, None, 640, 200, (8, 6), "data sheet"),
    Card("RTX A5000", 24, "GDDR", 111.1, 27.8, None, 768, 230, (8, 6), "from memory"),
    Card("RTX A5500", 24, "GDDR", 136.5, 34.1, None, 768, 230, (8, 6), "from memory"),
    Card("RTX A6000", 48, "GDDR", 154.8, 38.7, None, 768, 300, (8, 6), "from memory"),
    Card("RTX 6000 Ada", 48, "GDDR", 364.2, 91.1, 728.5, 960, 300, (8, 9), "from memory"),
    Card("A10", 24, "GDDR, ECC", 125.0, 31.2, None, 600, 150, (8, 6), "from memory"),
    Card("A10G", 24, "GDDR, ECC", 70.0, 35.0, None, 600, 300, (8, 6), "from memory"),
    Card("A30", 24, "HBM", 165.0, 10.3, None, 933, 165, (8, 0), "data sheet"),
    Card("A40", 48, "GDDR, ECC", 149.7, 37.4, None, 696, 300, (8, 6), "GA102 whitepaper"),
    Card("L4", 24, "GDDR, ECC", 121.0, 30.3, 242.0, 300, 72, (8, 9), "data sheet"),
    Card("L40", 48, "GDDR, ECC", 181.0, 90.5, 362.0, 864, 300, (8, 9), "data sheet"),
    Card("L40S", 48, "GDDR, ECC", 362.0, 91.6, 733.0, 864, 350, (8, 9), "data sheet"),
    Card("A100 PCIe 40GB", 40, "HBM", 312.0, 19.5, None, 1555, 250, (8, 0), "data sheet"),
    Card("A100 PCIe 80GB", 80, "HBM", 312.0, 19.5, None, 1935, 300, (8, 0), "data sheet"),
    Card("A100 40GB", 40, "HBM", 312.0, 19.5, None, 1555, 400, (8, 0), "data sheet"),
    Card("A100 80GB", 80, "HBM", 312.0, 19.5, None, 2039, 400, (8, 0), "data sheet"),
    Card("H100 PCIe", 80, "HBM", 756.0, 51.0, 1513.0, 2000, 350, (9, 0), "data sheet"),
    Card("H100 NVL", 94, "HBM", 835.0, 60.0, 1671.0, 3900, 400, (9, 0), "from memory"),
    Card("H100", 80, "HBM", 989.0, 67.0, 1979.0, 3350, 700, (9, 0), "data sheet"),
    Card("H200 NVL", 141, "HBM", 835.0, 60.0, 1671.0, 4800, 600, (9, 0), "from memory"),
    Card("H200", 141, "HBM", 989.0, 67.0, 1979.0, 4800, 700, (9, 0), "data sheet"),
    Card("MI300X", 192, "HBM", 1307.4, 163.4, 2614.9, 5300, 750, (9, 4), "data sheet"),
)
ALIASES = {
    "RTX 6000 Ada Generation": "RTX 6000 Ada"
}  # what `find` would not take for the same by itself

# Maker, brand, kind of memory and the socket without which a row is meant: "NVIDIA A100-SXM4-80GB" is the A100 80GB.
_NOT_IN_NAME = re.compile(r"nvidia|geforce|tesla|rtx|amd|instinct|hbm\d\w?|sxm\d?|[\s_-]")
_SIZE = re.compile(r"(?<![\d.])(\d+)\s*gi?b\b")


def find(name: str, memory_bytes: float | None = None) -> Card | None:
    """The card that a user ("3090 ti", "rtx3060 12gb") or a driver ("NVIDIA A100-SXM4-80GB") calls so; None if unknown.

    The whole name counts: a 4090 D, a laptop's GPU or a slice of a card (MIG) are other devices. Of several sizes the
    one in the name is taken, else the one nearest to `memory_bytes`, else the smallest.
    """
    size = _SIZE.search(name.lower())
    found = _BY_KEY.get(_key(name), [])
    if size:
        return next((card for card in found if card.memory == int(size[1])), None)
    if found and memory_bytes is not None:
        return min(found, key=lambda card: abs(card.memory_bytes - memory_bytes))
    return found[0] if found else None


def _key(name: str) -> str:
    return _NOT_IN_NAME.sub("", _SIZE.sub("", name.lower()))


_BY_KEY: dict[str, list[Card]] = {}
for _card in CARDS:
    _BY_KEY.setdefault(_key(_card.name), []).append(_card)
for _alias, _name in ALIASES.items():
    _BY_KEY[_key(_alias)] = _BY_KEY[_key(_name)]

"""Graphics cards by their makers' numbers: the one table that planning, utilisation and the GPU benchmarks read.

The table is cards.csv. Products are dense matrix products of 16-bit numbers with sums in fp32, as training computes;
advertised rates are often twice that (2:4 sparsity) or four times (sums in fp16 as well). On GeForce cards sums in fp32
halve the rate.
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

# Of the memory a card is sold with, what torch reports as its total. From reports of users who ran out of it: 10.76 GiB
# of a 2080 Ti, 23.65 of a 4090; with error correction in GDDR 14.75 of a T4, 22.2 of an A10G; 79.15 of an 80 GB A100.
REPORTED_SHARE = {"GDDR": 0.975, "GDDR, ECC": 0.92, "HBM": 0.985}

# Turing, by compute capability: CUDA 13 compiles for no older GPU, nor do torch's builds for CUDA 12.8 from 2.11 on
# (pytorch/pytorch#172352). A V100 needs the build for CUDA 12.6 (cu126), which torch 2.15 no longer has (#190385).
OLDEST_IN_CUDA_13 = (7, 5)


class Card(NamedTuple):
    """Row of the table: TFLOP/s of 16-bit, fp32 and fp8 products, GB/s of bandwidth, watts of the board.

    `memory` is in GiB as sold, and the name ends in it where a card comes in several sizes. `capability` is torch's
    compute capability. `source`: "cores x clock" is 2 FLOP per core and cycle at the boost clock; "from memory" was
    entered without the maker's document at hand and has to be checked against it.
    """

    name: str
    memory: int
    kind: str
    tflops: float
    fp32_tflops: float
    fp8_tflops: float | None
    bandwidth: int
    watts: int
    capability: tuple[int, int]
    source: str

    @property
    def has_bf16(self) -> bool:
        """True if the card multiplies bf16 (and TF32) in hardware: Ampere and later."""
        return self.capability >= (8, 0)

    @property
    def needs_cuda_12(self) -> bool:
        """True if torch 2.11 and later has kernels for the card only in builds for CUDA 12.6: before Turing."""
        return self.capability < OLDEST_IN_CUDA_13

    @property
    def is_amd(self) -> bool:
        """True if the maker is AMD and not NVIDIA."""
        return self.name.startswith("MI")

    @property
    def memory_bytes(self) -> int:
        """Bytes that torch reports."""
        return int(self.memory * REPORTED_SHARE[self.kind] * 2**30)


def _read_cards() -> tuple[Card, ...]:
    """Return the rows of the table; of one model the smaller come first, and are meant where no size is given."""
    with (Path(__file__).parent / "cards.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_card(row) for row in csv.DictReader(file))


def _card(row: dict[str, str]) -> Card:
    major, minor = row["capability"].split(".")
    return Card(
        name=row["name"],
        memory=int(row["memory_gib"]),
        kind=row["kind"],
        tflops=float(row["tflops"]),
        fp32_tflops=float(row["fp32_tflops"]),
        fp8_tflops=float(row["fp8_tflops"]) if row["fp8_tflops"] else None,
        bandwidth=int(row["bandwidth_gb_per_second"]),
        watts=int(row["watts"]),
        capability=(int(major), int(minor)),
        source=row["source"],
    )


CARDS = _read_cards()
ALIASES = {"RTX 6000 Ada Generation": "RTX 6000 Ada"}  # names that `find` would not match by itself

# Maker, brand, kind of memory and the socket without which a row is meant: "NVIDIA A100-SXM4-80GB" is the A100 80GB.
_NOT_IN_NAME = re.compile(r"nvidia|geforce|tesla|rtx|amd|instinct|hbm\d\w?|sxm\d?|[\s_-]")
_SIZE = re.compile(r"(?<![\d.])(\d+)\s*gi?b\b")


def find(name: str, memory_bytes: float | None = None) -> Card | None:
    """Return the card that a user ("3090 ti") or a driver ("NVIDIA A100-SXM4-80GB") calls so; None if unknown.

    The whole name counts: a 4090 D, a laptop's GPU or a slice of a card (MIG) are other devices. Of several sizes the
    one in the name is taken, else the one nearest to `memory_bytes`, else the smallest.
    """
    size = _SIZE.search(name.lower())
    same_model = _BY_KEY.get(_key(name), [])
    if size:
        return next((card for card in same_model if card.memory == int(size[1])), None)
    if same_model and memory_bytes is not None:
        return min(same_model, key=lambda card: abs(card.memory_bytes - memory_bytes))
    return same_model[0] if same_model else None


def _key(name: str) -> str:
    return _NOT_IN_NAME.sub("", _SIZE.sub("", name.lower()))


_BY_KEY: dict[str, list[Card]] = {}
for _card_of_model in CARDS:
    _BY_KEY.setdefault(_key(_card_of_model.name), []).append(_card_of_model)
for _alias, _name in ALIASES.items():
    _BY_KEY[_key(_alias)] = _BY_KEY[_key(_name)]

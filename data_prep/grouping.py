"""Streams in groups: numpy and the tokenizer are called for many texts at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def grouped(
    items: Iterable[Item], max_items: int, length: Callable[[Item], int], max_length: int
) -> Iterator[list[Item]]:
    """Yield lists of at most `max_items` items, or fewer whose lengths add up to `max_length`."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += length(item)
        if len(group) >= max_items or total >= max_length:
            yield group
            group, total = [], 0
    if group:
        yield group

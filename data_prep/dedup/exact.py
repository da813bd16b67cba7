"""Exact duplicates and the held-out split, both from the content, so both are independent of workers and tasks.

A document is known by two numbers of 64 bits from BLAKE2b of its normalised text: one decides whether it is a
duplicate, one whether it is held out. The chance that among 100 million documents one is dropped for another's number
is 3 in 10,000.
"""

import hashlib

import numpy as np


def content_numbers(data: bytes, seed: int) -> tuple[int, int]:
    """Return two independent 64-bit numbers of a document's content: its key, and the number that splits."""
    salt = seed.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(data, digest_size=16, salt=salt).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def in_sorted(keys_N: np.ndarray, sorted_M: np.ndarray) -> np.ndarray:
    """Return which of the keys stand in the sorted array: [N] bool."""
    if not len(sorted_M):
        return np.zeros(len(keys_N), dtype=bool)
    place_N = np.minimum(np.searchsorted(sorted_M, keys_N), len(sorted_M) - 1)
    is_there_N: np.ndarray = sorted_M[place_N] == keys_N
    return is_there_N


def duplicates(keys_N: np.ndarray) -> np.ndarray:
    """Return which documents equal an earlier one: [N] bool."""
    order_N = np.argsort(keys_N, kind="stable")
    sorted_N = keys_N[order_N]
    is_duplicate_N = np.zeros(len(keys_N), dtype=bool)
    is_duplicate_N[order_N[1:]] = sorted_N[1:] == sorted_N[:-1]
    return is_duplicate_N


def first_of_equal(keys_N: np.ndarray) -> np.ndarray:
    """Return for each document the first that equals it: [N]."""
    _, first, place_N = np.unique(keys_N, return_index=True, return_inverse=True)
    first_N: np.ndarray = first[place_N]
    return first_N


def held_out(numbers_N: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are held out: those below `fraction`, or the one with the smallest number: [N] bool."""
    is_out_N: np.ndarray = numbers_N < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if len(numbers_N) and not is_out_N.any():
        is_out_N[numbers_N.argmin()] = True
    return is_out_N

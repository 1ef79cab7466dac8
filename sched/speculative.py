"""How many draft tokens are accepted: an exactly reproducible random stream (V-83, V-85, S-48)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_ROUNDS = 12
_BLOCKS_AT_ONCE = 64  # vectorised: one call serves 512 trials
_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")
_MASK64 = 2**64 - 1


class ChaChaStream:
    """ChaCha with 12 rounds as a source of random integers, seeded by 64 bits (V-85).

    The block counter has 64 bits and starts at 0, the nonce is 0.
    """

    def __init__(self, seed: int) -> None:
        """``seed`` is expanded to the 256-bit key."""
        self._key = _expand_seed(seed)
        self._words = self._generate()

    def next_u32(self) -> int:
        """The next word."""
        return next(self._words)

    def next_u64(self) -> int:
        """The next two words, the first one in the low half."""
        low = next(self._words)
        return low | next(self._words) << 32

    def _generate(self) -> Iterator[int]:
        counter = 0
        while True:
            yield from _blocks(self._key, counter, _BLOCKS_AT_ONCE).tolist()
            counter += _BLOCKS_AT_ONCE


class AcceptanceSampler:
    """Burst sizes of speculative decoding; one per rank, seeded by C-38."""

    def __init__(self, seed: int, rates: tuple[float, ...]) -> None:
        """``rates[i]`` is the chance that draft token i is accepted if all before it were."""
        self._stream = ChaChaStream(seed)
        self._thresholds = tuple(_threshold(rate) for rate in rates)

    def accepted(self) -> int:
        """Tokens of one burst: 1 + leading successes, one trial each until the first failure."""
        count = 1
        for threshold in self._thresholds:
            if threshold is not None and self._stream.next_u64() >= threshold:
                return count
            count += 1
        return count


def _threshold(rate: float) -> int | None:
    """A draw below it is a success; None where success needs no draw (rate 1)."""
    return None if rate == 1.0 else int(rate * 2.0**64)  # exact: scaling by a power of two


def _expand_seed(seed: int) -> Words:
    """Eight key words out of a 64-bit seed, by a PCG32 generator."""
    words = []
    state = seed
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) & _MASK64
        mixed = (((state >> 18) ^ state) >> 27) & 0xFFFFFFFF
        turn = state >> 59
        words.append((mixed >> turn | mixed << (32 - turn)) & 0xFFFFFFFF)
    return np.array(words, dtype=np.uint32)


def _blocks(key: Words, first: int, count: int) -> Words:
    """The words of blocks ``first`` … ``first + count - 1``, in order."""
    counters = np.arange(first, first + count, dtype=np.uint64)
    start = np.zeros((16, count), dtype=np.uint32)
    start[0:4] = _CONSTANTS[:, None]
    start[4:12] = key[:, None]
    start[12] = counters & np.uint64(0xFFFFFFFF)
    start[13] = counters >> np.uint64(32)
    a, b, c, d = start.reshape(4, 4, count).copy()
    for _ in range(_ROUNDS // 2):
        a, b, c, d = _quarter_rounds(a, b, c, d)
        b, c, d = (np.roll(row, -turn, axis=0) for row, turn in ((b, 1), (c, 2), (d, 3)))
        a, b, c, d = _quarter_rounds(a, b, c, d)
        b, c, d = (np.roll(row, turn, axis=0) for row, turn in ((b, 1), (c, 2), (d, 3)))
    words: Words = np.concatenate((a, b, c, d)) + start
    return words.T.reshape(-1)


def _quarter_rounds(a: Words, b: Words, c: Words, d: Words) -> tuple[Words, Words, Words, Words]:
    """Four quarter rounds at once, one per column of the state's rows a, b, c, d."""
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(words: Words, bits: int) -> Words:
    rotated: Words = words << np.uint32(bits) | words >> np.uint32(32 - bits)
    return rotated

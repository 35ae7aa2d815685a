"""The numbers of the alignment data: the same bits on every processor, and with every version of numpy and torch.

Two engines can only be compared if they start from the same weights and read the same tokens, on whatever machine each
runs. So nothing here depends on a library's choice of algorithm: the raw 64-bit stream of PCG64 is guaranteed by numpy
never to change for a given seed, all that follows is exact integer arithmetic, and a weight then takes one fp32
multiplication, which IEEE 754 rounds the same everywhere. (`torch.randn` and `Generator.normal` promise no such thing.)
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32Array: TypeAlias = NDArray[np.float32]
Int64Array: TypeAlias = NDArray[np.int64]

WEIGHT_STD = 0.02
"""Standard deviation of the initial matrices: `initializer_range` of Qwen3's published configuration."""

_CHUNK = 1 << 20  # values a draw; even, because one 64-bit word makes two weights
_HALF = (1 << 16) - 1
# hi + lo of two 16-bit halves has the variance 2 (2^32 - 1) / 12; centred, it is a triangle from -65535 to 65535.
_STEP = np.float32(WEIGHT_STD / math.sqrt((2**32 - 1) / 6))


def fill_weight(weight: Float32Array, *, name: str, seed: int) -> None:
    """Set the initial value of the parameter `name`, in place: ones for a norm, else a triangle of std 0.02.

    A parameter's values depend on its name and the seed only, not on the other parameters or their order. The triangle
    (the sum of two uniform 16-bit halves) has the moments that training sees and bounds of 2.45 std; a normal
    distribution would need a logarithm, whose last bit differs between libraries.

    Args:
        weight: fp32, any shape, contiguous. Memory beyond it stays under 20 MB.
        name: the parameter's name in the plan.
        seed: of the whole data set.
    """
    if weight.ndim == 1:
        weight[:] = 1
        return
    stream, flat = _open_stream(name, seed), weight.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        # Low half of each word first, whatever the machine's byte order.
        words = stream.random_raw((chunk.size + 1) // 2).astype("<u8", copy=False).view("<u4")[: chunk.size]
        centred = ((words >> 16) + (words & _HALF)).astype(np.int32) - np.int32(_HALF)
        np.multiply(centred.astype(np.float32), _STEP, out=chunk)


def fill_tokens(tokens: Int64Array, *, vocab_size: int, seed: int) -> None:
    """Set tokens in place, independent of each other, about as skewed as words are in text.

    A token is vocab_size times the product of four uniform 16-bit numbers. Were all tokens equally likely, nothing
    could be learned but by heart and every loss curve would stay at ln(vocab_size), where a wrong gradient hardly
    shows; as they are, 2 nats can be learned from their frequencies.

    Args:
        tokens: int64, any shape, contiguous.
        vocab_size: tokens are below it; at most 2^32.
        seed: of the whole data set.
    """
    words = _open_stream("tokens", seed).random_raw(tokens.size)
    halves = [(words >> np.uint64(shift)) & np.uint64(_HALF) for shift in (0, 16, 32, 48)]
    fraction = (halves[0] * halves[1] >> np.uint64(16)) * (halves[2] * halves[3] >> np.uint64(16))
    tokens.reshape(-1)[:] = (fraction * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int64)


def _open_stream(name: str, seed: int) -> np.random.PCG64:
    """An independent stream per tensor, seeded with the first 128 bits of SHA-256 of `seed:name`."""
    return np.random.PCG64(int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little"))

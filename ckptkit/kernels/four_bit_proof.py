"""Whether packed codes are those of a given weight: the proof that it is the one that was packed.

Quantizing takes the nearest of sixteen numbers. So instead of quantizing the weight once more, each
code is asked whether the element lies nearest to the number that it stands for, which is the same
as comparing bytes, and faster. The two zeros of fp4 count as one: it depends on the device which
of them is written.

Source: bitsandbytes 0.50, `backends/default/ops.py` (`quantize_4bit`), `csrc/kernels.cu`
(`dQuantizeNF4`, `dQuantizeFP4`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ckptkit.kernels.four_bit import CODES, Floats, FourBitType, pairs

_SMALLEST = np.float32(1e-38)  # bitsandbytes divides by no less


def mismatches(
    codes: NDArray[np.uint8],
    blocks: Floats,
    scales: Floats,
    quant_type: FourBitType,
    *,
    elements: int,
) -> NDArray[np.int64]:
    """Counts the elements of each block that would be packed differently.

    Args:
        codes: Packed bytes, from the first element of the first block on.
        blocks: The weight's elements, of shape [blocks, blocksize].
        scales: The largest magnitude of each block.
        quant_type: What the codes stand for.
        elements: How many elements there are; fewer than `blocks` holds where the last is short.

    Returns:
        The counts, of shape [blocks].
    """
    lower, upper = _intervals(quant_type)
    scaled = scaled_blocks(blocks, scales, elements).reshape(-1)[:elements]
    held = codes[: -(-elements // 2)]
    wrong = np.zeros(blocks.shape, np.bool_)
    flat = wrong.reshape(-1)[:elements]
    np.less_equal(scaled, lower[held].reshape(-1)[:elements], out=flat)
    flat |= scaled > upper[held].reshape(-1)[:elements]
    counts: NDArray[np.int64] = np.count_nonzero(wrong, axis=1)
    return counts


def scaled_blocks(blocks: Floats, scales: Floats, elements: int) -> Floats:
    """Returns elements between -1 and 1, rounded as the quantizer rounds them.

    Args:
        blocks: The weight's elements, of shape [blocks, blocksize].
        scales: The largest magnitude of each block.
        elements: How many elements there are; fewer than `blocks` holds where the last is short.
    """
    divisors = np.maximum(scales, _SMALLEST)
    scaled = blocks * (np.float32(1) / divisors).astype(np.float32)[:, np.newaxis]
    if elements < blocks.size:
        # A short block is divided, where whole ones are multiplied by the reciprocal.
        scaled[-1] = blocks[-1] / divisors[-1]
    return np.clip(scaled, -1, 1, out=scaled)


@cache
def _intervals(quant_type: FourBitType) -> tuple[Floats, Floats]:
    """Returns what elements of each byte's codes are larger than, and what they are no more than.

    Both are of shape [256, 2], as `four_bit.pairs` makes them.
    """
    table = CODES[quant_type]
    numbers = np.unique(table)
    middles = (numbers[:-1] + numbers[1:]) / np.float32(2)
    edges = np.concatenate([[-np.inf], middles, [np.inf]]).astype(np.float32)
    at = np.searchsorted(numbers, table)
    return pairs(edges[at]), pairs(edges[at + 1])

"""CRC-32 as zip archives hold it, by the fastest library at hand.

Intel's ISA-L folds 64 bytes at a time with carry-less multiplication: 27 GB/s on one core where
zlib has 4. All that ckptkit proves goes through here, and a writer beside a training has its
processor time to spare least of all. Without the library everything works, only slower.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]

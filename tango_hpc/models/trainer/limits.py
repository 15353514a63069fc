"""The trainer's chunk sizes, for its own modules and for `tango plan`. No torch."""

from __future__ import annotations

# Elements of a checkpoint written or read at once. In fp32 it is more than the C library ever keeps of freed memory.
PIECE = 16 * 2**20

# Logits of one chunk: 256 MiB in fp32.
LOGIT_CHUNK = 64 * 2**20

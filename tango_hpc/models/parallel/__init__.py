"""Ranks, process groups, collectives, and Megatron-core on a CPU."""

import warnings

# What Megatron-core says of itself with this torch and without Transformer Engine, once per module and rank.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed. Falling back",
    "full scope is deprecated",
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "When using async grad allreduce it is recommended",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
):
    warnings.filterwarnings("ignore", message=_message)

"""Prints how many bytes the real model keeps for its backward pass, for test_plan.py. A program of its own: it joins a
process group."""

from __future__ import annotations

import json
import os
import tempfile

import torch

from tango_hpc.config.roles import OptimizerConfig
from tango_hpc.parallel.ranks import init_distributed, shutdown_distributed
from tango_hpc.types import TrainSequence
from tests.helpers.policies import policy_of
from tests.helpers.tiny import make_tiny_hf, tiny_hf_config

DIMS = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 64}
TOKENS = 256


def main() -> None:
    """One update of one sequence of 256 fed tokens, in fp32."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_hf(folder, **DIMS)
        policy = policy_of(folder, micro_batch_tokens=4096, optimizer=OptimizerConfig(), total_steps=1)
    assert policy.optimizer is not None
    tensors = [*policy.model.parameters(), *(buffer.param_data for buffer in policy.optimizer.ddp.buffers)]
    weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.update_sft([TrainSequence([1], [2] * TOKENS)])
    print(json.dumps({
        "config": tiny_hf_config(**DIMS), "tokens": TOKENS,
        "saved_bytes": sum(storage.nbytes() for storage in saved.values()),
    }))  # fmt: skip
    shutdown_distributed()


if __name__ == "__main__":
    main()

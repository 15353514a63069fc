"""The transfer over Gloo, without engines: tensors of numbers to a dictionary of tensors, and peers that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tango_hpc.base.model_shape import ModelShape, hf_tensors
from tango_hpc.models.layout.engine_layout import engine_layout
from tango_hpc.models.layout.trainer_layout import LocalParam, megatron_layout
from tango_hpc.models.weight_sync.plan import Layouts, build_plan
from tango_hpc.models.weight_sync.transfer import Transfer, WeightSyncError
from tests.helpers.ranks import run_ranks

SHAPE = ModelShape("qwen2", 4, 32, 48, 4, 2, 8, 107, True)
BUCKET_BYTES = 4096


class DictTarget:
    """Parameters that count how often their module was opened and closed."""

    def __init__(self, layout: Mapping[str, LocalParam]) -> None:
        self.params = {name: torch.zeros(param.shape) for name, param in layout.items()}
        self.calls: list[str] = []

    def open(self, module_name: str) -> None:
        assert f"close {module_name}" not in self.calls
        self.calls.append(f"open {module_name}")

    def tensor(self, name: str) -> torch.Tensor:
        assert f"open {name.rpartition('.')[0]}" in self.calls
        return self.params[name]

    def close(self, module_name: str) -> None:
        self.calls.append(f"close {module_name}")


def filled(layout: Mapping[str, LocalParam]) -> dict[str, torch.Tensor]:
    """Parameters with the values of one random checkpoint, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(size, generator=generator) for name, size in hf_tensors(SHAPE).items()}
    params = {name: torch.zeros(param.shape) for name, param in layout.items()}
    for name, param in layout.items():
        for piece in param.pieces:
            box = full[piece.tensor][tuple(slice(*span) for span in piece.box)]
            params[name][tuple(slice(*span) for span in piece.local)] = box
    return params


def prepare(cut: Layouts, timeout_seconds: float) -> tuple[Transfer, dict[str, torch.Tensor], DictTarget, int]:
    rank = dist.get_rank()
    pipeline_rank, tensor_rank = cut.place(rank)
    source = megatron_layout(SHAPE, cut.tensor, cut.pipeline, tensor_rank, pipeline_rank)
    target = engine_layout(SHAPE, cut.rollout_tensor, rank % cut.rollout_tensor)
    plan = build_plan(cut, element_bytes=4, bucket_bytes=BUCKET_BYTES, rank=rank)
    assert plan.mine is not None
    transfer = Transfer(
        plan.mine,
        source,
        target,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=dist.new_group(timeout=timedelta(seconds=timeout_seconds)),
        timeout_seconds=timeout_seconds,
    )
    return transfer, filled(source), DictTarget(target), plan.totals[rank].sent_bytes


def install(cuts: list[tuple[int, int, int]]) -> None:
    for tensor, pipeline, rollout in cuts:
        cut = Layouts(SHAPE, dist.get_world_size(), tensor, pipeline, rollout, dist.get_world_size())
        transfer, sources, target, planned = prepare(cut, timeout_seconds=20)
        assert 2 * transfer.buffer_elements * 4 <= 2 * BUCKET_BYTES
        assert transfer.run(sources, target) == planned
        expected = filled(engine_layout(SHAPE, rollout, dist.get_rank() % rollout))
        assert all(torch.equal(target.params[name], values) for name, values in expected.items())
        modules = {name.rpartition(".")[0] for name in expected}
        assert sorted(target.calls) == sorted(f"{call} {module}" for module in modules for call in ("open", "close"))


def test_every_module_is_filled_and_closed_once() -> None:
    run_ranks(install, 4, [(2, 2, 4), (2, 2, 2), (4, 1, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2)])


def fail_on_one_rank(folder: str, how: str) -> None:
    """Rank 1 does something else than its part; the others write down what they raise and when."""
    cut = Layouts(SHAPE, 2, 2, 1, 1, 2)
    transfer, sources, target, _ = prepare(cut, timeout_seconds=1.5)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        give_up = time.monotonic() + 60
        while not Path(folder, "caught").exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        return
    start = time.monotonic()
    try:
        transfer.run(sources, target)
    except WeightSyncError as error:
        Path(folder, "caught").write_text(json.dumps([str(error), time.monotonic() - start]))


@pytest.mark.parametrize("how", ["stalled", "killed"])
def test_a_peer_that_is_silent_ends_the_sync_in_time(tmp_path: Path, how: str) -> None:
    if how == "killed":
        with pytest.raises(AssertionError, match="exit codes"):
            run_ranks(fail_on_one_rank, 2, str(tmp_path), how)
    else:
        run_ranks(fail_on_one_rank, 2, str(tmp_path), how)
    message, seconds = json.loads((tmp_path / "caught").read_text())
    assert re.match(
        r"weight sync, rank 0, phase receive: model.embed_tokens.weight.* from rank 1 failed after", message
    )
    assert seconds < 30  # the limit is 1.5 s; a busy machine adds to it

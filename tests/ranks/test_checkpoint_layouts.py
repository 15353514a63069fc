"""What is saved in one layout is read in any other, bit for bit; neither takes more memory than a few pieces.

The pieces are made small, so that tensors are cut in rows and between rows, and a share of the optimizer begins and
ends anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tango_hpc.base.config.roles import OptimizerConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

# tensor x pipeline; what is left of the four ranks is data parallel.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
# Tied embeddings in equal stages; in uneven ones an output layer of its own, and masters apart from the weights.
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "qwen2": ("float32", {}, LAYOUTS),
    "llama": ("bfloat16", {"num_hidden_layers": 3}, [(1, 1), (1, 2), (2, 2)]),
}
VOCAB = 107
PIECE = 3000  # elements: a matrix is two or three pieces


def make_policy(folder: Path, tensor: int, pipeline: int, dtype: str) -> Any:
    return policy_of(
        folder,
        tensor,
        pipeline,
        dtype=dtype,
        micro_batch_tokens=100,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        with_reference=True,
        total_steps=10,
    )


def share_of(policy: Any, parameter: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's elements of a parameter, and their master weights, in float32 the elements themselves, and moments."""
    start, tensors = policy.optimizer.share_of(parameter)
    if not tensors:
        return torch.empty(0), {}
    elements = parameter.detach().view(-1)[start : start + len(tensors["exp_avg"])]
    assert ("param" in tensors) == (parameter.dtype is not torch.float32)
    return elements, {"param": elements, **tensors}


def mark(policy: Any) -> None:
    """Make both moments functions of the master weights, so that they tell where each element came from."""
    for parameter in policy.named_shards().values():
        _, tensors = share_of(policy, parameter)
        if tensors:
            tensors["exp_avg"].copy_(2 * tensors["param"])
            tensors["exp_avg_sq"].copy_(tensors["param"] ** 2)


def wrong_tensors(policy: Any, reference: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not as it was saved, apart from the weights."""
    wrong = []
    for name, parameter in policy.named_shards().items():
        elements, tensors = share_of(policy, parameter)
        if not torch.equal(policy.reference[name], reference[name]):
            wrong.append(f"reference {name}")
        if not tensors:
            continue
        master = tensors["param"]
        if not torch.equal(master.to(parameter.dtype), elements):
            wrong.append(f"master weights {name}")
        if not torch.equal(tensors["exp_avg"], 2 * master) or not torch.equal(tensors["exp_avg_sq"], master**2):
            wrong.append(f"moments {name}")
    return wrong


def all_pairs(folder: Path) -> dict[str, list[str]]:
    """Save each layout's own state, then load it in every other layout: what is not as it was, by pair."""
    import torch.distributed as dist

    from tango_hpc.models.trainer import saved_state
    from tango_hpc.models.trainer.loss import LossSettings

    saved_state.PIECE = PIECE
    found: dict[str, list[str]] = {}
    for family, (dtype, _, layouts) in CASES.items():
        policies = [make_policy(folder / family, *layout, dtype) for layout in layouts]
        references = [{name: tensor.clone() for name, tensor in policy.reference.items()} for policy in policies]
        for number, policy in enumerate(policies):
            for seed in range(2):
                policy.update(random_sequences(8, VOCAB, 10 * number + seed), LossSettings())
            mark(policy)
            policy.save(folder / f"{family}-{number}")
            policy.export_hf(folder / f"{family}-{number}-weights")
        for number, written in enumerate(layouts):
            for policy, reference, read in zip(policies, references, layouts, strict=True):
                if read == written:
                    continue
                for tensor in policy.reference.values():
                    tensor.zero_()
                policy.load(folder / f"{family}-{number}")
                wrong = wrong_tensors(policy, reference)
                policy.export_hf(folder / "again")
                dist.barrier()
                before = load_file(folder / f"{family}-{number}-weights" / "model.safetensors")
                after = load_file(folder / "again" / "model.safetensors")
                wrong += [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
                dist.barrier()
                found[f"{family} {written} in {read}"] = wrong
    return found


def test_every_layout_reads_every_other(tmp_path: Path) -> None:
    for family, (_, dims, _) in CASES.items():
        make_tiny_hf(tmp_path / family, family, **dims)
    for found in run_ranks(all_pairs, 4, tmp_path, timeout=600):
        assert len(found) == 5 * 4 + 3 * 2
        assert {pair: wrong for pair, wrong in found.items() if wrong} == {}


def written_by_rank(folder: Path, layouts: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Bytes of the files that this rank wrote of a checkpoint, by layout."""
    import torch.distributed as dist

    from tango_hpc.models.trainer import saved_state

    saved_state.PIECE = PIECE
    written = {}
    for tensor, pipeline in layouts:
        saved = folder / f"{dist.get_world_size()} ranks, {tensor} x {pipeline}"
        make_policy(folder / "model", tensor, pipeline, "bfloat16").save(saved)
        written[tensor, pipeline] = sum(file.stat().st_size for file in saved.glob(f"__{dist.get_rank()}_*"))
        dist.barrier()
    return written


def test_all_ranks_write_alike(tmp_path: Path) -> None:
    make_tiny_hf(tmp_path / "model", "llama", hidden_size=128, num_hidden_layers=4)
    for num_ranks, layouts in ((2, [(1, 1)]), (4, [(1, 1), (2, 1), (1, 2)])):
        ranks = run_ranks(written_by_rank, num_ranks, tmp_path, layouts)
        for layout in layouts:
            written = [rank[layout] for rank in ranks]
            print(f"{num_ranks} ranks, tensor x pipeline {layout}: {written}")
            assert min(written) > 100_000 and max(written) < 1.1 * min(written), (num_ranks, layout, written)


MIB = 2**20


def peak_above_now(action: Any) -> int:
    """Bytes by which this process's resident memory rises at its highest while `action` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peaks(folder: Path) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Of each layout: bytes of optimizer state, and the peaks of saving and of loading."""
    from tango_hpc.models.trainer import saved_state

    saved_state.PIECE = MIB // 4
    result = {}
    for layout in ((1, 1), (2, 1)):
        policy = make_policy(folder / "model", *layout, "float32")
        policy.save(folder / "warm-up")  # modules that are only imported now
        policy.load(folder / "warm-up")
        state = sum(tensor.nbytes for tensor in policy.optimizer.tensors())
        saved = folder / f"{layout[0]}x{layout[1]}"
        result[layout] = (
            state,
            peak_above_now(lambda policy=policy, saved=saved: policy.save(saved)),
            peak_above_now(lambda policy=policy, saved=saved: policy.load(saved)),
        )
    return result


def test_saving_and_loading_take_a_few_pieces_of_memory(tmp_path: Path) -> None:
    make_tiny_hf(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=6, vocab_size=32768)
    for rank in run_ranks(peaks, 2, tmp_path, timeout=300):
        for state, saving, loading in rank.values():
            # One tensor of the state is 16 MiB or more, a piece a quarter of one: what is not held at once stays far
            # below.
            assert state > 80 * MIB
            assert saving < 12 * MIB and loading < 12 * MIB, (state / MIB, saving / MIB, loading / MIB)

"""What the trainer does only on GPUs, done on a CPU: fused AdamW, and memory that is given up and taken back.

One process trains the same model with and without; CUDA's two calls to lock and unlock pages are recorded.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tango_hpc.base.config.roles import AdapterConfig, OptimizerConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

Weights = dict[str, np.ndarray]


def make_policy(folder: Path, **changes: Any) -> Any:
    optimizer = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)
    return policy_of(folder / "model", optimizer=optimizer, total_steps=10, with_reference=True, **changes)


def train(policy: Any, seeds: range) -> None:
    from tango_hpc.models.trainer.loss import LossSettings

    for seed in seeds:
        policy.update(random_sequences(4, 107, seed), LossSettings())


def weights_of(policy: Any) -> Weights:
    return {name: shard.detach().float().numpy().copy() for name, shard in policy.named_shards().items()}


def state_of(policy: Any) -> dict[str, Any]:
    """How AdamW works and how far it has counted."""
    (inner,) = policy.optimizer.optimizer.chained_optimizers
    steps = [values["step"] for values in inner.optimizer.state.values()]
    return {
        "fused": [group["fused"] for group in inner.optimizer.param_groups],
        "steps": {float(step) for step in steps},
        "own": len({step.data_ptr() for step in steps}) == len(steps),
        "moved": sorted({tensor.dim() for tensor in policy.optimizer.tensors()}),
    }


def fused_and_not(folder: Path) -> dict[str, Any]:
    """Two steps and a checkpoint, written without and read with fused AdamW and the other way round; a third step.

    Of sequences on which no gradient is so near 0 that a step of it shows in which order a CPU adds.
    """
    from tango_hpc.models.trainer import optimizer

    results: dict[str, Any] = {}
    for name, value in (("plain", None), ("fused", True)):
        with patch.object(optimizer, "fuses", lambda _, value=value: value):
            policy = make_policy(folder)
        train(policy, range(3, 5))
        policy.save(folder / name)
        train(policy, range(5, 6))
        results[name] = {"weights": weights_of(policy), **state_of(policy)}
    for name, value, source in (("plain again", None, "fused"), ("fused again", True, "plain")):
        with patch.object(optimizer, "fuses", lambda _, value=value: value):
            policy = make_policy(folder)
        policy.load(folder / source)
        results[f"{name}, loaded"] = state_of(policy)
        train(policy, range(5, 6))
        results[name] = {"weights": weights_of(policy), **state_of(policy)}
    return results


def offloaded(folder: Path, dtype: str) -> dict[str, Any]:
    """Three steps with everything away in between and the reference asked for, as a role does; and without."""
    from tango_hpc.models.trainer import pinned_memory as host_memory

    locked: list[int] = []
    results: dict[str, Any] = {}
    for name in ("stays", "moves"):
        moves = name == "moves"
        with (
            patch.object(host_memory, "on_gpu", lambda _, moves=moves: moves),
            patch.object(host_memory, "page_lock", lambda _, size: locked.append(size)),
            patch.object(host_memory, "page_unlock", lambda _: None),
            patch.object(torch.cuda, "synchronize", lambda: None),
            patch.object(torch.cuda, "empty_cache", lambda: None),
        ):
            policy = make_policy(folder, dtype=dtype)
            policy.offload()
            away = sum(tensor.untyped_storage().nbytes() for tensor in policy.named_shards().values())
            for seed in range(3):
                policy.onload(weights_only=True)
                policy.offload(weights_changed=False)
                policy.save(folder / f"{name}-{dtype}")
                policy.onload()
                train(policy, range(seed, seed + 1))
                policy.offload()
            policy.load(folder / f"{name}-{dtype}")
            policy.onload()
            train(policy, range(2, 3))
            reference = np.concatenate(policy.logprobs(random_sequences(4, 107), reference=True))
            tensors = [*policy.named_shards().values(), *policy.optimizer.tensors()]
            kept = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
            results[name] = {
                "weights": weights_of(policy),
                "reference": reference,
                "away": away,
                "kept": sum(kept.values()),  # in fp32 weights are their own masters
            }
    return results | {"locked": locked}


def adapters_offloaded(folder: Path) -> dict[str, Any]:
    """Steps of a role with an adapter and a reference, with everything away in between; and without."""
    from tango_hpc.models.trainer import hf_io
    from tango_hpc.models.trainer import pinned_memory as host_memory
    from tango_hpc.models.trainer.loss import LossSettings

    read: list[int] = []
    fill = hf_io.ModelFiles.fill

    def filled(files: Any, name: str, parameter: torch.Tensor) -> None:
        read.append(parameter.numel() * 4)  # the files are in float32
        fill(files, name, parameter)

    results: dict[str, Any] = {}
    for name in ("stays", "moves"):
        moves = name == "moves"
        with (
            patch.object(host_memory, "on_gpu", lambda _, moves=moves: moves),
            patch.object(host_memory, "page_lock", lambda *_: None),
            patch.object(host_memory, "page_unlock", lambda _: None),
            patch.object(torch.cuda, "synchronize", lambda: None),
            patch.object(torch.cuda, "empty_cache", lambda: None),
            patch.object(hf_io.ModelFiles, "fill", filled),
        ):
            policy = make_policy(folder, adapter=AdapterConfig(rank=4, alpha=8), seed="0 generator")
            policy.offload()
            uploads, on_the_host = [], 0
            for seed in range(3):
                read.clear()
                policy.onload(weights_only=True)
                synced = {key: shard.detach().clone().numpy() for key, shard in policy.named_shards().items()}
                policy.offload(weights_changed=False)
                policy.save(folder / f"adapter {name}")
                policy.onload()
                sequences = random_sequences(4, 107, seed)
                settings = LossSettings(kl_coef=0.1)
                policy.prepare(sequences, settings)
                policy.update(sequences, settings)
                policy.offload()
                uploads.append(sum(read))
                on_the_host = sum(tensor.nbytes for tensor in policy._memory._host.values())
            policy.load(folder / f"adapter {name}")
            policy.onload()
            elements = sum(value.numel() for value in policy.named_shards().values())
            results[name] = {
                "synced": synced,
                "weights": weights_of(policy),
                "uploads": [upload / (elements * 4) for upload in uploads],
                "host": on_the_host,
                "trained": sum(value.numel() for value in policy.adapters.parameters().values()),
            }
    return results


def saved_from_the_host(folder: Path, dtype: str) -> dict[str, Any]:
    """The same state saved from the GPU and from the host, in front and beside training; then loaded onto the host."""
    from tango_hpc.models.trainer import pinned_memory as host_memory
    from tango_hpc.models.trainer import saved_state

    taken: list[int] = []
    resize, write, may_write = torch.UntypedStorage.resize_, saved_state._Writer._write, threading.Event()

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        """Nothing comes back to the GPU without room for it there."""
        taken.append(size)
        return resize(storage, size)

    def files(name: str) -> dict[str, bytes]:
        """Contents by name; of .metadata, which also has the folder and a random name of the save, what is where."""
        here = folder / f"{name}-{dtype}"
        found = {str(file.relative_to(here)): file.read_bytes() for file in here.rglob("*") if file.is_file()}
        listed = FileSystemReader(here).read_metadata()
        return found | {".metadata": repr((listed.state_dict_metadata, listed.storage_data)).encode()}

    with (
        patch.object(host_memory, "on_gpu", lambda _: True),
        patch.object(host_memory, "page_lock", lambda *_: None),
        patch.object(host_memory, "page_unlock", lambda _: None),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(torch.cuda, "empty_cache", lambda: None),
        patch.object(torch.UntypedStorage, "resize_", resize_),
        patch.object(saved_state._Writer, "_write", lambda writer: (may_write.wait(), write(writer))[1]),
    ):
        policy = make_policy(folder, dtype=dtype)
        train(policy, range(1))
        may_write.set()
        policy.save(folder / f"gpu-{dtype}")
        policy.offload()
        taken.clear()
        policy.save(folder / f"host-{dtype}")
        may_write.clear()
        policy.begin_save(folder / f"beside-{dtype}", background=True)
        saving = list(taken)
        policy.onload()
        train(policy, range(1, 2))
        policy.offload()  # over the copies that were saved from
        may_write.set()
        policy.end_save()
        taken.clear()
        policy.load(folder / f"gpu-{dtype}")
        loading = list(taken)
        policy.onload()
        policy.save(folder / f"again-{dtype}")
    from_gpu = files("gpu")
    assert len(from_gpu) > 3 and sum(map(len, from_gpu.values())) > 100_000
    differing = [
        f"{name}: {file}" for name in ("host", "beside", "again") for file, content in files(name).items()
        if from_gpu.get(file) != content
    ]  # fmt: skip
    return {"saving": saving, "loading": loading, "differing": differing}


def on_rank(folder: Path) -> dict[str, Any]:
    offloading = {dtype: offloaded(folder, dtype) for dtype in ("float32", "bfloat16")}
    host = {dtype: saved_from_the_host(folder, dtype) for dtype in ("float32", "bfloat16")}
    adapters = adapters_offloaded(folder)
    return {"adamw": fused_and_not(folder), **offloading, "host": host, "adapters": adapters}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu")
    make_tiny_hf(folder / "model")
    (result,) = run_ranks(on_rank, 1, folder)
    return result  # type: ignore[no-any-return]


def test_fused_adamw_takes_the_same_steps(results: dict[str, Any]) -> None:
    runs = results["adamw"]
    assert set(runs["plain"]["fused"]) == {None} and set(runs["fused"]["fused"]) == {True}
    for name, shard in runs["plain"]["weights"].items():
        np.testing.assert_allclose(runs["fused"]["weights"][name], shard, rtol=0, atol=1e-6)  # steps are of 1e-3


def test_a_checkpoint_does_not_decide_how_adamw_works(results: dict[str, Any]) -> None:
    runs = results["adamw"]
    for name, fused in (("plain", None), ("fused", True)):
        loaded = runs[f"{name} again, loaded"]
        assert set(loaded["fused"]) == {fused} and loaded["steps"] == {2.0} and loaded["own"]
        assert runs[f"{name} again"]["steps"] == {3.0}
        for key, shard in runs[name]["weights"].items():
            np.testing.assert_allclose(runs[f"{name} again"]["weights"][key], shard, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_on_the_host_is_saved_and_loaded_there(results: dict[str, Any], dtype: str) -> None:
    host = results["host"][dtype]
    assert host == {"saving": [], "loading": [], "differing": []}  # nothing comes to the GPU; every file is the same


def test_step_counters_stay_where_they_are_used(results: dict[str, Any]) -> None:
    """They take four bytes each and would be copied one by one."""
    assert results["adamw"]["fused"]["moved"] == [1]


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_fused_adamw_counts_on_the_device_of_its_parameters(fused: bool | None, device: str) -> None:
    from tango_hpc.models.trainer.optimizer import PolicyOptimizer

    adamw = torch.optim.AdamW([torch.zeros(3, device="meta")])
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adamw)])
    PolicyOptimizer._allocate_state(SimpleNamespace(optimizer=chained, _fused=fused))  # type: ignore[arg-type]
    ((_, values),) = adamw.state.items()
    assert values["step"].device.type == device and values["exp_avg"].device.type == "meta"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_moves_is_the_one_that_stays(results: dict[str, Any], dtype: str) -> None:
    runs = results[dtype]
    assert runs["stays"]["away"] > 0 and runs["moves"]["away"] == 0
    assert runs["moves"]["weights"].keys() == runs["stays"]["weights"].keys()
    for name, shard in runs["stays"]["weights"].items():
        np.testing.assert_array_equal(runs["moves"]["weights"][name], shard)
    np.testing.assert_array_equal(runs["moves"]["reference"], runs["stays"]["reference"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_locks_its_reference_and_its_state_once_each(results: dict[str, Any], dtype: str) -> None:
    reference, state = results[dtype]["locked"]
    weights = sum(shard.size for shard in results[dtype]["stays"]["weights"].values()) * (
        4 if dtype == "float32" else 2
    )
    assert weights <= reference < 1.1 * weights + 2**16  # pages, and a beginning at a multiple of 256 bytes each
    assert results[dtype]["stays"]["kept"] <= state < 1.1 * results[dtype]["stays"]["kept"] + 2**16


def test_an_adapter_that_moves_is_the_one_that_stays(results: dict[str, Any]) -> None:
    stays, moves = results["adapters"]["stays"], results["adapters"]["moves"]
    for when in ("synced", "weights"):
        for name, shard in stays[when].items():
            np.testing.assert_array_equal(moves[when][name], shard)


def test_a_step_with_an_adapter_uploads_the_weights_twice(results: dict[str, Any]) -> None:
    """Once for the sync and once for the update, whose reference is made from the same upload; the host keeps adapter
    and moments alone.
    """
    moves = results["adapters"]["moves"]
    assert moves["uploads"] == [2.0, 2.0, 2.0]
    assert 12 * moves["trained"] <= moves["host"] < 1.1 * 12 * moves["trained"] + 2**16

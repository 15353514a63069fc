"""What the trainer takes from torch and Megatron-core on a GPU, as far as it shows without one.

Kernels are asked for with tensors that have no data: PyTorch then answers with type and shape of the result, through
the same signatures and registrations.
"""

from __future__ import annotations

import inspect
import tempfile
import tomllib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checks import Check, MovedError, Results, check, expect, on_ranks, perform
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tango_hpc.base.families import Scales
from tango_hpc.models.trainer.rotary import LayerPositions, Rotary

CHECKS: list[Check] = []
ON_A_RANK: list[Check] = []
torch_check, rank_check = partial(check, to=CHECKS), partial(check, to=ON_A_RANK)

TOKENS, HEADS, GROUPS, HEAD_DIM = 8, 4, 2, 32


def run() -> Results:
    """All of them."""
    return perform(CHECKS) | on_ranks(_on_a_rank, 1)


def _on_a_rank() -> Results:
    with tempfile.TemporaryDirectory() as folder:
        return perform(ON_A_RANK, Path(folder))


@torch_check("torch is a CUDA build", used="runner/gpu_driver.py", cuda_build=True)
def cuda_build() -> None:
    """Its CUDA version is read without importing it, and has a least driver."""
    from tango_hpc.runner.gpu_driver import LEAST_DRIVER, gpu_software

    assert torch.version.cuda is not None
    expect(gpu_software().cuda, torch.version.cuda, "the CUDA version in torch/version.py")
    if int(torch.version.cuda.split(".")[0]) not in LEAST_DRIVER:
        raise MovedError(f"the least driver of CUDA {torch.version.cuda} is not known (LEAST_DRIVER)")


@torch_check("pins of pyproject.toml", used="pyproject.toml")
def pins() -> None:
    """What is installed beside this vLLM is what we ask for."""
    from packaging.requirements import Requirement

    asked = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    requirements = [Requirement(line) for line in asked]
    found = {requirement.name: version(requirement.name) for requirement in requirements}
    others = [f"{item.name} {found[item.name]} is not {item.specifier}" for item in requirements
              if not item.specifier.contains(found[item.name], prereleases=True)]  # fmt: skip
    expect(others, [], "packages of other versions")


@torch_check("varlen_attn", used="models/trainer/attention.py")
def varlen_attention() -> None:
    """Packed attention by PyTorch's flash attention: our call, grouped heads and not, forward and backward."""
    from tango_hpc.models.trainer import attention

    for groups in (HEADS, GROUPS):
        sizes = (HEADS, groups, groups)
        inputs = [torch.empty(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16, device="meta") for heads in sizes]
        with patch.object(attention, "_has_varlen", lambda *_: True):
            packed = attention.PackedSequences.of_lengths(
                [5, 3], [Rotary(torch.ones(HEAD_DIM // 2))], torch.bfloat16, torch.device("meta")
            )
        for tensor in inputs:
            tensor.requires_grad_()
        for window in (None, 3):
            settings = SimpleNamespace(positions=[LayerPositions(window)], scales=Scales(attention=0.3))
            output = attention.PackedCoreAttention(settings, 1)(*inputs, packed_seq_params=packed)
        expect((tuple(output.shape), output.dtype), ((TOKENS, HEADS, HEAD_DIM), torch.bfloat16), "its output")
        output.sum().backward()
        for tensor in inputs:
            expect(tensor.grad.shape, tensor.shape, "the shape of a gradient")


@torch_check("enable_gqa of padded attention", used="models/trainer/attention.py")
def padded_attention() -> None:
    """Where flash attention has no kernel (fp32), grouped heads are those repeated."""
    from tango_hpc.models.trainer import attention

    rotaries = [Rotary(torch.ones(HEAD_DIM // 2))]
    packed = attention.PackedSequences.of_lengths([5, 3], rotaries, torch.float32, torch.device("cpu"))
    plain_attention = attention.PackedCoreAttention(SimpleNamespace(positions=[LayerPositions()], scales=Scales()), 1)
    query, *others = (torch.randn(TOKENS, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS))
    grouped = plain_attention(query, *others, packed_seq_params=packed)
    repeated = [tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in others]
    plain = plain_attention(query, *repeated, packed_seq_params=packed)
    if not torch.allclose(grouped, plain, atol=1e-6):
        raise MovedError("scaled_dot_product_attention(enable_gqa=True) is not attention with repeated heads")


@torch_check("out_dtype of matrix products", used="models/trainer/vocab_parallel.py")
def wide_products() -> None:
    """Logits and the gradient of the output layer come out of 16-bit matrices in float32."""
    from tango_hpc.models.trainer import vocab_parallel

    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    hidden, weight, grad = empty(TOKENS, 4), empty(16, 4), empty(16, TOKENS)
    total, called = torch.empty(16, 4, device="meta"), list[str]()

    class Names(TorchDispatchMode):
        """Computes nothing: torch 2.11 has no result of this addmm without data."""

        def __torch_dispatch__(self, func: Any, _types: Any, _args: Any = (), kwargs: Any = None) -> Any:
            called.append(func._schema.name + "." + func._overloadname)
            return kwargs["out"]

    with patch.object(vocab_parallel, "_multiplies_wide", lambda _: True):
        logits = vocab_parallel._logits(hidden, weight, 1.0)
        with Names():
            vocab_parallel._add_product_(total, grad, hidden)
    expect((tuple(logits.shape), logits.dtype), ((TOKENS, 16), torch.float32), "torch.mm(out_dtype=torch.float32)")
    expect(called, ["aten::addmm.dtype_out"], "what torch.addmm(out_dtype=torch.float32, out=...) calls")
    if torch.version.cuda is not None:
        on_gpu = torch._C._dispatch_has_kernel_for_dispatch_key(called[0], "CUDA")
        expect(on_gpu, True, f"{called[0]} has a kernel for CUDA")


@torch_check("fused AdamW", used="models/trainer/optimizer.py")
def fused_adamw() -> None:
    """Its state of a parameter is what we allocate in advance, step counter on the GPU, and it takes ours as it is."""
    from tango_hpc.models.trainer.optimizer import PolicyOptimizer

    with FakeTensorMode():
        theirs, ours = (torch.nn.Parameter(torch.empty(7, device="cuda")) for _ in range(2))
        theirs.grad, ours.grad = torch.empty(7, device="cuda"), torch.empty(7, device="cuda")
        reference = torch.optim.AdamW([theirs], fused=True)
        reference.step()
        wanted = {key: (value.device, value.dtype, value.shape) for key, value in reference.state[theirs].items()}
        inner = torch.optim.AdamW([ours])
        wrapped = SimpleNamespace(
            _fused=True, optimizer=SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
        )
        PolicyOptimizer._allocate_state(wrapped)  # type: ignore[arg-type]
        state = dict(inner.state[ours])
        found = {key: (value.device, value.dtype, value.shape) for key, value in state.items()}
        expect(found, wanted, "state that we allocate for torch.optim.AdamW(fused=True)")
        inner.step()
        expect([id(inner.state[ours][key]) for key in state], [id(value) for value in state.values()], "state, by id")


@torch_check(
    "process groups",
    used=(
        "models/parallel/ranks.py, models/parallel/groups.py, models/weight_sync/sync.py,"
        " models/weight_sync/transfer.py"
    ),
)
def process_groups() -> None:
    """NCCL for tensors and Gloo for objects in one group; a barrier on this rank's GPU; waiting without a
    limit's end.
    """
    from torch.distributed.distributed_c10d import BackendConfig

    wanted = {"cpu": "gloo", "cuda": "nccl"}
    expect(BackendConfig(dist.Backend("cpu:gloo,cuda:nccl")).get_device_backend_map(), wanted, "backends by device")
    inspect.signature(dist.barrier).bind(None, device_ids=[0])
    inspect.signature(dist.new_group).bind([0], timeout=None, use_local_synchronization=True)
    inspect.signature(dist.new_group).bind(backend="nccl", timeout=None)
    inspect.signature(dist.P2POp).bind(dist.isend, torch.empty(1), 0, None)
    for name in ("is_completed", "wait"):
        if not hasattr(dist.Work, name):
            raise MovedError(f"torch.distributed.Work has no {name}")


@torch_check("NCCL in torch", used="models/parallel/ranks.py", cuda_build=True)
def nccl() -> None:
    """The build can talk between GPUs."""
    expect(dist.is_nccl_available(), True, "torch.distributed.is_nccl_available()")


@torch_check(
    "CUDA calls",
    used="models/trainer/pinned_memory.py, models/parallel/ranks.py, stages/model_worker.py, stages/rank.py",
    cuda_build=True,
)
def cuda_calls() -> None:
    """Locking of host memory, properties of a card, and counting cards without touching them."""
    names = [(torch._C._cudart, name) for name in ("cudaHostRegister", "cudaHostUnregister", "cudaGetErrorString")]
    names += [(torch._C._CudaDeviceProperties, name) for name in ("uuid", "total_memory")]
    names += [(torch.cuda, name) for name in ("cudart", "_device_count_nvml", "_nvml_based_avail")]
    missing = [f"{owner.__name__}.{name}" for owner, name in names if not hasattr(owner, name)]
    if missing:
        raise MovedError(f"there is no {', '.join(missing)}")
    expect(
        torch.cuda._device_count_nvml() >= -1, True, "torch.cuda._device_count_nvml() is a count, or -1 without NVML"
    )


@rank_check(
    "Megatron-core: groups, model, update",
    used="models/parallel/groups.py, models/trainer/model.py, models/trainer/optimizer.py",
)
def update(folder: Path) -> None:
    """A trainer is made with process groups of its own and takes a step by PyTorch's AdamW, whose state is ours."""
    from tango_hpc.base.config.roles import OptimizerConfig
    from tests.helpers.policies import policy_of
    from tests.helpers.sequences import random_sequences
    from tests.helpers.tiny import make_tiny_hf

    model_dir = make_tiny_hf(folder / "model")
    policy = policy_of(model_dir, optimizer=OptimizerConfig(learning_rate=0.01), total_steps=2)
    (inner,) = policy.optimizer.optimizer.chained_optimizers
    expect(type(inner.optimizer), torch.optim.AdamW, "the class of Megatron-core's optimizer")
    before = {name: shard.detach().clone() for name, shard in policy.named_shards().items()}
    stats = policy.update_sft(random_sequences(4, 100))
    expect(stats.skipped, False, "an update was skipped")
    unchanged = [name for name, shard in policy.named_shards().items() if torch.equal(shard, before[name])]
    expect(unchanged, [], "parameters that an update left alone")
    steps = {float(values["step"]) for values in inner.optimizer.state.values()}
    expect(steps, {1.0}, "AdamW's step counters after one step")
    places = {tensor.untyped_storage()._cdata for tensor in policy.optimizer.tensors()}
    expect(len(places) > 0, True, "storages of the optimizer (offload moves them)")


@rank_check("Megatron-core: checkpoint", used="models/trainer/saved_state.py")
def checkpoint(folder: Path) -> None:
    """Saved and read back through Megatron-core's format with our writer, bit for bit."""
    from tests.helpers.policies import policy_of

    saved, other = (policy_of(folder / "model") for _ in range(2))
    saved.save(folder / "saved")
    with torch.no_grad():
        for shard in other.named_shards().values():
            shard.zero_()
    other.load(folder / "saved")
    wrong = [name for name, shard in saved.named_shards().items() if not torch.equal(shard, other.named_shards()[name])]
    expect(wrong, [], "parameters that came back different")


@rank_check("Megatron-core: sequence parallelism", used="models/trainer/model.py")
def sequence_parallelism(_folder: Path) -> None:
    """The two private things of a process that it needs: the buffer of gathered tokens, the dropout state."""
    from megatron.core import parallel_state

    from tango_hpc.models.trainer import model

    model._prepare_sequence_parallelism()
    parallel_state._GLOBAL_MEMORY_BUFFER.buffer["tokens"] = torch.empty(1)
    model.drop_buffers()
    expect(dict(parallel_state._GLOBAL_MEMORY_BUFFER.buffer), {}, "Megatron-core's buffer of gathered tokens")

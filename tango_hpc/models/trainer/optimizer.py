"""Gradients and AdamW: Megatron-core's data parallelism and distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.trainer.learning_rate import learning_rate
from tango_hpc.models.trainer.model import PolicyModel


class PolicyOptimizer:
    """The model wrapped for gradient reduction, and its AdamW, whose state is spread over data-parallel ranks."""

    def __init__(self, model: PolicyModel, config: OptimizerConfig, groups: PolicyGroups, total_steps: int) -> None:
        self.config, self.total_steps, self.step_count = config, total_steps, 0
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False
        )
        self.ddp = DistributedDataParallel(
            model.config, ddp_config, model, disable_bucketing=True, pg_collection=groups.collection
        )
        for buffer in self.ddp.buffers:
            # Megatron-core's checkpoints place weights by offsets that count the padding between buckets, in a
            # vector that it builds without: a tied embedding of a pipeline would be saved shifted.
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
        if groups.data_size == 1:
            # One rank has nothing to add up and nothing to gather; Gloo would copy every bucket for it.
            for bucket_group in self.ddp.bucket_groups:
                bucket_group.start_grad_sync = bucket_group.start_param_sync = lambda *_, **__: None
        # Our losses are sums over global counts, so gradients are added up and not scaled.
        model.config.finalize_model_grads_func = lambda chunks, _num_tokens, **kwargs: finalize_model_grads(
            chunks, None, **kwargs
        )
        self.optimizer: ChainedOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                min_lr=0.0,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.epsilon,
                bf16=first.dtype is torch.bfloat16,  # adapters are float32 in a model of any precision
                params_dtype=first.dtype,
                use_distributed_optimizer=True,
                clip_grad=config.clip_grad_norm,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        )
        for inner in self.optimizer.chained_optimizers:
            # The gradient norm must count weights that all tensor ranks hold once, by this role's groups.
            inner.tp_group = groups.tensor
        self._fused = fuses(first)
        self._allocate_state()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    @contextmanager
    def gradients_to_come(self) -> Iterator[None]:
        """Leave the gradients of a backward pass as they are on each rank: another pass adds to them."""
        config, finalize = self.ddp.config, self.ddp.config.finalize_model_grads_func
        config.finalize_model_grads_func = None
        try:
            yield
        finally:
            config.finalize_model_grads_func = finalize

    @property
    def next_learning_rate(self) -> float:
        """The schedule's learning rate for the next step."""
        return learning_rate(self.config, self.step_count, self.total_steps)

    def step(self, rate: float, loss_is_finite: bool) -> tuple[bool, float]:
        """Clip and apply the accumulated gradients at the learning rate `rate`: (whether weights changed, gradient norm
        before clipping).

        The norm is over all ranks, so a non-finite gradient anywhere makes it non-finite everywhere, and all
        ranks leave weights and optimizer state alone together. The schedule moves on in either case.
        """
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        self.step_count += 1
        if not (loss_is_finite and math.isfinite(grad_norm)):
            return False, grad_norm
        for inner in self.optimizer.chained_optimizers:
            for group in inner.param_groups:
                group["lr"] = rate
                # Vectors (norms and biases) have a multiplier of 0, which Megatron-core leaves to its scheduler.
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
            clip_grad_by_total_norm_fp32(inner.get_parameters(), self.config.clip_grad_norm, grad_norm)
        self.optimizer.step_with_ready_grads()
        return True, grad_norm

    def tensors(self) -> list[Tensor]:
        """Return master weights and moments, this rank's share."""
        return [
            tensor
            for inner in self.optimizer.chained_optimizers
            for parameter, values in inner.optimizer.state.items()
            for tensor in (parameter, *(value for key, value in values.items() if key != "step"))
            if isinstance(tensor, Tensor)
        ]

    def share_of(self, parameter: Tensor) -> tuple[int, dict[str, Tensor]]:
        """Return this rank's part of a parameter's moments, and of its main weights ("param") where it is in 16 bits:
        (first element, flat tensors).

        The tensors are the optimizer's own, and there are none where other data-parallel ranks have it all.
        """
        (inner,) = self.optimizer.chained_optimizers
        if parameter not in inner.model_param_gbuf_map:
            return 0, {}
        tensors = inner._get_main_param_and_optimizer_states(parameter)
        start = inner._get_model_param_range_map(parameter)["param"].start
        # In float32 the main weights are the weights themselves.
        keys = ("exp_avg", "exp_avg_sq") if parameter.dtype is torch.float32 else ("param", "exp_avg", "exp_avg_sq")
        return start, {key: tensors[key] for key in keys}

    def common_state(self) -> dict[str, Any]:
        """Return the state that all ranks share: AdamW's settings and its number of steps."""
        (inner,) = self.optimizer.chained_optimizers
        return inner.state_dict()

    def load(self, state: dict[str, Any], step_count: int) -> None:
        """Take over another optimizer's `common_state`; tensors are not touched."""
        self.step_count = step_count
        (inner,) = self.optimizer.chained_optimizers
        for group in state["optimizer"]["param_groups"]:
            if "fused" in group:
                group["fused"] = self._fused  # as this device wants it, not the one that wrote the checkpoint
        inner.load_state_dict(state)
        # Megatron-core hands all parameters of PyTorch's AdamW one step counter, which each would then advance.
        for values in inner.optimizer.state.values():
            if "step" in values:
                values["step"] = values["step"].detach().clone()

    def _allocate_state(self) -> None:
        """Give AdamW its moments now: a checkpoint may be written or read before the first step."""
        for inner in self.optimizer.chained_optimizers:
            # Transformer Engine's and Apex's AdamW keep the step elsewhere.
            steps = isinstance(inner.optimizer, torch.optim.AdamW)
            for group in inner.optimizer.param_groups:
                if steps:
                    group["fused"] = self._fused
                for parameter in group["params"]:
                    values = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                    if steps:
                        values["step"] = torch.zeros((), device=parameter.device if self._fused else "cpu")
                    inner.optimizer.state[parameter] = values


def fuses(parameter: Tensor) -> bool | None:
    """Return whether AdamW is one kernel for `parameter`, which takes no memory on top of its state. None leaves it to
    PyTorch.

    On a CPU PyTorch's choice is a loop over the parameters, whose memory is that of the largest.
    """
    return True if parameter.is_cuda else None

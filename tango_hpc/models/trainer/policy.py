"""One role's trainer: log-probabilities of responses, and updates by Eq. 1 or by supervised fine-tuning.

Every method is collective: all ranks call it with the same global batch, and get the same global result.

R: response tokens of a micro-batch. N: response tokens of the global batch, in one flat vector.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from tango_hpc.base.config.roles import OptimizerConfig, RoleConfig
from tango_hpc.base.config.values import ProductDtype
from tango_hpc.base.model_shape import ModelShape, check_parallel
from tango_hpc.base.run.manifest import FileSum
from tango_hpc.base.types import TrainSequence
from tango_hpc.method.equations import token_weights
from tango_hpc.method.tokens import Tokens
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.megatron_cpu import megatron_on_cpu
from tango_hpc.models.parallel.ranks import this_device, to_device
from tango_hpc.models.trainer import hf_io, pinned_memory, saved_state
from tango_hpc.models.trainer.adapters import Adapters, is_adapter
from tango_hpc.models.trainer.flops import update_operations
from tango_hpc.models.trainer.hf_io import ModelFiles
from tango_hpc.models.trainer.loss import (
    REDUCTIONS,
    Batch,
    ChunkLoss,
    LogprobGapError,
    LossSettings,
    TokenLoss,
    UpdateStats,
    combine,
    of_batches,
)
from tango_hpc.models.trainer.micro_batch import (
    MicroBatch,
    build_micro_batch,
    check_tokens,
    fed_length,
    flat,
    give,
    response_offsets,
)
from tango_hpc.models.trainer.model import build_model, transformer_config
from tango_hpc.models.trainer.offload import DeviceMemory
from tango_hpc.models.trainer.optimizer import PolicyOptimizer
from tango_hpc.models.trainer.products import multiply_in_bfloat16, rounds_products
from tango_hpc.models.trainer.rotary import model_config, model_positions
from tango_hpc.models.trainer.vocab_parallel import OutputLayer, vocab_parallel_logprobs, vocab_parallel_loss
from tango_hpc.questions.data.packing import pack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Work:
    """Sequences, the loss of their tokens, and what the loss measures."""

    sequences: Sequence[TrainSequence]
    token_loss: TokenLoss
    reductions: Mapping[str, str]
    temperature: float = 1.0


class Policy:
    """A Megatron-core model of one role, cut tensor x pipeline x data over all ranks."""

    def __init__(
        self,
        settings: RoleConfig,
        dtype: str,
        *,
        model_dir: Path | None = None,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 0,
        with_reference: bool = False,
        products: ProductDtype = "float32",
        seed: str = "",
    ) -> None:
        """Load the model of `settings`, or the one in `model_dir`. Without `optimizer` the weights are frozen.

        `total_steps` is the number of optimizer steps that the learning-rate schedule covers. The reference has the
        weights of `settings.model.reference_path`, or those that training starts from. `products`: see
        `policy.products`. `seed`: of the random A of an adapter.
        """
        self.model_dir = model_dir or settings.model.path
        parallel = settings.parallel
        self.hf_config = hf_io.read_config(self.model_dir)
        self.shape = ModelShape.from_hf_config(self.hf_config)
        check_parallel(self.shape, parallel.tensor, parallel.pipeline)
        self.groups = PolicyGroups.create(parallel.tensor, parallel.pipeline)
        self._pack = partial(
            pack,
            num_ranks=self.groups.data_size,
            max_tokens=settings.micro_batch_tokens,
            min_micro_batches=self.groups.pipeline_size,
        )
        self.dtype, self.device = DTYPES[dtype], this_device()
        model = model_config(self.hf_config)
        self.rotaries, positions = model_positions(model, self.shape, settings.longest)
        with megatron_on_cpu():
            config = transformer_config(
                self.shape,
                model,
                positions,
                self.groups,
                self.dtype,
                recompute=settings.recompute,
                sequence=parallel.sequence,
            )
            self._multiple = parallel.tensor if parallel.sequence else 1
            self.model = build_model(self.shape, config, self.groups)
            rounds = self.device.type == "cpu" and self.dtype is torch.float32 and rounds_products(products)
            self.adapters: Adapters | None = None
            self.reference: Mapping[str, Tensor] | ModelFiles | None = None
            self._load(settings, with_reference, seed, trains=optimizer is not None, rounds=rounds)
            if optimizer is None:
                self.model.requires_grad_(False)
            self._schedule = get_forward_backward_func(pp_size=self.groups.pipeline_size, vp_size=None)
            self._p2p = P2PCommunicator(self.groups.pipeline, config) if self.groups.pipeline_size > 1 else None
            self.optimizer = PolicyOptimizer(self.model, optimizer, self.groups, total_steps) if optimizer else None
        self._memory = DeviceMemory(self.model, self.optimizer, self.adapters)
        self._saving: saved_state.Save | None = None

    def _load(self, settings: RoleConfig, with_reference: bool, seed: str, *, trains: bool, rounds: bool) -> None:
        """Fill the weights, or add adapters to them; keep the reference, or what it is made from."""
        reference_dir = settings.model.reference_path if with_reference else None
        if settings.adapter is None:
            if rounds:
                multiply_in_bfloat16(self.model)
            hf_io.import_weights(reference_dir or self.model_dir, self.shape, self.groups, self.named_shards())
            if with_reference:
                self.reference = pinned_memory.host_copies(self.named_shards())
            if reference_dir is not None:
                hf_io.import_weights(self.model_dir, self.shape, self.groups, self.named_shards())
            return
        # One that is not trained gets its values from a checkpoint.
        adapter = settings.adapter.model_copy(update={} if trains else {"path": None})
        files = ModelFiles(self.model_dir, self.shape, self.groups)
        self.adapters = Adapters(self.model, self.shape, self.groups, adapter, files, seed=seed, rounds=rounds)
        if reference_dir is not None:
            self.reference = ModelFiles(reference_dir, self.shape, self.groups)
        elif with_reference:
            self.reference = self.adapters.copies()

    def named_shards(self) -> dict[str, Tensor]:
        """Return this rank's weights by their name in the layout of `models.layout.trainer_layout`.

        With adapters these are the weights that the adapters have been added to.
        """
        if self.adapters is not None:
            self.adapters.make()
        return {name: value for name, value in self.model.named_parameters() if not is_adapter(name)}

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequence[TrainSequence],
        *,
        reference: bool = False,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> list[np.ndarray]:
        """Return log-probability of every response token, one float32 array per sequence; with `entropy`, that instead.

        `reference` takes the frozen reference's weights.
        """
        offsets = response_offsets(sequences)
        flat_N = torch.zeros(int(offsets[-1]), dtype=torch.float32, device=self.device)

        def collect(logprobs_R: Tensor, entropy_R: Tensor, flat_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            flat_N[flat_R] = entropy_R if entropy else logprobs_R
            return logprobs_R.sum(), {}

        with self._reference_weights() if reference else contextlib.nullcontext():
            if self.adapters is not None and not reference:
                self.adapters.make()
            self._run(sequences, collect, REDUCTIONS, temperature, forward_only=True)
        return self._of_all_ranks(flat_N, offsets)

    def prepare(self, sequences: Sequence[TrainSequence], loss: LossSettings) -> None:
        """Give the sequences what all updates of a batch need to know besides: a KL penalty's reference
        log-probabilities, and the policy's own where a correction is of whole responses.
        """
        if loss.kl_coef:
            give(
                sequences, "reference_logprobs", self.logprobs(sequences, reference=True, temperature=loss.temperature)
            )
        if loss.correction is not None and loss.level == "sequence":
            give(sequences, "old_logprobs", self.logprobs(sequences, temperature=loss.temperature))

    def prepare_next(self, sequences: Sequence[TrainSequence], loss: LossSettings) -> None:
        """Give the sequences what a later update of the batch needs to know besides: the present policy's ratio of each
        response, where the loss needs that.
        """
        if "sequence_ratio" in loss.loss.needs:
            present = self.logprobs(sequences, temperature=loss.temperature)
            for sequence, logprobs_T in zip(sequences, present, strict=True):
                sequence.log_ratio = _mean(logprobs_T - np.asarray(sequence.old_logprobs))

    def update(self, sequences: Sequence[TrainSequence], loss: LossSettings, *, last: bool = True) -> UpdateStats:
        """As `update_jointly`, on sequences of one kind."""
        return self.update_jointly([Batch(sequences, loss)], last=last)

    def update_jointly(self, batches: Sequence[Batch], *, last: bool = True) -> UpdateStats:
        """Take one optimizer step on the weighted sum of each batch's Eq. 1, with the policy before the step as pi_old
        unless sequences have `old_logprobs`.

        Each loss is averaged over the tokens and responses of its batch with global denominators, so the result does
        not depend on the layout. Sequences need advantages, and what `prepare` and `prepare_next` give them. Unless
        this is the `last` update of the batches, they get the `old_logprobs` that the next ones need. All losses have
        the statistics of the first; the factor of the learning rate is the first one's.
        """
        asked = [self._asked(batch, last) for batch in batches]
        first = batches[0].loss
        stats = self._step([work for work, _ in asked], partial(_check_gap, first.max_logprob_gap), first.rate)
        for batch, (_, first_N) in zip(batches, asked, strict=True):
            if first_N is not None:
                offsets = response_offsets(batch.sequences)
                give(batch.sequences, "old_logprobs", self._of_all_ranks(first_N, offsets))
        return stats

    def _asked(self, batch: Batch, last: bool) -> tuple[_Work, Tensor | None]:
        """Return the work of a batch, and the vector in which that leaves log-probabilities for later updates, [N]."""
        sequences, loss = batch.sequences, batch.loss
        lengths_S = [len(sequence.response_ids) for sequence in sequences]
        weights_N = self._to_device(batch.weight * token_weights(lengths_S, loss.average, loss.max_response_tokens))
        advantages_N = self._to_device(flat(sequences, "advantages"))
        rollout_N = self._given(sequences, "rollout_logprobs")
        if loss.correction is not None and rollout_N is None:
            raise ValueError("a correction is set, but a sequence has no rollout_logprobs; set it to None")
        reference_N = self._to_device(flat(sequences, "reference_logprobs")) if loss.kl_coef else None
        old_N = self._given(sequences, "old_logprobs")
        lengths_N = self._to_device(np.repeat(np.asarray(lengths_S, dtype=np.float64), lengths_S))
        ratio_N = self._to_device(np.repeat([sequence.log_ratio for sequence in sequences], lengths_S))
        of_response_N = None
        if loss.correction is not None and loss.level == "sequence":
            gaps_S = [np.subtract(one.old_logprobs, one.rollout_logprobs).sum(dtype=np.float64) for one in sequences]
            of_response_N = self._to_device(np.repeat(gaps_S, lengths_S))
        first_N = None if last or old_N is not None else torch.zeros_like(advantages_N)

        def token_loss(logprobs_R: Tensor, entropy_R: Tensor, flat_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            old_R = logprobs_R.detach() if old_N is None else old_N[flat_R]
            if first_N is not None:
                first_N[flat_R] = old_R
            gap_R = old_R - rollout_N[flat_R] if rollout_N is not None else torch.zeros_like(old_R)
            tokens = Tokens(
                logprobs_R,
                old_R,
                advantages_N[flat_R],
                gap_R if of_response_N is None else of_response_N[flat_R],
                lengths_N[flat_R],
                ratio_N[flat_R],
            )
            reference_R = None if reference_N is None else reference_N[flat_R]
            terms_R, measured = loss.terms(tokens, entropy_R, reference_R)
            gaps_R = gap_R.abs()
            return (terms_R * weights_N[flat_R]).sum(), {**measured, "gap": gaps_R, "largest_gap": gaps_R}

        return _Work(sequences, token_loss, loss.reductions, loss.temperature), first_N

    def update_sft(self, sequences: Sequence[TrainSequence]) -> UpdateStats:
        """Take one optimizer step on the mean cross-entropy of all response tokens."""
        num_tokens = max(int(response_offsets(sequences)[-1]), 1)

        def token_loss(logprobs_R: Tensor, entropy_R: Tensor, _flat_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return -logprobs_R.sum() / num_tokens, {"entropy": entropy_R}

        return self._step([_Work(sequences, token_loss, REDUCTIONS)])

    def evaluate_sft(self, sequences: Sequence[TrainSequence]) -> float:
        """Return mean cross-entropy of all response tokens, in nats."""
        values = self.logprobs(sequences)
        return -float(sum(v.sum(dtype=np.float64) for v in values)) / max(sum(len(v) for v in values), 1)

    def export_hf(self, out_dir: Path) -> None:
        """Write a Hugging Face folder: weights, and config, tokenizer and what else `model_dir` has."""
        hf_io.export_weights(Path(out_dir), self.shape, self.groups, self.named_shards(), model_dir=self.model_dir)

    def export_adapter(self, out_dir: Path) -> None:
        """Write the adapter as PEFT does."""
        assert self.adapters is not None, "this policy has no adapter"
        self.adapters.export(Path(out_dir), self.model_dir)

    def save(self, folder: Path) -> dict[str, FileSum]:
        """Write everything that `load` needs to go on from the same bits; sums of the large files of this rank.

        OSError, on all ranks, if it cannot be written.
        """
        self.begin_save(folder, background=False)
        return self.end_save()

    def begin_save(self, folder: Path, *, background: bool) -> None:
        """Write it, or have a thread write it from a copy while training goes on; `end_save` must follow."""
        assert self._saving is None, "a save is under way"
        self._saving = saved_state.Save(self._state(), folder, background=background)

    def is_written(self) -> bool:
        """Return whether `end_save` need not wait for this process."""
        return self._saving is None or self._saving.is_written()

    def end_save(self) -> dict[str, FileSum]:
        """Wait for what `begin_save` has begun and complete it; as `save`."""
        assert self._saving is not None, "no save is under way"
        saving, self._saving = self._saving, None
        return saving.finish()

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, in this or any other layout. Raises `CheckFailed` where an adapter is there
        and not here, or of another kind, or made for other weights.
        """
        saved_state.load(self._state(), folder)
        if self.adapters is not None:
            self.adapters.changed()

    def _state(self) -> saved_state.PolicyState:
        if self.adapters is not None:
            shards, reference = self.adapters.parameters(), None  # which can be had again
        else:
            shards, reference = self.named_shards(), cast(Mapping[str, Tensor] | None, self.reference)
        return saved_state.PolicyState(
            self.model, self.groups, shards, reference, self.optimizer, self.adapters, self._memory.where_it_is
        )

    def offload(self, *, keep_weights: bool = False, weights_changed: bool = True) -> None:
        """Drop gradients; move optimizer state, and weights, from a GPU to the host."""
        self._memory.offload(keep_weights, weights_changed=weights_changed)

    def onload(self, *, weights_only: bool = False) -> None:
        """Undo `offload`, if need be; `weights_only` is enough for log-probabilities and weight syncs."""
        self._memory.onload(weights_only)

    def _step(
        self,
        works: Sequence[_Work],
        check: Callable[[dict[str, float]], None] | None = None,
        rate_factor: float = 1.0,
    ) -> UpdateStats:
        """Return forward and backward over all batches, then one optimizer step unless `check` raises."""
        assert self.optimizer is not None, "this policy has no optimizer"
        reductions = works[0].reductions
        if self.adapters is not None:
            self.adapters.make()
        with megatron_on_cpu():
            self.optimizer.zero_grad()
            found = []
            for work in works:
                with contextlib.nullcontext() if work is works[-1] else self.optimizer.gradients_to_come():
                    results = self._run(
                        work.sequences, work.token_loss, reductions, work.temperature, forward_only=False
                    )
                num_tokens = int(response_offsets(work.sequences)[-1])
                found.append((self._totals(results, reductions, num_tokens), num_tokens))
            totals = of_batches(found, reductions)
            if check is not None:
                check(totals)
            rate = rate_factor * self.optimizer.next_learning_rate
            stepped, grad_norm = self.optimizer.step(rate, math.isfinite(totals["loss"]))
        if self.adapters is not None:
            self.adapters.changed()
        trained = [sequence for work in works for sequence in work.sequences if sequence.response_ids]
        return UpdateStats(
            loss=totals["loss"],
            grad_norm=grad_norm,
            kl=totals["kl"],
            entropy=totals["entropy"],
            logprob_gap_mean=totals["gap"],
            logprob_gap_max=totals["largest_gap"],
            num_tokens=sum(count for _, count in found),
            num_responses=len(trained),
            learning_rate=rate,
            skipped=not stepped,
            method={name: value for name, value in totals.items() if name not in REDUCTIONS},
            operations=update_operations(
                self.shape, [fed_length(sequence) for sequence in trained], frozen=self.adapters is not None
            ),
        )

    def _run(
        self,
        sequences: Sequence[TrainSequence],
        token_loss: TokenLoss,
        reductions: Mapping[str, str],
        temperature: float,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Run Megatron-core's schedule over this rank's micro-batches; return their statistics, on the last stage."""
        groups = self.groups
        check_tokens(sequences, self.shape.vocab_size)
        members = [i for i, sequence in enumerate(sequences) if sequence.response_ids]
        packs = self._pack([fed_length(sequences[i]) for i in members])[groups.data_rank]
        offsets = response_offsets(sequences)

        def micro_batches() -> Iterator[MicroBatch]:
            for indices in packs:
                chosen = [members[i] for i in indices]
                yield build_micro_batch(
                    sequences, chosen, offsets, self.rotaries, self.dtype, self.device, self._multiple
                )

        def forward_step(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(data)
            output = model(
                input_ids=batch.tokens_1T, position_ids=None, attention_mask=None, packed_seq_params=batch.packed
            )

            def loss(hidden_T1K: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                hidden_RK = hidden_T1K[:, 0].index_select(0, batch.predicted_R)
                layer = OutputLayer(self.model.output_weight(), groups.tensor, self.shape.vocab_size, temperature)
                asked = ChunkLoss(token_loss, batch.flat_R, reductions)
                if forward_only:
                    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RK, batch.targets_R, layer)
                    value = asked(logprobs_R, entropy_R, slice(None))
                else:
                    value = vocab_parallel_loss(hidden_RK, batch.targets_R, layer, asked)
                return value, torch.zeros((), dtype=torch.int, device=self.device), asked.statistics()

            return output, loss

        pipeline = {"p2p_communicator": self._p2p} if self._p2p is not None else {}
        module = self.optimizer.ddp if self.optimizer is not None and not forward_only else self.model
        with megatron_on_cpu():
            return self._schedule(
                forward_step_func=forward_step,
                data_iterator=micro_batches(),
                model=module,
                num_microbatches=len(packs),
                seq_length=1,  # lengths travel with the tensors
                micro_batch_size=1,
                forward_only=forward_only,
                pg_collection=groups.collection,
                **pipeline,
            )

    def _of_all_ranks(self, flat_N: Tensor, offsets_S: np.ndarray) -> list[np.ndarray]:
        """Return the values that the ranks have put into a flat vector, one array per sequence."""
        if self.groups.is_last_stage and self.groups.data_size > 1:
            dist.all_reduce(flat_N, group=self.groups.data)
        if self.groups.pipeline_size > 1:
            dist.broadcast(flat_N, self.groups.last_stage_rank, group=self.groups.pipeline)
        values = flat_N.cpu().numpy()
        return [values[start:stop] for start, stop in itertools.pairwise(offsets_S)]

    def _totals(
        self, results: list[dict[str, Tensor]], reductions: Mapping[str, str], num_tokens: int
    ) -> dict[str, float]:
        """Return the statistics over all micro-batches of all ranks, the same on every rank."""
        groups = self.groups
        mine = combine(results, reductions) if groups.is_last_stage and groups.tensor_rank == 0 else {}
        least = {name: -math.inf if reduction == "max" else 0.0 for name, reduction in reductions.items()}
        shared = torch.tensor([float(mine.get(name, least[name])) for name in reductions], dtype=torch.float64)
        everyone = torch.empty((dist.get_world_size(groups.world), len(reductions)), dtype=torch.float64)
        dist.all_gather_into_tensor(everyone.flatten(), shared, group=groups.world)
        totals = combine([dict(zip(reductions, values, strict=True)) for values in everyone], reductions)
        return {
            name: float(totals[name]) / (max(num_tokens, 1) if reduction == "mean" else 1)
            for name, reduction in reductions.items()
        }

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Put the reference's weights in place of the model's own inside the block."""
        assert self.reference is not None, "this policy was made without a reference"
        if self.adapters is not None:
            # The model's own weights are made again when they are next asked for.
            if isinstance(self.reference, ModelFiles):
                self.adapters.make_from_files(self.reference)
            else:
                on_gpu = pinned_memory.on_gpu(next(self.model.parameters()))
                self.adapters.make(self.reference, keep_base=on_gpu)
            try:
                yield
            finally:
                self.adapters.changed()
            return
        assert not isinstance(self.reference, ModelFiles)
        own = {name: shard.data for name, shard in self.named_shards().items()}
        for name, shard in self.named_shards().items():
            shard.data = self.reference[name].to(self.device, non_blocking=True)
        try:
            yield
        finally:
            for name, shard in self.named_shards().items():
                shard.data = own[name]

    def _given(self, sequences: Sequence[TrainSequence], name: str) -> Tensor | None:
        """Return one field of all sequences in one vector, [N], if all have it."""
        has_it = all(len(getattr(sequence, name)) for sequence in sequences if sequence.response_ids)
        return self._to_device(flat(sequences, name)) if has_it else None

    def _to_device(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values.astype(np.float32)), self.device)


def _mean(values_T: np.ndarray) -> float:
    return float(values_T.mean(dtype=np.float64)) if len(values_T) else 0.0


def _check_gap(limit: float | None, totals: dict[str, float]) -> None:
    """Raise `LogprobGapError` where trainer and engine differ by more than `limit` in the mean over the tokens."""
    gap_mean = totals["gap"]
    if limit is not None and gap_mean > limit:
        raise LogprobGapError(
            f"trainer and engine differ by {gap_mean:.4g} in the mean log-probability of a sampled token, "
            f"more than {limit:g} allowed (train.max_logprob_gap); weights were not updated"
        )

"""Bytes of one rank's trainer and process: weights, optimizer, activations. Pure arithmetic on a model's shape.

Counted from the code that allocates them: `models/trainer/optimizer.py` (gradients in fp32; AdamW's moments in fp32,
plus fp32 masters for 16-bit weights, both spread over data-parallel ranks), `models/trainer/attention.py` and
Megatron-core's unfused local layers (activations), `models/trainer/vocab_parallel.py` (logits by chunks),
`models/trainer/saved_state.py` (a piece at a time). An engine's are in `models/engine/capacity.py`.
Shape suffixes: `base.types`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.config.roles import AdapterConfig
from tango_hpc.base.model_shape import ELEMENT_BYTES, ModelShape, padded_vocab_size, pipeline_stages
from tango_hpc.models.engine.capacity import GIB
from tango_hpc.models.layout.adapter_layout import adapter_layout, adapter_targets, by_parameter
from tango_hpc.models.layout.trainer_layout import LocalParam, megatron_layout
from tango_hpc.models.trainer.limits import LOGIT_CHUNK, PIECE

BASE_BYTES = 2  # of an element in a model's files, which nearly all are in bfloat16
SAVE_BYTES = 2 * 4 * PIECE  # a piece of a checkpoint in fp32, and its bytes on the way out

# Host memory before any weight. On a CPU: what the processes of a machine share, because they are forked from one that
# has imported torch, Megatron-core, transformers and vLLM; what each adds by itself; what an engine's own tables add.
# With these the plan lies 1% above what half a billion parameters take (docs/reproduce.md, section 8); the processes of
# a tiny model stay 0.2 GiB below.
CPU_SHARED_BYTES = int(0.45 * GIB)
CPU_PROCESS_BYTES = int(0.20 * GIB)
CPU_ENGINE_BYTES = int(0.28 * GIB)
# With GPUs: a role's process with all that it has imported (0.64 GB), CUDA's and NCCL's host side and pinned buffers.
# The
# task that it is forked from has imported next to nothing.
GPU_PROCESS_BYTES = 5 * GIB
# What the C library keeps of freed blocks of changing sizes, as a share of what comes and goes.
CPU_HEAP_SLACK = 0.25
PADDED_ATTENTION = 1.1  # padding of sequences inside attention on a CPU: at most 1.25
# What the caching allocator of a GPU cannot use.
GPU_HEAP_SLACK = 0.05


@dataclass(frozen=True)
class TrainerSizes:
    """Bytes of one rank's share of a role's trainer. `reference` is on the host, also with GPUs.

    `kept`: what goes to the host while a GPU is another's, besides optimizer and reference. `reference_pass`: what the
    pass of the reference needs beside the weights. `repeated`: of the elements that are trained, those of adapters that
    all tensor ranks hold, of which the first saves them. With an adapter, weights are made from the model's files and
    the adapter.
    """

    trained: int  # elements
    weights: int
    gradients: int
    optimizer: int
    reference: int
    kept: int
    reference_pass: int
    repeated: int = 0

    @property
    def resident(self) -> int:
        """The bytes that stay through a training step."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Trainer:
    """A role's trainer on one rank of one pipeline stage, and what passes through it."""

    shape: ModelShape
    tensor: int
    pipeline: int
    data: int
    stage: int
    element_bytes: int
    on_cpu: bool
    recompute: Literal["none", "selective", "full"]
    with_reference: bool
    sequence: bool = False
    adapter: AdapterConfig | None = None

    @cached_property
    def sizes(self) -> TrainerSizes:
        """Weights and what belongs to each of them."""
        layout = _layout(self.shape, self.tensor, self.pipeline, self.stage)
        weights = _num_elements(layout) * self.element_bytes
        if self.adapter is None:
            state_bytes = 8 if self.element_bytes == 4 else 12
            reference = weights if self.with_reference else 0
            return TrainerSizes(
                trained=_num_elements(layout),
                weights=weights,
                gradients=_num_elements(layout) * 4,
                optimizer=-(-_num_elements(layout) // self.data) * state_bytes,
                reference=reference,
                kept=weights,
                reference_pass=reference,
            )
        targets = adapter_targets(self.shape, self.adapter.target_modules)
        adapters = adapter_layout(self.shape, self.adapter.rank, targets, layout)
        trained = _num_elements(by_parameter(adapters))
        base = _num_elements({name: layout[name] for name in adapters}) * BASE_BYTES  # two sets are made from one copy
        return TrainerSizes(
            trained=trained,
            weights=weights + trained * 4,
            gradients=trained * 4,
            optimizer=-(-trained // self.data) * 8,
            reference=trained * 4 if self.with_reference else 0,
            kept=trained * 4 + (weights if self.on_cpu else 0),
            reference_pass=base if self.with_reference and not self.on_cpu else 0,
            repeated=sum(
                math.prod((weight.a if weight.cut == "rows" else weight.b).shape) for weight in adapters.values()
            ),
        )

    def uploads(self) -> int:
        """Return the bytes that come from the host to a GPU in a step of the role: weights for the sync and again for
        the update, the optimizer, and the reference unless it is made from the same upload.
        """
        elements = _num_elements(_layout(self.shape, self.tensor, self.pipeline, self.stage))
        weights = self.sizes.kept if self.adapter is None else elements * BASE_BYTES + self.sizes.kept
        return 2 * weights + self.sizes.optimizer + self.sizes.reference

    def saved_weights(self, tensor_rank: int) -> int:
        """Return the bytes of weights, or of an adapter in their place, that data-parallel ranks save together."""
        if self.adapter is None:
            return self.sizes.weights
        return (self.sizes.trained - (self.sizes.repeated if tensor_rank else 0)) * 4

    def saved(self, tensor_rank: int) -> int:
        """Return the bytes that one rank writes into a checkpoint, its share of what data-parallel ranks all hold."""
        if self.adapter is None:
            return self.sizes.optimizer + -(-(self.sizes.weights + self.sizes.reference) // self.data)
        return -(-3 * self.saved_weights(tensor_rank) // self.data)

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return len(pipeline_stages(self.shape.num_layers, self.pipeline)[self.stage])

    @property
    def is_last(self) -> bool:
        """Return whether this stage has the output layer."""
        return self.stage == self.pipeline - 1

    def saved_per_token(self) -> int:
        """Return bytes that one layer makes of one token and needs in its backward pass, the input of the layer
        included.
        """
        size = self.element_bytes
        hidden, query, key, inner = self._widths()
        # Composite RMSNorm keeps its input and the normalised input, in fp32.
        norms = 4 * hidden * 4 + 2 * hidden * size if self.on_cpu else 4 * hidden * size
        norms //= self._shares
        # gate and up together, silu of the gate, their product
        return int(norms + (self._attention_width(query, key) + 4 * inner) * size)

    def kept_per_token(self) -> int:
        """Return the bytes of a token's activations that a layer keeps for the backward pass."""
        size = self.element_bytes
        hidden, query, key, inner = self._widths()
        if self.recompute == "none":
            return self.saved_per_token()
        if self.recompute == "full":
            return hidden * size // self._shares
        inputs = 2 * hidden * size // self._shares  # of the norms; outputs of norms and gate are forgotten
        return int(inputs + (self._attention_width(query, key) + 2 * inner) * size)

    def activations(self, num_tokens: int, num_in_flight: int) -> int:
        """Return bytes kept for the backward pass of `num_in_flight` micro-batches of T tokens on this stage.

        Where something is computed again, with what one layer then has.
        """
        hidden, _, _, inner = self._widths()
        kept = self.num_layers * self.kept_per_token() + hidden * self.element_bytes
        again = 0
        if self.recompute == "full":
            again = self.saved_per_token()
        elif self.recompute == "selective":  # outputs of a norm and of the gate come back as copies
            copies = (hidden // self._shares + inner) * self.element_bytes
            again = self.saved_per_token() - self.kept_per_token() + copies
        return (kept * num_in_flight + again) * num_tokens

    def layer_workspace(self, num_tokens: int, *, backward: bool) -> int:
        """Return the extra bytes of one layer's forward or backward pass at its largest, in the feed-forward part.

        Tokens that ranks have shared out come together for it, and in the backward pass their gradients too.
        """
        hidden, _, _, inner = self._widths()
        gathered = (2 if backward else 1) * hidden if self.sequence else 0
        return ((6 if backward else 4) * inner + gathered) * self.element_bytes * num_tokens

    def head_workspace(self, num_tokens: int, *, backward: bool) -> int:
        """Return the extra bytes of log-probabilities and, with `backward`, their gradients; only the last stage has a
        head.
        """
        if not self.is_last:
            return 0
        rows = padded_vocab_size(self.shape.vocab_size, self.tensor) // self.tensor
        chunk = min(LOGIT_CHUNK, rows * num_tokens)
        weight = rows * self.shape.hidden_size
        size = self.element_bytes
        hidden = 2 * self.shape.hidden_size * size * num_tokens
        forward = 8 * chunk + hidden
        if not backward:
            return forward
        if self.adapter is not None:
            weight = 0  # frozen
        product = weight * size if self.on_cpu else 0  # a GPU adds a chunk's product to the sum in place
        # The gradient of the weight is added to the sum that the trainer keeps anyway.
        return max(forward, (4 + (2 if size == 2 else 0)) * chunk + product + hidden)

    def embedding_gradients(self) -> int:
        """Return the bytes of the gradient of a tied embedding's lookup; that of the output layer is added to the sum
        at once.
        """
        if not self.shape.tied or self.pipeline > 1 or self.adapter is not None:
            return 0
        rows = padded_vocab_size(self.shape.vocab_size, self.tensor) // self.tensor
        return rows * self.shape.hidden_size * self.element_bytes

    def update_workspace(self, num_tokens: int, num_in_flight: int) -> int:
        """Return the bytes that forward, backward and the optimizer step need besides `resident`."""
        kept = self.activations(num_tokens, num_in_flight)
        top = max(self.head_workspace(num_tokens, backward=True), self.layer_workspace(num_tokens, backward=True))
        # AdamW takes nothing (on GPUs it is one kernel), Gloo copies of the bucket that it reduces and of that it
        # gathers.
        step = self.sizes.gradients + self._trained_bytes() if self.on_cpu and self.data > 1 else 0
        return max(kept + top, self.embedding_gradients(), step, self.merge_workspace())

    def _trained_bytes(self) -> int:
        return self.sizes.trained * (self.element_bytes if self.adapter is None else 4)

    def merge_workspace(self) -> int:
        """Return the bytes that the largest weight needs while an adapter is added to it: W0 as in its file, and in
        float64 a piece of W0 and of the sum.
        """
        if self.adapter is None:
            return 0
        layout = _layout(self.shape, self.tensor, self.pipeline, self.stage)
        largest = max(math.prod(param.shape) for name, param in layout.items() if ".layers." in name)
        return largest * BASE_BYTES + 2 * 8 * min(largest, PIECE)

    def logprob_workspace(self, num_tokens: int) -> int:
        """Return the extra bytes of a forward pass without gradients."""
        hidden = 4 * self.shape.hidden_size * self.element_bytes * num_tokens
        layer = self.layer_workspace(num_tokens, backward=False)
        return hidden + max(layer, self.head_workspace(num_tokens, backward=False))

    @property
    def _shares(self) -> int:
        """Among how many ranks the tokens between the cut weights are shared out."""
        return self.tensor if self.sequence else 1

    def _attention_width(self, query: int, key: int) -> float:
        """Return elements that attention keeps of a token: queries, keys and values, and what comes out of it."""
        if self.on_cpu:
            return PADDED_ATTENTION * (2 * query + 2 * key) + query
        return 2 * query + 2 * key

    def _widths(self) -> tuple[int, int, int, int]:
        """Return hidden size, and this rank's widths of queries, keys and the feed-forward part."""
        shape = self.shape
        key_heads = max(shape.num_kv_heads // self.tensor, 1)
        return (
            shape.hidden_size,
            shape.num_heads // self.tensor * shape.head_dim,
            key_heads * shape.head_dim,
            shape.intermediate_size // self.tensor,
        )


def trainer_of(config: Config, model: str, stage: int) -> Trainer:
    """Return the trainer of a model, by its first role, on one stage of its pipeline."""
    settings = config.models[model]
    tensor, pipeline = settings.parallel.tensor, settings.parallel.pipeline
    return Trainer(
        shape=role_shape(config, model),
        tensor=tensor,
        pipeline=pipeline,
        data=config.world_size // (tensor * pipeline),
        stage=stage,
        element_bytes=ELEMENT_BYTES[config.launch.dtype],
        on_cpu=config.launch.device == "cpu",
        recompute=settings.recompute,
        sequence=settings.parallel.sequence,
        with_reference=config.algorithm.kl_coef > 0,
        adapter=settings.adapter,
    )


@lru_cache(maxsize=256)
def _layout(shape: ModelShape, tensor: int, pipeline: int, stage: int) -> dict[str, LocalParam]:
    return megatron_layout(shape, tensor, pipeline, 0, stage)


def _num_elements(layout: dict[str, LocalParam]) -> int:
    return sum(math.prod(param.shape) for param in layout.values())

"""Megatron-core's GPTModel for a Hugging Face config of a dense decoder."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from transformers import PreTrainedConfig

from tango_hpc.base.families.family import NORMS
from tango_hpc.base.model_shape import ModelShape, padded_vocab_size, pipeline_stages
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.ranks import this_device
from tango_hpc.models.trainer.attention import PackedCoreAttention, PackedSelfAttention
from tango_hpc.models.trainer.decoder import AllHeadsNorm, DecoderConfig, DecoderLayer
from tango_hpc.models.trainer.recompute import GatedUnit, TokenNorm, forget_cheap_outputs
from tango_hpc.models.trainer.rotary import LayerPositions

# The dimension along which tensor ranks cut a weight; all others are whole on every rank.
_CUT_DIMENSION = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}
_DROPOUT_STATE = "model-parallel-rng"
# Settings of all families: layers of RMS norms, gated units and rotary attention, and nothing that needs a compiler.
_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "use_te_activation_func": True,  # a module of the layers' specification: ours, of the family's activation
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",  # dense model; variable lengths are refused with the default
    "deallocate_pipeline_outputs": True,
    "calculate_per_token_loss": True,  # gradients are summed over ranks: our losses carry global denominators
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "transformer_impl": "local",
}


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns hidden states: log-probabilities are computed from them in chunks."""

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        embedded, *rest = super()._preprocess(*args, **kwargs)
        scale = self.config.scales.embedding
        if self.pre_process and scale != 1.0:  # rounded to the precision of the weights, as transformers does
            embedded = embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)
        if self.pre_process and torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()  # with a frozen embedding: a layer that is recomputed asks its input for it
        return embedded, *rest

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            # What follows adds up its gradients over the tensor ranks by itself.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        scale = self.config.scales.logits
        return hidden_states * scale if self.post_process and scale != 1.0 else hidden_states

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, on the last stage: [padded vocabulary / tensor size, hidden]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any],
    ) -> None:
        """Do as Megatron-core's, with this role's data-parallel rank instead of the global state's."""
        if self.pre_process or not self.post_process:
            return
        del sharded_state_dict[output_layer_weight_key]
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.output_layer.weight,
            key=first_stage_word_emb_key,
            replica_id=(1, 0, metadata["dp_cp_group"].rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def transformer_config(
    shape: ModelShape,
    hf_config: PreTrainedConfig,
    positions: list[LayerPositions],
    groups: PolicyGroups,
    dtype: torch.dtype,
    *,
    recompute: Literal["none", "selective", "full"],
    sequence: bool,
) -> DecoderConfig:
    """Return the configuration of the model, which needs no Transformer Engine, Apex or compiler.

    With `sequence`, tensor ranks share out the tokens between the cut weights.
    """
    stages = [len(layers) for layers in pipeline_stages(shape.num_layers, groups.pipeline_size)]
    uneven = len(set(stages)) > 1
    return DecoderConfig(
        **_ALWAYS,
        family=shape.kind,
        scales=shape.kind.scales(hf_config.to_dict()),
        positions=positions,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=float(hf_config.rms_norm_eps),
        layernorm_zero_centered_gamma=shape.kind.norm_adds_one,
        add_qkv_bias=shape.kind.qkv_bias,
        qk_layernorm=shape.kind.qk_norm is not None,
        tensor_model_parallel_size=groups.tensor_size,
        sequence_parallel=sequence,
        pipeline_model_parallel_size=groups.pipeline_size,
        num_layers_in_first_pipeline_stage=stages[0] if uneven else None,
        num_layers_in_last_pipeline_stage=stages[-1] if uneven else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=[],  # none of Megatron-core's own: see recompute.py
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def build_model(shape: ModelShape, config: DecoderConfig, groups: PolicyGroups) -> PolicyModel:
    """Build this rank's part of the model; its weights are not set yet."""
    kind = shape.kind
    spec = get_gpt_layer_local_spec(qk_layernorm=kind.qk_norm is not None, normalization="RMSNorm")
    spec.module = DecoderLayer
    attention = spec.submodules.self_attention
    attention.module = PackedSelfAttention
    attention.submodules.core_attention = PackedCoreAttention
    for name, heads in (("q_layernorm", shape.num_heads), ("k_layernorm", shape.num_kv_heads)):
        if kind.qk_norm == "head":
            setattr(attention.submodules, name, TokenNorm)
        elif kind.qk_norm == "all":
            whole = {"num_heads": heads, "group": groups.collection.tp}
            setattr(attention.submodules, name, ModuleSpec(module=AllHeadsNorm, params=whole))
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        setattr(spec.submodules, name, TokenNorm if name in NORMS[kind.norms] else IdentityOp)
    spec.submodules.mlp.submodules.activation_func = GatedUnit
    num_layers = len(pipeline_stages(shape.num_layers, groups.pipeline_size)[groups.pipeline_rank])
    if config.sequence_parallel:
        _prepare_sequence_parallelism()
    model = PolicyModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=TokenNorm),
        vocab_size=padded_vocab_size(shape.vocab_size, groups.tensor_size),
        max_sequence_length=0,  # only learned positions, which we do not have, would use it
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",  # rotary, in our attention
        pg_collection=groups.collection,
    )
    if config.recompute_granularity == "selective":
        forget_cheap_outputs(model)
    # PyTorch's norms are made on the CPU in float32 whatever the configuration says.
    model.to(device=this_device(), dtype=config.params_dtype)
    for name, parameter in model.named_parameters():
        ending = ".".join(name.rsplit(".", 2)[-2:])
        # Without initialisation Megatron-core leaves these unset, and would count cut weights once per tensor
        # rank only in the gradient norm.
        if ending in _CUT_DIMENSION and not hasattr(parameter, "tensor_model_parallel"):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, _CUT_DIMENSION[ending], 1)
    return model


def _prepare_sequence_parallelism() -> None:
    """Make two things of a process that Megatron-core expects to find and would make with its global groups."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()  # where all tokens come together in front of a cut weight
    tracker = get_cuda_rng_tracker()
    if _DROPOUT_STATE not in tracker.get_states():
        tracker.add(_DROPOUT_STATE, 0)  # nothing is dropped, but the state is asked for


def drop_buffers() -> None:
    """Free what Megatron-core keeps to gather tokens in; it makes another when it needs one."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state._GLOBAL_MEMORY_BUFFER.buffer.clear()

"""Megatron-core's GPTModel for a Hugging Face config of a dense decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from tango_hpc.base.model_shape import ModelShape, padded_vocab_size, pipeline_stages
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.ranks import this_device
from tango_hpc.models.trainer.attention import PackedCoreAttention, PackedSelfAttention
from tango_hpc.models.trainer.recompute import SwiGLU, TokenNorm, forget_cheap_outputs

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


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns hidden states: log-probabilities are computed from them in chunks."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            # What follows adds up its gradients over the tensor ranks by itself.
            return tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden_states

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
    hf_config: Mapping[str, Any],
    groups: PolicyGroups,
    dtype: torch.dtype,
    *,
    recompute: Literal["none", "selective", "full"],
    sequence: bool,
) -> TransformerConfig:
    """Return Megatron-core's configuration of the model, which needs no Transformer Engine, Apex or compiler.

    With `sequence`, tensor ranks share out the tokens between the cut weights.
    """
    stages = [len(layers) for layers in pipeline_stages(shape.num_layers, groups.pipeline_size)]
    uneven = len(set(stages)) > 1
    on_cpu = not torch.cuda.is_available()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=float(hf_config.get("rms_norm_eps", 1e-6)),
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # a module of the layers' specification, ours: no Transformer Engine
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tensor_size,
        sequence_parallel=sequence,
        pipeline_model_parallel_size=groups.pipeline_size,
        num_layers_in_first_pipeline_stage=stages[0] if uneven else None,
        num_layers_in_last_pipeline_stage=stages[-1] if uneven else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # dense model; variable lengths are refused with the default
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,  # gradients are summed over ranks: our losses carry global denominators
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=[],  # none of Megatron-core's own: see recompute.py
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def build_model(shape: ModelShape, config: TransformerConfig, groups: PolicyGroups) -> PolicyModel:
    """Build this rank's part of the model; its weights are not set yet."""
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention
    attention.module = PackedSelfAttention
    attention.submodules.core_attention = PackedCoreAttention
    if shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = TokenNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TokenNorm
    spec.submodules.mlp.submodules.activation_func = SwiGLU
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

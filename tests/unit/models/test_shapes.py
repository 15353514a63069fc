"""Layouts of Megatron's parameters, checked by filling and by counting; no processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tango_hpc.base.errors import UserError
from tango_hpc.base.families import FAMILIES
from tango_hpc.base.model_shape import ModelShape, check_parallel, hf_tensors, padded_vocab_size, pipeline_stages
from tango_hpc.models.layout.trainer_layout import megatron_layout
from tests.helpers.tiny import tiny_hf_config

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tensor_size", "pipeline_size"), LAYOUTS)
def test_every_element_lies_where_it_should(family: str, tensor_size: int, pipeline_size: int) -> None:
    shape = ModelShape.from_hf_config(tiny_hf_config(family))
    seen = {name: np.zeros(size, dtype=int) for name, size in hf_tensors(shape).items()}
    for tensor_rank, pipeline_rank in itertools.product(range(tensor_size), range(pipeline_size)):
        for name, param in megatron_layout(shape, tensor_size, pipeline_size, tensor_rank, pipeline_rank).items():
            covered = np.zeros(param.shape, dtype=int)
            for piece in param.pieces:
                assert piece.size == tuple(stop - start for start, stop in piece.local)
                covered[tuple(slice(*span) for span in piece.local)] += 1
                seen[piece.tensor][tuple(slice(*span) for span in piece.box)] += 1
            padding = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            assert covered.max() == 1
            assert padding or covered.min() == 1
    for name, count in seen.items():
        copies = tensor_size if name.endswith("norm.weight") else 1
        if name == "model.embed_tokens.weight" and shape.tied and pipeline_size > 1:
            copies = 2
        assert (count == copies).all(), name


def test_fused_qkv_stacks_each_query_group() -> None:
    # 4 query heads of width 2 in 2 groups: rank 1 of 2 holds heads 2 and 3, key head 1, value head 1.
    config = tiny_hf_config("qwen2", hidden_size=8, num_attention_heads=4, num_key_value_heads=2)
    layout = megatron_layout(ModelShape.from_hf_config(config), 2, 1, 1, 0)
    bias = layout["decoder.layers.0.self_attention.linear_qkv.bias"]
    assert bias.shape == (8,)
    assert [(piece.tensor.split(".")[-2], piece.box, piece.local) for piece in bias.pieces] == [
        ("q_proj", ((4, 8),), ((0, 4),)),
        ("k_proj", ((2, 4),), ((4, 6),)),
        ("v_proj", ((2, 4),), ((6, 8),)),
    ]


def test_gate_and_up_lie_on_top_of_each_other_on_each_rank() -> None:
    shape = ModelShape.from_hf_config(tiny_hf_config("llama", intermediate_size=96))
    fc1 = megatron_layout(shape, 2, 1, 1, 0)["decoder.layers.1.mlp.linear_fc1.weight"]
    assert fc1.shape == (96, 64)
    gate, up = fc1.pieces
    assert (gate.tensor, gate.box[0], gate.local[0]) == ("model.layers.1.mlp.gate_proj.weight", (48, 96), (0, 48))
    assert (up.tensor, up.box[0], up.local[0]) == ("model.layers.1.mlp.up_proj.weight", (48, 96), (48, 96))


def test_vocabulary_is_padded_to_what_all_ranks_can_share() -> None:
    assert padded_vocab_size(107, 1) == padded_vocab_size(107, 2) == 128
    assert padded_vocab_size(128, 4) == 128
    assert padded_vocab_size(100, 3) == 192
    shape = ModelShape.from_hf_config(tiny_hf_config("qwen2", vocab_size=60))
    assert megatron_layout(shape, 4, 1, 3, 0)["embedding.word_embeddings.weight"].pieces[0].local[0] == (0, 12)
    assert megatron_layout(shape, 8, 1, 7, 0)["embedding.word_embeddings.weight"].shape == (8, 64)


def test_pipeline_stages() -> None:
    assert pipeline_stages(4, 2) == [range(0, 2), range(2, 4)]
    assert [len(stage) for stage in pipeline_stages(126, 16)] == [7, *[8] * 14, 7]
    assert [len(stage) for stage in pipeline_stages(5, 2)] == [3, 2]
    with pytest.raises(UserError, match="3 layers cannot be spread over 4 pipeline stages"):
        pipeline_stages(3, 4)


def test_all_reasons_against_a_cut_come_together() -> None:
    shape = ModelShape.from_hf_config(tiny_hf_config("qwen2", intermediate_size=100))
    with pytest.raises(UserError) as error:
        check_parallel(shape, 3, 3)
    for part in ("4 attention heads", "2 key/value heads", "intermediate size 100", "2 layers"):
        assert part in str(error.value)


def test_what_cannot_be_trained_is_refused() -> None:
    for config, why in (
        ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral', a mixture of experts, is not supported"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "a mixture of experts"),
        ({"model_type": "qwen3_next_dense", "linear_num_key_heads": 16}, "linear or recurrent attention"),
        ({"model_type": "gemma2"}, "soft caps"),
        ({"model_type": "gemma3", "text_config": {}}, "parts that are not for text"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported; use one of the dense families gemma3_text, granite, llama"),
        (tiny_hf_config("gemma3_text", final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (tiny_hf_config("llama", partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (tiny_hf_config("phi3", rope_scaling={"type": "yarn"}), "rope type 'yarn' .supported are default, longrope"),
        (tiny_hf_config("granite", hidden_act="gelu"), "hidden_act='gelu'"),
    ):
        with pytest.raises(UserError, match=why):
            ModelShape.from_hf_config(config)
    with pytest.raises(UserError, match="lacks hidden_size, vocab_size"):
        ModelShape.from_hf_config(
            {key: 4 for key in ("num_hidden_layers", "intermediate_size", "num_attention_heads")}
            | {"model_type": "llama"}
        )
    with pytest.raises(UserError, match="mlp_bias"):
        ModelShape.from_hf_config(tiny_hf_config("llama", mlp_bias=True))

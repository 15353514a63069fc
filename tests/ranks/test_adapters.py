"""Adapters compute and learn what PEFT's do on transformers, in every layout.

Four ranks run all cases once; the tests compare what they brought back. PEFT writes the adapter that both start from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tango_hpc.base.config.roles import AdapterConfig, OptimizerConfig
from tango_hpc.base.types import TrainSequence
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

RANK, ALPHA = 4, 8
VOCAB = 107
UPDATES = 10
# Gradients are not clipped at first; a large epsilon keeps noise of gradients near zero out of the updates.
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, epsilon=1e-4, clip_grad_norm=1e6, weight_decay=0.1)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ("q_proj", "v_proj", "down_proj")},
    "rslora": {"use_rslora": True},
}
# Family, adapter, tensor x pipeline, whether tensor ranks share out the tokens, recompute. What is left of the four
# ranks is data parallel; at 4x1 ranks share key/value heads.
CASES = [
    *(("qwen2", "all", *layout, False, "none") for layout in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))),
    *(("qwen2", "all", *layout, True, "none") for layout in ((2, 1), (2, 2), (4, 1))),
    *(("qwen2", "all", *layout, recompute) for layout in ((1, 1, False), (2, 2, True)) for recompute in ("selective", "full")),
    *(("qwen2", name, *layout, False, "none") for name in ("some", "rslora") for layout in ((1, 1), (2, 2))),
    *((family, "all", *layout, True, "selective") for family in ("phi3", "gemma3_text", "olmo2") for layout in ((2, 2),)),
    *((family, "all", 1, 1, False, "none") for family in ("phi3", "llama")),
]  # fmt: skip
FAMILIES = list(dict.fromkeys(case[0] for case in CASES))


def name_of(family: str, adapter: str, tensor: int, pipeline: int, sequence: bool, recompute: str) -> str:
    return f"{family}-{adapter}-{tensor}x{pipeline}{'-sequence' if sequence else ''}-{recompute}"


def adapter_of(folder: Path, family: str, name: str) -> AdapterConfig:
    return AdapterConfig(rank=RANK, alpha=ALPHA, path=folder / f"{family}-{name}", **ADAPTERS[name])


def batch() -> list[TrainSequence]:
    return random_sequences(9, VOCAB)


def run_all(folder: Path) -> dict[str, Any]:
    """On each rank: gradients of the first update, and what ten of them have made."""
    results = {}
    for case in CASES:
        family, adapter, tensor, pipeline, sequence, recompute = case
        policy = policy_of(
            folder / family, tensor, pipeline, sequence=sequence, recompute=recompute, micro_batch_tokens=70,
            adapter=adapter_of(folder, family, adapter), optimizer=OPTIMIZER, total_steps=UPDATES, with_reference=True,
        )  # fmt: skip
        name = name_of(*case)
        before, loss = policy.logprobs(batch()), policy.evaluate_sft(batch())
        stats = policy.update_sft(batch())
        first_moments = gathered_moments(policy)
        policy.adapters.export(folder / f"{name}-updated", policy.model_dir)
        for _ in range(UPDATES - 1):
            policy.update_sft(batch())
        policy.export_adapter(folder / f"{name}-end")
        policy.export_hf(folder / f"{name}-merged")
        results[name] = {
            "logprobs": before,
            "loss": loss,
            "grad_norm": stats.grad_norm,
            "gradients": {key: value / (1 - OPTIMIZER.beta1) for key, value in first_moments.items()},
            "after": policy.logprobs(batch()),
            "reference": policy.logprobs(batch(), reference=True),
            "again": policy.logprobs(batch()),
        }
    return results


def gathered_moments(policy: Any) -> dict[str, Tensor]:
    """First moments of A and B in PEFT's form, which after one step are the gradients but for a factor."""
    from tango_hpc.models.trainer.hf_io import box_slices

    whole = {name: torch.zeros(size) for name, size in policy.adapters.tensors.items()}
    counts = {name: torch.zeros(size) for name, size in policy.adapters.tensors.items()}
    for name, parameter in policy.adapters.parameters().items():
        start, tensors = policy.optimizer.share_of(parameter)
        local, held = torch.zeros(parameter.numel()), torch.zeros(parameter.numel())
        if tensors:
            stop = start + tensors["exp_avg"].numel()
            local[start:stop], held[start:stop] = tensors["exp_avg"], 1
        for piece in policy.adapters.layout[name].pieces:
            there = whole[piece.tensor][box_slices(piece.box)]
            there += local.view(parameter.shape)[box_slices(piece.local)]
            counts[piece.tensor][box_slices(piece.box)] += held.view(parameter.shape)[box_slices(piece.local)]
    for tensors in (whole, counts):
        for tensor in tensors.values():
            dist.all_reduce(tensor)
    return {name: whole[name] / counts[name] for name in whole}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapters")
    for family in FAMILIES:
        make_tiny_hf(folder / family, family)
        for name in {case[1] for case in CASES if case[0] == family}:
            torch.manual_seed(3)
            config = adapter_of(folder, family, name)
            model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
            targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
            made = get_peft_model(
                model,
                LoraConfig(
                    task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False,
                    use_rslora=config.use_rslora,
                ),
            )  # fmt: skip
            with torch.no_grad():
                for key, value in made.named_parameters():
                    if "lora_" in key:
                        value.normal_(std=0.1)
            made.save_pretrained(folder / f"{family}-{name}")
    return folder


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_all, 4, folder, timeout=600)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {pair: by_peft(folder, *pair) for pair in dict.fromkeys(case[:2] for case in CASES)}


def by_peft(folder: Path, family: str, name: str) -> dict[str, Any]:
    """The same numbers from PEFT on transformers in float64, one sequence at a time, and PyTorch's own AdamW."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float64)
    model = PeftModel.from_pretrained(base, folder / f"{family}-{name}", is_trainable=True)
    model.to(torch.float64)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    assert all("lora_" in key for key in trained)
    optimizer = torch.optim.AdamW(
        trained.values(), lr=OPTIMIZER.learning_rate, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
    )  # fmt: skip
    result: dict[str, Any] = {"logprobs": logprobs_of(model)}
    for number in range(UPDATES):
        optimizer.zero_grad()
        loss = -torch.cat([of_sequence(model, sequence) for sequence in batch()]).mean()
        loss.backward()
        if number == 0:
            result["loss"] = loss.item()
            result["gradients"] = {peft_key(key): value.grad.clone() for key, value in trained.items()}
        optimizer.step()
        if number == 0:
            result["updated"] = {peft_key(key): value.detach().clone() for key, value in trained.items()}
    result["end"] = {peft_key(key): value.detach().clone() for key, value in trained.items()}
    result["after"] = logprobs_of(model)
    return result


def peft_key(name: str) -> str:
    return name.replace(".default.", ".")


def of_sequence(model: Any, sequence: TrainSequence) -> Tensor:
    ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
    logits = model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(sequence.response_ids)[:, None])[:, 0]


@torch.no_grad()
def logprobs_of(model: Any) -> np.ndarray:
    return torch.cat([of_sequence(model, sequence) for sequence in batch()]).numpy()


def cases() -> list[Any]:
    return [pytest.param(case[:2], name_of(*case), id=name_of(*case)) for case in CASES]


@pytest.mark.parametrize(("which", "case"), cases())
def test_log_probabilities_are_those_of_peft(which: tuple[str, str], case: str, on_ranks: Any, expected: Any) -> None:
    mine, theirs = on_ranks[0][case], expected[which]
    np.testing.assert_allclose(np.concatenate(mine["logprobs"]), theirs["logprobs"], atol=1e-5)
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.parametrize(("which", "case"), cases())
def test_gradients_are_those_of_peft(which: tuple[str, str], case: str, on_ranks: Any, expected: Any) -> None:
    mine, theirs = on_ranks[0][case], expected[which]
    assert mine["gradients"].keys() == theirs["gradients"].keys()
    for name, gradient in theirs["gradients"].items():
        torch.testing.assert_close(mine["gradients"][name].double(), gradient, atol=1e-5, rtol=0, msg=name)
    norm = torch.stack([gradient.norm() for gradient in theirs["gradients"].values()]).norm().item()
    assert mine["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(("which", "case"), cases())
def test_ten_updates_are_those_of_adamw(
    which: tuple[str, str], case: str, on_ranks: Any, expected: Any, folder: Path
) -> None:
    theirs = expected[which]
    for when in ("updated", "end"):
        mine = load_file(folder / f"{case}-{when}" / "adapter_model.safetensors")
        assert mine.keys() == theirs[when].keys()
        for name, tensor in theirs[when].items():
            torch.testing.assert_close(mine[name].double(), tensor, atol=1e-4, rtol=0, msg=f"{when} {name}")
    np.testing.assert_allclose(np.concatenate(on_ranks[0][case]["after"]), theirs["after"], atol=1e-3)


@pytest.mark.parametrize("case", [name_of(*case) for case in CASES])
def test_the_reference_is_the_first_policy_and_leaves_no_trace(case: str, on_ranks: Any) -> None:
    mine = on_ranks[0][case]
    for reference, first in zip(mine["reference"], mine["logprobs"], strict=True):
        np.testing.assert_array_equal(reference, first)
    for after, again in zip(mine["after"], mine["again"], strict=True):
        np.testing.assert_array_equal(after, again)
        assert not np.array_equal(after, mine["reference"][0])


@pytest.mark.parametrize(("which", "case"), cases())
def test_an_exported_adapter_and_the_merged_model_give_the_same(
    which: tuple[str, str], case: str, on_ranks: Any, folder: Path
) -> None:
    """Both loaded by PEFT and transformers, in float32."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / which[0], dtype=torch.float32)
    adapted = logprobs_of(PeftModel.from_pretrained(base, folder / f"{case}-end"))
    merged = logprobs_of(AutoModelForCausalLM.from_pretrained(folder / f"{case}-merged", dtype=torch.float32))
    np.testing.assert_allclose(adapted, merged, atol=1e-5)
    np.testing.assert_allclose(merged, np.concatenate(on_ranks[0][case]["after"]), atol=1e-5)
    assert json.loads((folder / f"{case}-end" / "adapter_config.json").read_text())["r"] == RANK


def test_all_ranks_get_the_same_results(on_ranks: Any) -> None:
    for other in on_ranks[1:]:
        for case, result in on_ranks[0].items():
            for name in ("logprobs", "after", "reference"):
                for mine, theirs in zip(result[name], other[case][name], strict=True):
                    np.testing.assert_array_equal(mine, theirs)

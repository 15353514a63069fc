"""A policy computes the same in every layout, and the same as transformers and plain autograd.

Four ranks run all layouts of all families once; the tests compare what they brought back.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tango_hpc.base.config.hooks import CorrectionConfig, LossConfig
from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.base.types import TrainSequence
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.small_tokenizer import write_tokenizer
from tests.helpers.tiny import make_tiny_hf

# tensor x pipeline; what is left of the four ranks is data parallel. 4x1 shares key/value heads between ranks.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
# Four layers make a pipeline with stages between the ends, three an uneven one.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"num_hidden_layers": 4},
    "llama": {
        "num_hidden_layers": 3,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
# With the settings of tests/helpers/tiny.py. Norms over all heads also where ranks share key/value heads.
OTHERS = {
    family: {"num_hidden_layers": 4} if family in ("mistral", "phi3") else {}
    for family in ("mistral", "olmo2", "olmo3", "smollm3", "gemma3_text", "phi3", "granite")
}
VOCAB = 107
# A large epsilon makes the step nearly proportional to the gradient, so that a wrong gradient shows and rounding of
# gradients that are zero in theory (key biases) does not. Clipping takes effect.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, clip_grad_norm=0.5, weight_decay=0.1)
TEMPERATURE = 0.8
EQ1 = {
    "clip_low": 0.2,
    "clip_high": 0.3,
    "kl_coef": 0.1,
    "kl_estimator": "k3",
    "entropy_coef": 0.0,
    "loss_average": "response",
    "importance_cap": 1.5,
    "temperature": TEMPERATURE,
}
LOSSES: dict[str, dict[str, Any]] = {
    "eq1": EQ1,
    "token": EQ1 | {"loss_average": "token", "kl_estimator": "k2", "entropy_coef": 0.5},
    "constant": EQ1 | {"loss_average": "constant", "kl_estimator": "k1", "entropy_coef": 0.5},
}
MAX_RESPONSE = 25
# Family, tensor, pipeline, loss, and whether tensor ranks share out the tokens.
CASES = [
    *((family, *layout, "eq1", False) for family in FAMILIES for layout in LAYOUTS),
    ("qwen3", 1, 4, "eq1", False),
    *(("qwen2", *layout, loss, False) for loss in ("token", "constant") for layout in ((1, 1), (2, 2))),
    *((family, *layout, "eq1", True) for family in FAMILIES for layout in LAYOUTS if layout[0] > 1),
    *((family, *layout, "eq1", False) for family in OTHERS for layout in LAYOUTS[:4]),
    *((family, 2, 1, "eq1", True) for family in OTHERS),
    *((family, 4, 1, "eq1", sequence) for family in ("olmo2", "olmo3") for sequence in (False, True)),
]


def name_of(family: str, tensor: int, pipeline: int, loss: str, sequence: bool) -> str:
    return f"{family}-{tensor}x{pipeline}-{loss}{'-sequence' if sequence else ''}"


def batch() -> list[TrainSequence]:
    return random_sequences(9, VOCAB)


def every_next_token() -> list[TrainSequence]:
    """One prompt continued by each token: its log-probabilities are the whole log-softmax."""
    return [TrainSequence([5, 17, 3, 99, 42], [token]) for token in range(VOCAB)]


def loss_settings(settings: dict[str, Any]) -> Any:
    from tango_hpc.method.hooks import load_hook
    from tango_hpc.models.trainer.loss import LossSettings

    of_loss = {"average": "loss_average", "clip_low": "clip_low", "clip_high": "clip_high"}
    return LossSettings(
        load_hook(LossConfig(settings={name: settings[key] for name, key in of_loss.items()})),
        load_hook(CorrectionConfig(settings={"cap": settings["importance_cap"]})),
        **{name: settings[name] for name in ("kl_coef", "kl_estimator", "entropy_coef", "temperature")},
        max_response_tokens=MAX_RESPONSE,
    )


def run_all(folder: Path) -> dict[str, dict[str, Any]]:
    """On each rank: all families, layouts and losses."""
    from tango_hpc.models.trainer.hf_io import export_weights

    results = {}
    for family, tensor, pipeline, loss, sequence in CASES:
        layout = name_of(family, tensor, pipeline, loss, sequence)
        policy = policy_of(
            folder / family,
            tensor,
            pipeline,
            sequence=sequence,
            micro_batch_tokens=70,
            reference_dir=folder / f"{family}-reference",
            optimizer=OPTIMIZER,
            with_reference=True,
            total_steps=10,
        )
        export_weights(
            folder / f"{layout}-untouched",
            policy.shape,
            policy.groups,
            policy.named_shards(),
            model_dir=policy.model_dir,
            shard_bytes=60_000,
        )
        settings, asked, other = loss_settings(LOSSES[loss]), batch(), batch()
        policy.prepare(asked, settings)
        results[layout] = {
            "logprobs": policy.logprobs(asked, temperature=TEMPERATURE),
            "entropy": policy.logprobs(asked, temperature=TEMPERATURE, entropy=True),
            "reference": policy.logprobs(asked, temperature=TEMPERATURE, reference=True),
            "prepared": [sequence.reference_logprobs for sequence in asked],
            "distribution": np.concatenate(policy.logprobs(every_next_token())),
            "sft_loss": policy.evaluate_sft(asked),
            "stats": asdict(policy.update(asked, settings, last=False)),
            "old": [sequence.old_logprobs for sequence in asked],
        }
        policy.export_hf(folder / f"{layout}-updated")
        results[layout]["second"] = asdict(policy.update(asked, settings))
        results[layout]["old_after"] = [sequence.old_logprobs for sequence in asked]
        policy.export_hf(folder / f"{layout}-updated twice")
        policy.prepare(other, settings)
        policy.update(other, settings)
        results[layout]["old_alone"] = [sequence.old_logprobs for sequence in other]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for family, dims in {**FAMILIES, **OTHERS}.items():
        make_tiny_hf(folder / family, family, **dims)
        make_tiny_hf(folder / f"{family}-reference", family, seed=1, **dims)
        write_tokenizer(folder / family)
    return folder


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_all, 4, folder, timeout=600)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    pairs = dict.fromkeys((family, loss) for family, _, _, loss, _ in CASES)
    return {(family, loss): by_transformers(folder, family, LOSSES[loss]) for family, loss in pairs}


def by_transformers(folder: Path, family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The same numbers from transformers' model in float64, one sequence at a time, and PyTorch's own AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float64)
    frozen = AutoModelForCausalLM.from_pretrained(folder / f"{family}-reference", dtype=torch.float64)
    sequences = batch()

    def distributions(which: torch.nn.Module, sequence: TrainSequence, temperature: float) -> Tensor:
        ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
        logits = which(ids).logits[0, len(sequence.prompt_ids) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def of_response(logprobs: Tensor, sequence: TrainSequence) -> Tensor:
        return logprobs.gather(-1, torch.tensor(sequence.response_ids)[:, None])[:, 0]

    result: dict[str, Any] = {"logprobs": [], "entropy": [], "reference": []}
    result["distribution"] = (
        distributions(model, TrainSequence(every_next_token()[0].prompt_ids, [0]), 1.0)[0].detach().numpy()
    )
    plain = torch.cat([of_response(distributions(model, s, 1.0), s) for s in sequences])
    result["sft_loss"] = -plain.mean().item()
    for sequence in sequences:
        spread = distributions(model, sequence, TEMPERATURE)
        reference = of_response(distributions(frozen, sequence, TEMPERATURE), sequence).detach()
        result["logprobs"].append(of_response(spread, sequence).detach().numpy())
        result["entropy"].append(-(spread.exp() * spread).sum(-1).detach().numpy())
        result["reference"].append(reference.numpy())
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
    )

    def update() -> dict[str, Any]:
        """One step on Eq. 1, with the model as it was read as the old policy."""
        loss, kl, gaps, clipped = torch.zeros((), dtype=torch.float64), [], [], []
        for number, sequence in enumerate(sequences):
            spread = distributions(model, sequence, TEMPERATURE)
            logprobs, entropy = of_response(spread, sequence), -(spread.exp() * spread).sum(-1)
            old, reference = (torch.tensor(result[name][number]) for name in ("logprobs", "reference"))
            gap = old - torch.tensor(sequence.rollout_logprobs)
            weight = gap.exp().clamp(max=settings["importance_cap"])
            ratio, advantages = (logprobs - old).exp(), torch.tensor(sequence.advantages)
            bounded = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
            difference = reference - logprobs
            penalty = {"k1": -difference, "k2": difference**2 / 2, "k3": difference.exp() - difference - 1}[
                settings["kl_estimator"]
            ]
            terms = weight * torch.minimum(ratio * advantages, bounded * advantages) - settings["kl_coef"] * penalty
            terms = terms + settings["entropy_coef"] * entropy
            count = {
                "response": len(sequences) * len(terms),
                "token": sum(len(sequence.response_ids) for sequence in sequences),
                "constant": len(sequences) * MAX_RESPONSE,
            }
            loss = loss - terms.sum() / count[settings["loss_average"]]
            kl.append(penalty.detach())
            gaps.append(gap.abs())
            clipped.append((bounded * advantages < ratio * advantages).double())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_grad_norm).item()
        optimizer.step()
        return {
            "loss": loss.item(),
            "kl": torch.cat(kl).mean().item(),
            "gaps": torch.cat(gaps).numpy(),
            "clip_share": torch.cat(clipped).mean().item(),
            "grad_norm": grad_norm,
            "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        }

    result |= update()
    result["second"] = update()
    return result


def cases() -> list[Any]:
    return [pytest.param(case[0], case[3], name_of(*case), id=name_of(*case)) for case in CASES]


@pytest.mark.parametrize(("family", "loss", "layout"), cases())
def test_forward_matches_transformers(family: str, loss: str, layout: str, on_ranks: Any, expected: Any) -> None:
    mine, theirs = on_ranks[0][layout], expected[family, loss]
    np.testing.assert_allclose(mine["distribution"], theirs["distribution"], atol=2e-5)
    for name in ("logprobs", "entropy", "reference"):
        np.testing.assert_allclose(np.concatenate(mine[name]), np.concatenate(theirs[name]), atol=2e-5)
    assert mine["sft_loss"] == pytest.approx(theirs["sft_loss"], abs=1e-5)


@pytest.mark.parametrize("layout", [name_of(*case) for case in CASES])
def test_updates_get_what_they_need_from_before_the_first(layout: str, on_ranks: Any) -> None:
    """The first of several gives the others the log-probabilities of its forward pass, bit for bit those of a pass
    alone.
    """
    mine = on_ranks[0][layout]
    for given, computed in (("prepared", "reference"), ("old", "logprobs"), ("old_after", "logprobs")):
        assert len(mine[given]) == len(batch())
        for values, expected in zip(mine[given], mine[computed], strict=True):
            np.testing.assert_array_equal(values, expected)
    assert mine["old_alone"] == [[]] * len(batch())


@pytest.mark.parametrize(("family", "loss", "layout"), cases())
def test_one_step_matches_autograd(
    family: str, loss: str, layout: str, on_ranks: Any, expected: Any, folder: Path
) -> None:
    stats, theirs = on_ranks[0][layout]["stats"], expected[family, loss]
    assert stats["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert stats["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert stats["kl"] == pytest.approx(theirs["kl"], abs=1e-5)
    assert stats["entropy"] == pytest.approx(np.concatenate(theirs["entropy"]).mean(), abs=1e-5)
    assert stats["logprob_gap_mean"] == pytest.approx(theirs["gaps"].mean(), abs=1e-5)
    assert stats["logprob_gap_max"] == pytest.approx(theirs["gaps"].max(), abs=1e-5)
    assert stats["method"]["loss/clip_share"] == 0 and not stats["skipped"]
    assert stats["num_responses"] == len(batch())
    assert stats["num_tokens"] == sum(len(sequence.response_ids) for sequence in batch())
    updated = load_file(folder / f"{layout}-updated" / "model.safetensors")
    assert updated.keys() == {name for name in theirs["weights"] if name in updated}
    for name, tensor in updated.items():
        torch.testing.assert_close(tensor.double(), theirs["weights"][name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("family", "loss", "layout"), cases())
def test_a_second_step_on_a_batch_clips_by_the_policy_before_the_first(
    family: str, loss: str, layout: str, on_ranks: Any, expected: Any, folder: Path
) -> None:
    stats, theirs = on_ranks[0][layout]["second"], expected[family, loss]["second"]
    assert 0.1 < theirs["clip_share"] < 0.9
    assert stats["method"]["loss/clip_share"] == pytest.approx(theirs["clip_share"], abs=1e-6)
    assert stats["loss"] == pytest.approx(theirs["loss"], abs=1e-4, rel=1e-5)
    assert stats["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert stats["kl"] == pytest.approx(theirs["kl"], rel=1e-3)
    assert stats["logprob_gap_mean"] == pytest.approx(theirs["gaps"].mean(), abs=1e-5)
    for name, tensor in load_file(folder / f"{layout}-updated twice" / "model.safetensors").items():
        torch.testing.assert_close(tensor.double(), theirs["weights"][name], atol=5e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("family", "loss", "layout"), cases())
def test_export_gives_back_what_was_imported(family: str, loss: str, layout: str, on_ranks: Any, folder: Path) -> None:
    out = folder / f"{layout}-untouched"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted({*index["weight_map"].values()}) == sorted(path.name for path in out.glob("*.safetensors"))
    exported: dict[str, Tensor] = {}
    for path in out.glob("*.safetensors"):
        exported |= load_file(path)
    original = load_file(folder / family / "model.safetensors")
    assert exported.keys() == original.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name
    assert (out / "tokenizer.json").exists()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_all_ranks_get_the_same_results(on_ranks: Any) -> None:
    for other in on_ranks[1:]:
        for layout, result in on_ranks[0].items():
            assert result["stats"] == other[layout]["stats"]
            for name in ("logprobs", "entropy", "reference", "old"):
                for mine, theirs in zip(result[name], other[layout][name], strict=True):
                    assert np.array_equal(mine, theirs)

"""Log-probabilities from a spread vocabulary against PyTorch's log-softmax in float64."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from tests.helpers.ranks import run_ranks

HIDDEN, TOKENS, ALL = 16, 37, slice(None)
CASES = list(itertools.product((70, 128), (1.0, 0.5), (8, 1000), ("logprobs", "entropy", "both")))


def inputs(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.zeros(128, HIDDEN)
    weight[:vocab_size] = torch.randn(vocab_size, HIDDEN, generator=generator)
    weight[vocab_size:] = 100.0  # padding would dominate if it took part
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def loss_of(
    parts: str, weights: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor, part: slice = ALL
) -> torch.Tensor:
    """A random weight on the log-probability of each token in `part`, on its entropy, or on both."""
    by_logprobs, by_entropy = (logprobs * weights[0, part]).sum(), (entropy * weights[1, part]).sum()
    return {"logprobs": by_logprobs, "entropy": by_entropy, "both": by_logprobs + by_entropy}[parts]


def on_rank(summed: bool) -> list[tuple[torch.Tensor, ...]]:
    from torch import distributed as dist

    from tango_hpc.models.trainer.vocab_parallel import OutputLayer, vocab_parallel_logprobs, vocab_parallel_loss

    results = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for vocab_size, temperature, chunk, parts in CASES:
        hidden, weight, targets, weights = inputs(vocab_size)
        mine = weight.chunk(size)[rank].clone().requires_grad_()
        if summed:
            mine.main_grad = torch.ones_like(mine)  # type: ignore[attr-defined]
        hidden.requires_grad_()
        layer = OutputLayer(mine, dist.group.WORLD, vocab_size, temperature, chunk)
        value = vocab_parallel_loss(hidden, targets, layer, partial(loss_of, parts, weights))
        value.backward() if summed else (2 * value).backward()
        if summed:
            assert mine.grad is None
            mine.grad = 2 * (mine.main_grad - 1)  # type: ignore[attr-defined]
            hidden.grad *= 2
        logprobs, entropy = vocab_parallel_logprobs(hidden, targets, layer)
        assert not logprobs.requires_grad
        results.append((logprobs, entropy, hidden.grad / 2, mine.grad / 2, value.detach()))
    return results


@pytest.fixture(scope="module")
def on_ranks() -> list[list[tuple[torch.Tensor, ...]]]:
    """One and four ranks; with four ranks and 70 words, the last holds padding alone. One adds to a sum of
    gradients.
    """
    return [run_ranks(on_rank, size, summed) for size, summed in ((1, False), (4, False), (4, True))]  # type: ignore[misc]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"vocab{v}-T{t}-chunk{c}-{p}" for v, t, c, p in CASES])
def test_matches_full_softmax(on_ranks: list[list[list[tuple[torch.Tensor, ...]]]], case: int) -> None:
    vocab_size, temperature, _, parts = CASES[case]
    hidden, weight, targets, weights = (tensor.double() if tensor.is_floating_point() else tensor
                                        for tensor in inputs(vocab_size))  # fmt: skip
    hidden.requires_grad_()
    weight.requires_grad_()
    full = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    logprobs = full.gather(-1, targets[:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    value = loss_of(parts, weights, logprobs, entropy)
    value.backward()
    # Logits of up to 40 are off by up to 4e-6 in fp32; the gradient of the entropy, p (log p + H), magnifies that.
    atol = 1e-5 if parts == "logprobs" else 1e-4
    for ranks in on_ranks:
        for rank in ranks:
            torch.testing.assert_close(rank[case][0].double(), logprobs.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[case][1].double(), entropy.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[case][2].double(), hidden.grad, atol=atol, rtol=1e-5)
            torch.testing.assert_close(rank[case][4].double(), value.detach(), atol=1e-4, rtol=1e-5)
        gathered = torch.cat([rank[case][3] for rank in ranks])
        torch.testing.assert_close(gathered.double(), weight.grad, atol=atol, rtol=1e-5)

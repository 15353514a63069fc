"""Log-probabilities from a spread vocabulary against PyTorch's log-softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.ranks import run_ranks

HIDDEN, TOKENS = 16, 37
CASES = list(itertools.product((70, 128), (1.0, 0.5), (8, 1000), ("logprobs", "entropy", "both")))


def inputs(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.zeros(128, HIDDEN)
    weight[:vocab_size] = torch.randn(vocab_size, HIDDEN, generator=generator)
    weight[vocab_size:] = 100.0  # padding would dominate if it took part
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def loss_of(parts: str, weights: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A random weight on each token's log-probability, on its entropy, or on both."""
    by_logprobs, by_entropy = (logprobs * weights[0]).sum(), (entropy * weights[1]).sum()
    return {"logprobs": by_logprobs, "entropy": by_entropy, "both": by_logprobs + by_entropy}[parts]


def on_rank(summed: bool) -> list[tuple[torch.Tensor, ...]]:
    from torch import distributed as dist

    from tango_hpc.policy.vocab_parallel import vocab_parallel_logprobs

    results = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for vocab_size, temperature, chunk, parts in CASES:
        hidden, weight, targets, weights = inputs(vocab_size)
        mine = weight.chunk(size)[rank].clone().requires_grad_()
        if summed:
            mine.main_grad = torch.ones_like(mine)  # type: ignore[attr-defined]
        hidden.requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, mine, targets, dist.group.WORLD, vocab_size=vocab_size, temperature=temperature, chunk_tokens=chunk
        )
        loss_of(parts, weights, logprobs, entropy).backward()
        if summed:
            assert mine.grad is None
            mine.grad = mine.main_grad - 1  # type: ignore[attr-defined]
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, mine.grad))
    return results


@pytest.fixture(scope="module")
def on_ranks() -> list[list[tuple[torch.Tensor, ...]]]:
    """One and four ranks; with four ranks and 70 words, the last holds padding alone. One adds to a sum of gradients."""
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
    loss_of(parts, weights, logprobs, entropy).backward()
    # Logits of up to 40 are off by up to 4e-6 in fp32; the gradient of the entropy, p (log p + H), magnifies that.
    atol = 1e-5 if parts == "logprobs" else 1e-4
    for ranks in on_ranks:
        for rank in ranks:
            torch.testing.assert_close(rank[case][0].double(), logprobs.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[case][1].double(), entropy.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[case][2].double(), hidden.grad, atol=atol, rtol=1e-5)
        gathered = torch.cat([rank[case][3] for rank in ranks])
        torch.testing.assert_close(gathered.double(), weight.grad, atol=atol, rtol=1e-5)

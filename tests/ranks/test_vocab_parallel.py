"""Log-probabilities from a spread vocabulary against PyTorch's log-softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.ranks import run_ranks

HIDDEN, TOKENS = 16, 37
CASES = list(itertools.product((70, 128), (1.0, 0.5), (8, 1000)))


def inputs(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.zeros(128, HIDDEN)
    weight[:vocab_size] = torch.randn(vocab_size, HIDDEN, generator=generator)
    weight[vocab_size:] = 100.0  # padding would dominate if it took part
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


def on_rank() -> list[tuple[torch.Tensor, ...]]:
    from torch import distributed as dist

    from tango_hpc.policy.vocab_parallel import vocab_parallel_logprobs

    results = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for vocab_size, temperature, chunk in CASES:
        hidden, weight, targets, weights = inputs(vocab_size)
        mine = weight.chunk(size)[rank].clone().requires_grad_()
        hidden.requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, mine, targets, dist.group.WORLD, vocab_size=vocab_size, temperature=temperature, chunk_tokens=chunk
        )
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), entropy, hidden.grad, mine.grad))
    return results


@pytest.fixture(scope="module")
def on_ranks() -> list[list[tuple[torch.Tensor, ...]]]:
    """One and four ranks; with four ranks and 70 words, the last holds padding alone."""
    return [run_ranks(on_rank, size) for size in (1, 4)]  # type: ignore[misc]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"vocab{v}-T{t}-chunk{c}" for v, t, c in CASES])
def test_matches_full_softmax(on_ranks: list[list[list[tuple[torch.Tensor, ...]]]], case: int) -> None:
    vocab_size, temperature, _ = CASES[case]
    hidden, weight, targets, weights = (tensor.double() if tensor.is_floating_point() else tensor
                                        for tensor in inputs(vocab_size))  # fmt: skip
    hidden.requires_grad_()
    weight.requires_grad_()
    full = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    logprobs = full.gather(-1, targets[:, None])[:, 0]
    (logprobs * weights).sum().backward()
    entropy = -(full.exp() * full).sum(-1)
    for ranks in on_ranks:
        for rank in ranks:
            torch.testing.assert_close(rank[case][0].double(), logprobs.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[case][1].double(), entropy.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[case][2].double(), hidden.grad, atol=1e-5, rtol=1e-5)
        gathered = torch.cat([rank[case][3] for rank in ranks])
        torch.testing.assert_close(gathered.double(), weight.grad, atol=1e-5, rtol=1e-5)

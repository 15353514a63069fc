"""Logits on a GPU: products of 16-bit matrices that come out in float32. A CPU has none, so they are made up here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tango_hpc.models.trainer import vocab_parallel

ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
TOKENS, HIDDEN, VOCAB, CHUNK = 48, 256, 700, 20
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weights that bf16 holds exactly, with logits of up to about 20."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3).bfloat16()
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), generator=generator)


def results(dtype: torch.dtype) -> Results:
    """Log-probabilities, entropies, and the gradients of hidden states and weights."""
    hidden, weight, targets = inputs()
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    layer = vocab_parallel.OutputLayer(weight, ALONE, VOCAB, temperature=0.9, chunk_tokens=CHUNK)
    parts: list[tuple[Tensor, Tensor]] = []

    def loss(logprobs: Tensor, entropy: Tensor, _part: slice) -> Tensor:
        parts.append((logprobs.detach(), entropy.detach()))
        return logprobs.sum() + 0.1 * entropy.sum()

    vocab_parallel.vocab_parallel_loss(hidden, targets, layer, loss).backward()
    assert hidden.grad is not None and weight.grad is not None
    logprobs, entropy = (torch.cat(found) for found in zip(*parts, strict=True))
    return logprobs, entropy, hidden.grad, weight.grad


class Cuda:
    """CUDA's products of 16-bit matrices, by their arguments, computed on the CPU; counts them."""

    def __init__(self) -> None:
        self.products = self.sums = 0

    def mm(self, left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        self.products += 1
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(self, total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total and total.dtype == out_dtype == torch.float32 and left.dtype == right.dtype
        self.sums += 1
        return total.add_(left.to(out_dtype) @ right.to(out_dtype))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(vocab_parallel, "_multiplies_wide", lambda matrix: True)
    monkeypatch.setattr(torch, "mm", stand_in.mm)
    monkeypatch.setattr(torch, "addmm", stand_in.addmm)
    return stand_in


def test_rounded_logits_are_what_16_bits_cost() -> None:
    """On a CPU, where they are rounded: a log-probability is off by hundredths."""
    for mine, exact in zip(results(torch.bfloat16)[:2], results(torch.float32)[:2], strict=True):
        assert 0.01 < (mine - exact).abs().max() < 0.1


def test_wide_logits_are_those_of_float32(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    mine = results(torch.bfloat16)
    chunks = -(-TOKENS // CHUNK)
    assert (cuda.products, cuda.sums) == (chunks, chunks)
    monkeypatch.setattr(vocab_parallel, "_multiplies_wide", lambda matrix: False)
    narrow, exact = results(torch.bfloat16), results(torch.float32)
    for which in (0, 1):
        torch.testing.assert_close(mine[which], exact[which], atol=2e-5, rtol=0)
    for which in (2, 3):  # rounded to 16 bits themselves, in the end
        wide_error, error = (float((found[which].float() - exact[which]).norm()) for found in (mine, narrow))
        assert wide_error < 0.8 * error


def test_products_in_float32_stay_what_they_were(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    """The GPU's way is the same sum."""
    mine = results(torch.float32)
    assert cuda.products and cuda.sums
    monkeypatch.setattr(vocab_parallel, "_multiplies_wide", lambda matrix: False)
    torch.testing.assert_close(mine, results(torch.float32), atol=1e-5, rtol=1e-5)


class Shapes(TorchDispatchMode):
    """Types of all [tokens, vocabulary] matrices that come out of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.shape == (CHUNK, VOCAB):
            self.found.add(result.dtype)
        return result


def test_pytorch_knows_the_product_for_gpus() -> None:
    """Shapes and types alone, on a GPU that is not there: the logits are never in 16 bits."""
    with FakeTensorMode(), torch.no_grad(), Shapes() as shapes:
        hidden = torch.empty(CHUNK, HIDDEN, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device="cuda")
        logits = vocab_parallel._logits(hidden, weight, 0.5)
    assert logits.device.type == "cuda" and shapes.found == {torch.float32}

"""Log-probabilities and entropy from an output layer whose rows (the vocabulary) are spread over tensor ranks.

T: predicted tokens. K: hidden size. V: this rank's rows of the vocabulary, padding left out.

Logits exist for a chunk of tokens at a time, and once: what a loss makes of a chunk's log-probabilities is asked before
the next chunk is begun, and its gradients are computed then. Tensor ranks exchange four numbers per token, never
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tango_hpc.models.trainer.limits import LOGIT_CHUNK

# (log-probabilities, entropies, which tokens) -> the loss of these tokens, which adds up over chunks.
LossOfChunk = Callable[[Tensor, Tensor, slice], Tensor]


@dataclass(frozen=True)
class OutputLayer:
    """This rank's equal share of the padded vocabulary, of which rows past `vocab_size` take no part.

    Log-probabilities and entropies are those of the logits divided by `temperature`. `chunk_tokens`: tokens whose
    logits exist at once.
    """

    weight_VK: Tensor
    group: ProcessGroup
    vocab_size: int
    temperature: float = 1.0
    chunk_tokens: int | None = None

    @property
    def first_row(self) -> int:
        """The first word of this rank's share."""
        return self.group.rank() * self.weight_VK.shape[0]

    @property
    def num_rows(self) -> int:
        """Return how many words of the vocabulary lie in it."""
        rows = self.weight_VK.shape[0]
        return min(max(self.vocab_size - self.first_row, 0), rows)

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield the tokens in turn."""
        size = self.chunk_tokens or max(1, LOGIT_CHUNK // max(self.weight_VK.shape[0], 1))
        for first in range(0, num_tokens, size):
            yield slice(first, min(first + size, num_tokens))

    @property
    def rows_VK(self) -> Tensor:
        """The weights of those words."""
        return self.weight_VK.detach()[: self.num_rows]


@torch.no_grad()
def vocab_parallel_logprobs(hidden_TK: Tensor, targets_T: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each target, entropy of each distribution), [T] float32 in nats, without gradients."""
    logprobs_T, entropy_T = hidden_TK.new_empty((2, hidden_TK.shape[0]), dtype=torch.float32)
    for part in layer.chunks(hidden_TK.shape[0]):
        chunk = _Chunk(hidden_TK[part], targets_T[part], layer)
        logprobs_T[part], entropy_T[part] = chunk.logprobs, chunk.entropy
        del chunk  # before the next one is made
    return logprobs_T, entropy_T


def vocab_parallel_loss(hidden_TK: Tensor, targets_T: Tensor, layer: OutputLayer, loss: LossOfChunk) -> Tensor:
    """Return the sum of what `loss` gives for each chunk's log-probabilities and entropies, as
    `vocab_parallel_logprobs` has them.

    A loss of its tokens alone can be differentiated as soon as it is known, so that logits are computed once; those of
    a second pass would cost a product more. Its gradients flow into hidden states and into a weight that is trained. A
    weight that has a `main_grad`, the sum that Megatron-core's data parallelism keeps, gets its gradient added there at
    once and no `grad`: the value must then enter what is differentiated as it is, neither scaled nor left out.
    """
    total_VK = getattr(layer.weight_VK, "main_grad", None)
    return _VocabParallelLoss.apply(hidden_TK, layer.weight_VK, targets_T, layer, loss, total_VK)


class _VocabParallelLoss(torch.autograd.Function):
    """See `vocab_parallel_loss`."""

    @staticmethod
    def forward(ctx, hidden_TK, weight_VK, targets_T, layer, loss, total_VK):
        weight_VK, kept_VK = layer.rows_VK, total_VK
        trains = ctx.needs_input_grad[1]
        if total_VK is None and trains:
            total_VK = torch.zeros(layer.weight_VK.shape, dtype=torch.float32, device=weight_VK.device)
        grad_hidden = torch.zeros_like(hidden_TK)
        value = hidden_TK.new_zeros((), dtype=torch.float32)
        for part in layer.chunks(hidden_TK.shape[0]):
            chunk = _Chunk(hidden_TK[part], targets_T[part], layer)
            with torch.enable_grad():
                of_tokens = chunk.logprobs.requires_grad_(), chunk.entropy.requires_grad_()
                value_of_chunk = loss(*of_tokens, part)
                grads = torch.autograd.grad(value_of_chunk, of_tokens, allow_unused=True)
            value += value_of_chunk.detach()
            if layer.num_rows:
                grad_logits = chunk.grad_logits_(*grads).to(hidden_TK.dtype)
                grad_hidden[part] = grad_logits @ weight_VK
                if trains:
                    _add_product_(total_VK[: layer.num_rows], grad_logits.t(), hidden_TK[part])
                del grad_logits
            del chunk  # before the next one is made
        if layer.group.size() > 1:
            dist.all_reduce(grad_hidden, group=layer.group)
        # Not among the saved tensors, which would keep both beside what is made of them.
        ctx.grads = grad_hidden, total_VK.to(weight_VK.dtype) if kept_VK is None and trains else None
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None
        return grad_hidden.mul_(grad), None if grad_weight is None else grad_weight.mul_(grad), None, None, None, None


class _Chunk:
    """Log-probabilities of the targets and entropies of some tokens: [T] float32, the same on every tensor rank."""

    def __init__(self, hidden_TK: Tensor, targets_T: Tensor, layer: OutputLayer) -> None:
        num_tokens, self._layer = hidden_TK.shape[0], layer
        # Per token: largest logit, sum of exponentials relative to it, that sum weighted by logits, target's logit.
        stats_4T = hidden_TK.new_zeros((4, num_tokens), dtype=torch.float32)
        stats_4T[0] = -torch.inf
        if layer.num_rows:
            logits = _logits(hidden_TK, layer.rows_VK, 1.0 / layer.temperature)
            self._owned, self._index = _owned(targets_T - layer.first_row, layer.num_rows)
            stats_4T[0] = logits.amax(dim=-1)
            stats_4T[3] = logits.gather(-1, self._index[:, None])[:, 0] * self._owned
            self._exponentials = (logits - stats_4T[0][:, None]).exp_()
            stats_4T[1] = self._exponentials.sum(dim=-1)
            stats_4T[2] = logits.mul_(self._exponentials).sum(dim=-1)
        if layer.group.size() > 1:
            gathered = stats_4T.new_empty((layer.group.size(), 4, num_tokens))
            dist.all_gather_into_tensor(gathered.flatten(0, 1), stats_4T, group=layer.group)
            largest_RT, sums_RT, weighted_RT, target_RT = gathered.unbind(1)
        else:
            largest_RT, sums_RT, weighted_RT, target_RT = stats_4T[:, None].unbind(0)
        largest_T = largest_RT.amax(dim=0)
        factor_RT = (largest_RT - largest_T).exp()
        sum_T = (sums_RT * factor_RT).sum(dim=0)
        normaliser_T = largest_T + sum_T.log()
        self._to_probabilities_T = (stats_4T[0] - normaliser_T).exp()
        self._entropy_T = normaliser_T - (weighted_RT * factor_RT).sum(dim=0) / sum_T
        self.logprobs, self.entropy = target_RT.sum(dim=0) - normaliser_T, self._entropy_T.clone()

    def grad_logits_(self, grad_T: Tensor | None, grad_entropy_T: Tensor | None) -> Tensor:
        """d loss / d logits before they are divided by the temperature, from d loss / d log-probabilities and
        entropies.

        d log p_target / d logit_i = [i = target] − p_i, and d H / d logit_i = −p_i (log p_i + H). Takes the memory of
        the exponentials.
        """
        probabilities = self._exponentials.mul_(self._to_probabilities_T[:, None])
        by_entropy = None
        if grad_entropy_T is not None:
            by_entropy = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, self._entropy_T[:, None])
            by_entropy.mul_(grad_entropy_T[:, None])
        grad_T = torch.zeros_like(self._entropy_T) if grad_T is None else grad_T
        grad_logits = probabilities.scatter_add_(-1, self._index[:, None], -self._owned[:, None])
        grad_logits.mul_(-grad_T[:, None])
        if by_entropy is not None:
            grad_logits -= by_entropy
        return grad_logits if self._layer.temperature == 1.0 else grad_logits.mul_(1.0 / self._layer.temperature)


def _logits(hidden_TK: Tensor, weight_VK: Tensor, scale: float) -> Tensor:
    """Return scaled logits in float32, whatever the weights are in. On a CPU those of 16-bit weights are rounded to 16
    bits.
    """
    if _multiplies_wide(weight_VK):
        logits = torch.mm(hidden_TK, weight_VK.t(), out_dtype=torch.float32)
    else:
        logits = (hidden_TK @ weight_VK.t()).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _add_product_(total_VK: Tensor, grad_VT: Tensor, hidden_TK: Tensor) -> None:
    """Add a chunk's product to a sum in float32: in place, but for 16-bit operands on a CPU."""
    if _multiplies_wide(total_VK):
        torch.addmm(total_VK, grad_VT, hidden_TK, out_dtype=torch.float32, out=total_VK)
    elif grad_VT.dtype is torch.float32:
        total_VK.addmm_(grad_VT, hidden_TK)
    else:
        total_VK += grad_VT @ hidden_TK


def _multiplies_wide(matrix: Tensor) -> bool:
    """Return whether products of 16-bit matrices can come out in float32, which PyTorch has for CUDA alone."""
    return matrix.is_cuda


def _owned(targets_T: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return (1.0 where this rank holds the target's row else 0.0, an index that is valid in either case)."""
    owned = (targets_T >= 0) & (targets_T < num_rows)
    return owned.float(), targets_T.clamp(0, max(num_rows - 1, 0))

"""Log-probabilities and entropy from an output layer whose rows (the vocabulary) are spread over tensor ranks.

T: predicted tokens. K: hidden size. V: this rank's rows of the vocabulary, padding left out.

Logits exist for a chunk of tokens at a time, in the forward and again in the backward pass; tensor ranks exchange
four numbers per token, never logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tango_hpc.policy.sizes import LOGIT_CHUNK


def vocab_parallel_logprobs(
    hidden_TK: Tensor,
    weight_VK: Tensor,
    targets_T: Tensor,
    group: ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy of each distribution), both [T] float32, in nats.

    `weight_VK` holds this rank's equal share of the padded vocabulary; rows past `vocab_size` take no part.
    Both are those of the logits divided by `temperature`. Gradients flow through either into hidden states and
    weight; those of the entropy are computed only where it is part of a loss. A weight that has a `main_grad`, the sum
    that Megatron-core's data parallelism keeps, gets its gradient added there and no `grad`: no second one is made.
    """
    rows = weight_VK.shape[0]
    start = group.rank() * rows
    num_rows = min(max(vocab_size - start, 0), rows)
    chunk = chunk_tokens or max(1, LOGIT_CHUNK // max(rows, 1))
    return _VocabParallelLogprobs.apply(
        hidden_TK,
        weight_VK,
        targets_T - start,
        group,
        num_rows,
        1.0 / temperature,
        chunk,
        getattr(weight_VK, "main_grad", None),
    )


class _VocabParallelLogprobs(torch.autograd.Function):
    """See `vocab_parallel_logprobs`; targets are relative to this rank's first row."""

    @staticmethod
    def forward(ctx, hidden_TK, weight_VK, targets_T, group, num_rows, scale, chunk, total_VK):
        ctx.set_materialize_grads(False)  # an output that no loss uses costs nothing in the backward pass
        ctx.full_shape = weight_VK.shape
        weight_VK = weight_VK.detach()[:num_rows]
        num_tokens = hidden_TK.shape[0]
        # Per token: largest logit, sum of exponentials relative to it, that sum weighted by logits, target's logit.
        stats_4T = hidden_TK.new_zeros((4, num_tokens), dtype=torch.float32)
        stats_4T[0] = -torch.inf
        for first in range(0, num_tokens if num_rows else 0, chunk):
            part = slice(first, first + chunk)
            logits = _logits(hidden_TK[part], weight_VK, scale)
            largest = logits.amax(dim=-1)
            exponentials = (logits - largest[:, None]).exp_()
            owned, index = _owned(targets_T[part], num_rows)
            stats_4T[0, part] = largest
            stats_4T[1, part] = exponentials.sum(dim=-1)
            stats_4T[2, part] = (exponentials * logits).sum(dim=-1)
            stats_4T[3, part] = logits.gather(-1, index[:, None])[:, 0] * owned
        if group.size() > 1:
            gathered = stats_4T.new_empty((group.size(), 4, num_tokens))
            dist.all_gather_into_tensor(gathered.flatten(0, 1), stats_4T, group=group)
            largest_RT, sums_RT, weighted_RT, target_RT = gathered.unbind(1)
        else:
            largest_RT, sums_RT, weighted_RT, target_RT = stats_4T[:, None].unbind(0)
        largest_T = largest_RT.amax(dim=0)
        factor_RT = (largest_RT - largest_T).exp()
        sum_T = (sums_RT * factor_RT).sum(dim=0)
        normaliser_T = largest_T + sum_T.log()
        entropy_T = normaliser_T - (weighted_RT * factor_RT).sum(dim=0) / sum_T
        ctx.save_for_backward(hidden_TK, weight_VK, targets_T, normaliser_T, entropy_T)
        ctx.group, ctx.scale, ctx.chunk, ctx.total_VK = group, scale, chunk, total_VK
        return target_RT.sum(dim=0) - normaliser_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T):
        hidden_TK, weight_VK, targets_T, normaliser_T, entropy_T = ctx.saved_tensors
        num_rows = weight_VK.shape[0]
        grad_T = torch.zeros_like(normaliser_T) if grad_T is None else grad_T
        grad_hidden = torch.zeros_like(hidden_TK)
        total_VK = ctx.total_VK
        if total_VK is None:
            total_VK = torch.zeros(ctx.full_shape, dtype=torch.float32, device=weight_VK.device)
        for first in range(0, hidden_TK.shape[0] if num_rows else 0, ctx.chunk):
            part = slice(first, first + ctx.chunk)
            by_entropy = None if grad_entropy_T is None else (ctx.scale * grad_entropy_T[part], entropy_T[part])
            grad_logits = _grad_logits_(
                _logits(hidden_TK[part], weight_VK, ctx.scale) - normaliser_T[part, None],
                targets_T[part],
                ctx.scale * grad_T[part],
                by_entropy,
            ).to(hidden_TK.dtype)
            grad_hidden[part] = grad_logits @ weight_VK
            _add_product_(total_VK[:num_rows], grad_logits.t(), hidden_TK[part])
        if ctx.group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.group)
        grad_weight = total_VK.to(weight_VK.dtype) if ctx.total_VK is None else None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _logits(hidden_TK: Tensor, weight_VK: Tensor, scale: float) -> Tensor:
    """Scaled logits in float32, whatever the weights are in. On a CPU those of 16-bit weights are rounded to 16 bits."""
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
    """Whether products of 16-bit matrices can come out in float32, which PyTorch has for CUDA alone."""
    return matrix.is_cuda


def _grad_logits_(
    logprobs_TV: Tensor, targets_T: Tensor, grad_T: Tensor, by_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """d loss / d logits from d loss / d (target's log-probability) and, if asked, (d loss / d entropy, entropy).

    d log p_target / d logit_i = [i = target] − p_i, and d H / d logit_i = −p_i (log p_i + H). Overwrites
    `logprobs_TV`: the entropy's part takes no more memory than the logits took while they were made.
    """
    grad_logits = logprobs_TV.exp_() if by_entropy is None else logprobs_TV.exp()
    if by_entropy is not None:
        grad_entropy_T, entropy_T = by_entropy
        logprobs_TV.add_(entropy_T[:, None]).mul_(grad_logits).mul_(-grad_entropy_T[:, None])
    owned, index = _owned(targets_T, logprobs_TV.shape[1])
    grad_logits.scatter_add_(-1, index[:, None], -owned[:, None])
    grad_logits *= -grad_T[:, None]
    if by_entropy is not None:
        grad_logits += logprobs_TV
    return grad_logits


def _owned(targets_T: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(1.0 where this rank holds the target's row else 0.0, an index that is valid in either case)."""
    owned = (targets_T >= 0) & (targets_T < num_rows)
    return owned.float(), targets_T.clamp(0, max(num_rows - 1, 0))

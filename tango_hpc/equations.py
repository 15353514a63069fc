"""The equations of RL Tango (arXiv 2505.15034, Section 3), one pure function each, numbered as in the paper.

Shape legend: T tokens (any leading shape works), M rollouts of one question, N responses of a batch,
K steps of one solution, S all steps that are normalised together.

The functions on log-probabilities take torch tensors and are differentiable; everything about rewards and
advantages takes and returns NumPy arrays in float64, so that reading and re-scoring rollouts needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def policy_loss_terms(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    ref_logprobs_T: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    importance_weights_T: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 1, token by token and negated, so that it is minimised: (loss_T, kl_T, clipped_T).

    loss_t = −w_t · min(c_t Â_t, clip(c_t, 1 − clip_low, 1 + clip_high) Â_t) + kl_coef · kl_t with
    c_t = exp(logprobs_t − old_logprobs_t). The caller takes the mean over the tokens of a response and then over
    the responses. Gradients flow through `logprobs_T` only.

    kl_t estimates KL(π_θ ‖ π_ref) from the sampled token alone: r − log r − 1 with r = π_ref / π_θ ("k3"),
    which is never negative and is what GRPO uses; zeros without a reference. clipped_T is true where the clip
    is what the minimum picked, i.e. where a token has no policy gradient.

    Departures: the paper has one ε; `clip_low` and `clip_high` may differ. w_t is the optional truncated
    importance weight trainer / engine (1 without `importance_weights_T`); it does not touch the KL term.
    """
    advantages_T = advantages_T.detach()
    ratio_T = (logprobs_T - old_logprobs_T.detach()).exp()
    unclipped_T = ratio_T * advantages_T
    clipped_objective_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    objective_T = unclipped_T.minimum(clipped_objective_T)
    clipped_T = clipped_objective_T < unclipped_T
    if importance_weights_T is not None:
        objective_T = objective_T * importance_weights_T.detach()
    if ref_logprobs_T is None:
        assert kl_coef == 0.0, "a KL penalty needs the reference's log-probabilities"
        kl_T = (logprobs_T * 0.0).detach()
        return -objective_T, kl_T, clipped_T
    log_r_T = ref_logprobs_T.detach() - logprobs_T
    kl_T = log_r_T.expm1() - log_r_T
    return kl_coef * kl_T - objective_T, kl_T, clipped_T

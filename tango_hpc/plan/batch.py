"""Batch arithmetic of an optimizer step: responses, tokens, micro-batches, sequences per engine. Upper bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tango_hpc.base.config import Config
from tango_hpc.method.hooks import known_settings
from tango_hpc.models.engine.capacity import responses_per_engine
from tango_hpc.questions.data.packing import pack_equal


@dataclass(frozen=True)
class RoleBatch:
    """Numbers of one role's optimizer step: at most, whatever the lengths of the responses."""

    responses: int
    tokens: int  # prompts and responses
    longest: int  # tokens of one sequence
    micro_batches: int  # of each data-parallel rank
    micro_batch_tokens: int  # in the fullest micro-batch
    rollouts_per_engine: (
        int  # responses of this role that one rollout group generates in its largest phase, a first draw
    )
    rollout_tokens_per_engine: int
    evaluations_per_engine: int  # responses of this role that it generates in an evaluation in the loop


def largest(batches: Sequence[RoleBatch]) -> RoleBatch:
    """Return the largest number of each kind: of a model that takes several roles."""
    return RoleBatch(*(max(getattr(batch, field.name) for batch in batches) for field in fields(RoleBatch)))


def role_batch(config: Config, name: str) -> RoleBatch:
    """Return the batch of `name`: the sequences that its policy trains on, M for each question of a step, or as many as
    its file of advantages keeps (`trained_rollouts`).
    """
    role, train = config.roles[name], config.train
    sampled = train.questions_per_step * train.rollouts_per_question
    hook = getattr(config.algorithm.advantages, name)
    kept = known_settings(config.run.dir, hook).get("trained_rollouts")
    if name == "verifier" and train.joint:
        num_verifications = max(train.rollouts_per_question, train.verifications_per_solution)
        sampled = train.num_joint_solutions * num_verifications
    responses = train.questions_per_step * kept if kept is not None else sampled
    longest = role.longest
    tokens = responses * longest
    pipeline = role.parallel.pipeline
    data = config.world_size // (role.parallel.tensor * pipeline)
    micro_batches, fullest = pack_equal(
        longest, responses, num_ranks=data, max_tokens=role.micro_batch_tokens, min_micro_batches=pipeline
    )
    fullest *= longest
    if micro_batches > pipeline:  # it is the limit that cuts: shorter sequences fill it better
        fullest = max(fullest, role.micro_batch_tokens)
    rollouts, evaluations = responses_per_engine(config, name)
    return RoleBatch(
        responses=responses,
        tokens=tokens,
        longest=longest,
        micro_batches=micro_batches,
        micro_batch_tokens=fullest,
        rollouts_per_engine=rollouts,
        rollout_tokens_per_engine=rollouts * longest,
        evaluations_per_engine=evaluations,
    )

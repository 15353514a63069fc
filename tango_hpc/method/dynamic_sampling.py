"""Dynamic sampling (DAPO, arXiv 2503.14476): questions that teach nothing make way for others.

Where all rollouts of a question are equally good, relative rewards are 0 and the question only dilutes the batch. DAPO
leaves out those with all answers right or all wrong and draws questions until the batch is full. Here a question stays
if it carries a signal of either kind: outcomes that differ, or step judgements that do. Switched on by the setting
`max_draws` of the generator's advantages, which bounds how often a generator step draws; each draw is of as many
questions as are missing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tango_hpc.method.equations import FloatArray


def groups_with_signal(group_ids_N: Sequence[Hashable], advantages_N_T: Sequence[FloatArray]) -> set[Hashable]:
    """Return the groups in which some token of some response has an advantage other than 0.

    Only where responses are compared within their group does this say something of the group: with REINFORCE++, which
    compares over the batch, `max_draws` is refused.
    """
    return {group_id for group_id, advantages_T in zip(group_ids_N, advantages_N_T, strict=True) if advantages_T.any()}

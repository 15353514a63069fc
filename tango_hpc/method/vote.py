"""Several verifications of one solution, combined by vote (SPARK, arXiv 2512.03244).

SPARK asks a generative verifier several times about one solution and takes, for each step, what most of them say
("step-level consistency"); labels from such votes trained better reward models than labels from the right answers.
There the votes label data for a reward model that is trained later; here they are the judgements that the generator
learns from in the same step. Switched on by `train.verifications_per_solution`, with
`algorithm.combine_verifications: vote`. (`mean` is the way of RL Tango's authors: see `advantages`.)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tango_hpc.questions.protocol.verification import Verification


def majority_vote(verifications_V: Sequence[Verification]) -> Verification:
    """Return the majority vote of V verifications of a solution with K steps; a single verification is its own vote.

    Each step has the judgement that more of the complete verifications give it than the other; a verification that
    does not judge every step once has no voice about steps, as it gives no step rewards where it is the only one. The
    verdict is that of more of the verifications that have one. A tie, or no vote, is no judgement: of a
    step, whose solution then has no step rewards, or of the solution.
    """
    if len(verifications_V) == 1:
        return verifications_V[0]
    complete = [read for read in verifications_V if read.is_complete]
    num_steps = len(verifications_V[0].judgements)
    judgements = [_sign(sum(read.judgements[k] for read in complete)) for k in range(num_steps)]
    verdict = _sign(sum({1: 1, 0: -1, -1: 0}[read.final] for read in verifications_V))
    return Verification(
        judgements=judgements,
        final={1: 1, -1: 0, 0: -1}[verdict],
        num_judgements=sum(judgement != 0 for judgement in judgements),
        format_reward=statistics.fmean(read.format_reward for read in verifications_V),
        problems=[],
    )


def _sign(balance: int) -> int:
    return (balance > 0) - (balance < 0)

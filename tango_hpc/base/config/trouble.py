"""Settings for trouble in training, which `stages.trouble` finds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tango_hpc.base.config.values import Section

OnTrouble = Literal["warn", "stop", "rollback"]


class TroubleConfig(Section):
    """The action when a trouble begins: warn = say so; stop = save and end with code 78; rollback = go back to the
    newest intact checkpoint and sample with other seeds, at most `train.max_rollbacks` times, then stop.
    """

    nonfinite: OnTrouble = Field("warn", description="Loss or gradient not finite; that update is left out anyway.")
    gap: OnTrouble = Field("warn", description="Engine and trainer drift apart, towards train.max_logprob_gap.")
    entropy: OnTrouble = Field("warn", description="The entropy of a role has collapsed.")
    equal_rewards: OnTrouble = Field("warn", description="All rewards of each group equal, for five steps of a role.")
    verifier: OnTrouble = Field("warn", description="J of the verdicts at 0 or below, or nearly all of them the same.")

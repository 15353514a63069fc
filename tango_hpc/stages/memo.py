"""The memo of the step under way: what an interrupted step has computed is not computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tango_hpc.base.run.step_names import SAVED_PHASES
from tango_hpc.base.types import Generation
from tango_hpc.models.weight_sync.sync import SyncStats
from tango_hpc.stages.journal import Clock


class StepMemo:
    """The results of one optimizer step by name, its seconds by phase, and its weight syncs.

    A checkpoint that is written within the step holds `results`, as JSON.
    """

    def __init__(self, results: Mapping[str, Any] | None = None, synced: SyncStats | None = None) -> None:
        self.results: dict[str, Any] = dict(results or {})
        self.clock = Clock(self.results.get("seconds", {}))
        self.synced = synced or SyncStats()

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result of that name, computed unless the memo has it."""
        if name not in self.results:
            self.results[name] = compute()
        return self.results[name]

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses of the step."""
        phases = [kept for name, kept in self.results.items() if name.partition("_")[0] in SAVED_PHASES]
        return sum(len(token_ids) for responses in phases for token_ids, _, _ in responses)

    def responses(self, name: str) -> list[Generation] | None:
        """Return the responses of that name; None where they are still to be generated."""
        saved = self.results.get(name)
        return None if saved is None else [Generation(*response) for response in saved]

    def keep(self, name: str, responses: list[Generation]) -> None:
        """Keep responses, and the seconds that the step has taken so far."""
        self.results[name] = [(made.token_ids, made.logprobs, made.finish_reason) for made in responses]
        self.results["seconds"] = self.clock.so_far()

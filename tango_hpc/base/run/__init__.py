"""The files of a run: its directory, metrics, rollout dumps, summary and progress."""

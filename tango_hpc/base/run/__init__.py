"""What a run leaves behind: its directory, metrics, rollout dumps, summary and progress."""

"""The needs of a configuration before anything runs: memory, batches, communicators, disk. No torch, no GPU."""

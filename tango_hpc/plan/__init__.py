"""What a configuration will need, before anything runs: memory, batches, weight-sync traffic. No torch, no GPU."""

"""What runs a job, here or through Slurm: entering a run, starting its ranks, staying with them. Never imports torch."""

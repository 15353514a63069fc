"""Starting runs here, through Slurm and as sweeps, and looking after them. Never imports torch."""

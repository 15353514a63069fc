"""The tools around a job: submitting it, sweeps, and looking after runs. Above `launch/`; never imports torch."""

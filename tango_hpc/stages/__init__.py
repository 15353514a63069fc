"""What the commands run on every rank: fine-tuning, Algorithm 1, evaluation, the teacher."""

"""The stages of a run: fine-tuning, Algorithm 1, evaluation, the teacher."""

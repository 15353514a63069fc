"""The trainer's side of a role: a Megatron-core model, its log-probabilities, its loss and its optimizer."""

"""Losses of the policy, a file each: `algorithm.loss.name` names one (docs/your_own_method.md)."""

"""Advantages from rewards, a file each: `algorithm.advantages` names one for each role (docs/your_own_method.md)."""

"""A role's model on its ranks: process groups, trainer, engine, and weight sync between the two."""

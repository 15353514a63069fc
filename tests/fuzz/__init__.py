"""Rubbish through everything that reads what a model, a user or a disk gives."""

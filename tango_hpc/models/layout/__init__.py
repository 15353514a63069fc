"""The places of a model's elements in trainer and engine shards, known without loading the model.

Imports neither torch nor anything of this package but `errors`.
"""

"""Weights from trainer shards to engine shards."""

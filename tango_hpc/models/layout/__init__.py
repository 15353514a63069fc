"""What is known of a model without loading it: its sizes, and where its elements lie in trainer and engine shards.

Imports neither torch nor anything of this package but `errors`.
"""

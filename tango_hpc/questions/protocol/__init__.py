"""The protocol between the two models: the grammar of their replies, and where steps end in tokens."""

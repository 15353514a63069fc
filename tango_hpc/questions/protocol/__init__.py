"""What the two models say to each other: prompts, the grammar of their replies, and where steps end in tokens."""

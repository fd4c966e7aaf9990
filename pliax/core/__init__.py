"""Floor 0: the vocabulary every other room speaks."""

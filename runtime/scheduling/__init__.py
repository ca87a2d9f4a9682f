"""Schedulers: whether a round drafts, and how many draft tokens of each request it verifies."""

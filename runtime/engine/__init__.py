"""The continuous-batching engine: queue, prefill, and the round of draft, schedule, verify, accept, commit.

Imports scheduling, model, text and what lies below.
"""

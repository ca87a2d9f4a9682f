"""How many draft tokens are verified, and when to draft at all.

Imports costs, decoding and bundle.
"""

"""Benchmarks: plain against speculative decoding, the engine under load, and the graphs' operators.

Imports the inference API, reports and what lies below.
"""

"""The loaded graphs as the engine sees them: target, drafters (one kind per file), bound calls and their shapes.

Imports cache, decoding and bundle.
"""

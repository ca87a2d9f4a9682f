"""The independent truth of the tests: targets, drafters and the decoding loop in float64 numpy.

Nothing here imports the packages under test. Checkpoint folders are read by their public layouts, every forward pass
recomputes the whole text, and clarity comes before speed: the models are tiny.
"""

from .decoding import Decoding, decode, greedy
from .drafter import Draft, ReferenceDrafter
from .target import ReferenceTarget

__all__ = ["Decoding", "Draft", "ReferenceDrafter", "ReferenceTarget", "decode", "greedy"]

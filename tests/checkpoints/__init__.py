"""Factories of tiny random checkpoints in every public layout.

The targets mostly continue token t with token t + 7, disturbed by their layers, and the drafters know a part of that:
acceptance lies between nothing and everything, and greedy ties are rare. The last token of the vocabulary is the mask,
the one before it ends a text; a target never chooses either by itself.
"""

from .drafters import write_deepspec, write_eagle3, write_speculators, write_zlab_dflash
from .targets import write_target
from .weights import OMIT, edit

__all__ = ["OMIT", "edit", "write_deepspec", "write_eagle3", "write_speculators", "write_target", "write_zlab_dflash"]

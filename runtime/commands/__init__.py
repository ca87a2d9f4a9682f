"""``dspark-run``: one file per command, options that they share, and what they print.

Imports everything else; nothing imports it.
"""

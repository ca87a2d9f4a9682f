"""Keys and values of running requests. Prefix reuse and further tiers of memory belong here, too.

Imports bundle.
"""

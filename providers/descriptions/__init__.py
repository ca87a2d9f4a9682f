"""The providers, one file per device family or library: names, precisions, options, and what is special about them.

Imports the folders of their sessions, and ``provider`` and what is below it; ``registry`` lists them.
"""

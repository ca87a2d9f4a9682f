"""Which tokens follow from scores: sampling options, distributions, penalties, the acceptance rule, and its record.

Imports bundle (names of the contract) and errors.
"""

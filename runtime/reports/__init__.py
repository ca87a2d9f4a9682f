"""Tables, pictures and lines for people.

Imports errors and what writes files.
"""

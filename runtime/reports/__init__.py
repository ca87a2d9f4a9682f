"""Tables, pictures and lines for people.

Imports errors, the version, and what writes files.
"""

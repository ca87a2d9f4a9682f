"""Tables, pictures and lines for people.

Imports errors only.
"""

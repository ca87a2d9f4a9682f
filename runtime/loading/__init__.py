"""From a bundle's folder to graphs in memory: which provider runs what, serving profiles, and what follows from both.

Imports engine and what lies below.
"""

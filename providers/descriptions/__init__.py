"""The device families, one short description per file.

Imports the folders of their sessions and ``provider``; ``registry`` lists them.
"""

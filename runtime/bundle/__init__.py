"""The bundle on disk: manifest, names of the graphs' tensors, calibration, and how its files are read and written.

Imports errors and providers only.
"""

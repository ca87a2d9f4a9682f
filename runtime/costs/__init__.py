"""What steps and drafts cost on a device: measurement, table, interpolation, and the file that keeps it.

Imports model and what lies below.
"""

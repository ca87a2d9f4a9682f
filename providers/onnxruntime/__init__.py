"""ONNX Runtime: its library and plug-ins, its sessions on the host, and the class that its execution providers share.

Imports ``provider`` and what is below it.
"""

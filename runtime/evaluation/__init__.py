"""Measures a drafter: acceptance, speed, and how honest its confidences are; fits their calibration; compares bundles."""

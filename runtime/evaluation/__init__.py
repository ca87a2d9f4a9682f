"""Measures a drafter: acceptance, speed, how honest its confidences are; fits their calibration; compares bundles."""

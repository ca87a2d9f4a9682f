"""Exports a target and a drafter.

Usage: export.py TARGET DRAFTER BUNDLE
"""

import sys
from pathlib import Path

from dspark.exporter import export_bundle, prepare

target, drafter, bundle = map(Path, sys.argv[1:])
planned = prepare(target, drafter, bundle)  # refuses what cannot work, from headers alone
manifest = export_bundle(planned)
print(f"{bundle}: {sum(file.bytes for file in manifest.files.values()) / 1e6:.1f} MB")

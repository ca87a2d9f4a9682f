"""A report's folder is tried by writing: root may do everything, but not everything can be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.runtime.bundle.files import check_writable
from dspark.runtime.errors import RequestError
from dspark.runtime.reports import folder as module
from dspark.runtime.reports.folder import check_report


@pytest.fixture(autouse=True)
def drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_draw", lambda: True)


@pytest.mark.parametrize("name", ["there", "new", "new/below/it"])
def test_nothing_stays_behind(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "report.json").write_text("an earlier one")
    before = sorted(tmp_path.rglob("*"))
    check_report(tmp_path / name, ["report.json", "picture.png"])
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there" / "report.json").read_text() == "an earlier one"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "file is no folder"),
        ("file/below", "file is no folder"),
        ("n" * 256, "File name too long"),
        ("/".join(["long" * 50] * 30), "File name too long"),
        ("/proc/report", "/proc/report"),
        ("taken", "report.json is a folder"),
        ("nowhere", "File exists"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=message) as raised:
        check_report(tmp_path / name, ["report.json"])
    assert str(raised.value).startswith(f"--report {tmp_path / name}: cannot be written: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_names_of_files_are_too_long_where_the_folder_is_not(tmp_path: Path) -> None:
    """The file is written aside first, whose path is longer."""
    folder = tmp_path
    while len(str(folder)) < 4060:
        folder /= "d" * min(200, 4070 - len(str(folder)))
    with pytest.raises(OSError, match="too long"):
        check_writable(folder, ["evaluation.json"])
    assert not any(tmp_path.iterdir())


MOUNTED = """
import subprocess, sys
from pathlib import Path
from dspark.runtime.bundle.files import check_writable
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder], check=True)
try:
    check_writable(folder / "report", ["report.json"])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces")
def test_a_disk_that_is_mounted_read_only(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", MOUNTED, str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this process may not mount")
    assert "Read-only file system" in done.stdout


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_without_the_right(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match="Permission denied"):
        check_report(tmp_path / "report", ["report.json"])

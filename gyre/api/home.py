"""GYRE_HOME: the folder of this user's embedded database, logs and Ray session.

    <home>/gyre.db                       the journal of every job, unless a store's URL says otherwise
    <home>/jobs/<job id>/                what belongs to one job: its checkpoints
    <home>/jobs/<job id>/first_weights/  the weights that it began with, if they were another job's
    <home>/jobs/<job id>/logs/           `<vertex>.<incarnation>.log`, and `master-0.<pid>.log`

Invariants:
- *made on use*: asking for a folder makes it; naming the home does not, so reading verbs leave no trace;
- *a sentence, not an errno*: a folder that cannot be made or written raises ConfigError with what to do.

This module must not know what the files hold. It imports nothing beyond the standard library.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import ConfigError

VARIABLE = "GYRE_HOME"

CERTIFICATE_FILE = "rest-cert.pem"
"""In the job's directory: the certificate that its master shows, if its REST interface speaks TLS."""

_LONGEST_RAY_TEMP_DIR = 42
"""Ray puts Unix sockets some 65 characters below its folder, and the kernel takes 107 in all."""


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    def database_url(self) -> str:
        """The SQLAlchemy URL of the embedded journal; neither the folder nor the file need exist."""
        return f"sqlite:///{self.path / 'gyre.db'}"

    def job_directory(self, job_id: str) -> Path:
        """`<home>/jobs/<job_id>`, made if it is not there."""
        return _made(self._below(job_id))

    def logs(self, job_id: str) -> Path:
        """The folder of the job's log files, made if it is not there."""
        return _made(self._below(job_id) / "logs")

    def rest_certificate(self, job_id: str) -> Path:
        """Where the certificate of the job's master is, if its REST interface speaks TLS."""
        return self._below(job_id) / CERTIFICATE_FILE

    def find_checkpoints(self, job_id: str) -> Path | None:
        """The folder of the job's checkpoints if there is one."""
        folder = self._below(job_id) / "checkpoints"
        return folder if folder.is_dir() else None

    def find_logs(self, job_id: str) -> Path | None:
        """The folder of the job's log files if there is one: what a reader asks."""
        folder = self._below(job_id) / "logs"
        return folder if folder.is_dir() else None

    def ray_temp_dir(self) -> Path:
        """Ray's folder: below the home, or in the system's temporary folder where the home's path is too long."""
        inside = self.path / "ray"
        if len(str(inside)) <= _LONGEST_RAY_TEMP_DIR:
            return _made(inside)
        digest = hashlib.sha256(str(self.path).encode()).hexdigest()[:8]
        return _made(Path(tempfile.gettempdir()) / f"gyre-{os.getuid()}-{digest}")

    def check_writable(self) -> None:
        """Raises ConfigError, as one sentence, where the home cannot be made or written."""
        _made(self.path)
        try:
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise _unusable(self.path, error) from None

    def _below(self, job_id: str) -> Path:
        if not job_id or job_id in (".", "..") or "/" in job_id or "\x00" in job_id:
            raise ConfigError(f"{job_id!r} cannot be the name of a job's folder.")
        return self.path / "jobs" / job_id


def home(path: str | os.PathLike[str] | None = None) -> Home:
    """The home at `path`, or else at $GYRE_HOME, or else `~/.gyre`; always absolute."""
    chosen = os.fspath(path) if path is not None else os.environ.get(VARIABLE) or "~/.gyre"
    try:
        return Home(Path(os.path.abspath(Path(chosen).expanduser())))
    except RuntimeError:
        raise ConfigError(
            f"{chosen}: there is no home folder to expand '~' to.", hint=f"Set {VARIABLE} to a folder."
        ) from None


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _unusable(folder: Path, error: OSError) -> ConfigError:
    why = (
        "a file is in the way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
    )
    return ConfigError(
        f"{folder} cannot be written: {why}.",
        hint=f"Set {VARIABLE} (or --home) to a folder that this user can write.",
    )

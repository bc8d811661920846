"""GYRE_HOME: the folder of this user's embedded database, logs and Ray session.

    <home>/gyre.db                       the journal of every job, unless a store's URL says otherwise
    <home>/jobs/<job id>/                what belongs to one job: its checkpoints
    <home>/jobs/<job id>/first_weights/  the weights that it began with, if they were another job's
    <home>/jobs/<job id>/store_lost.json  while the job's store is lost: see `gyre.master.store_notes`
    <home>/jobs/<job id>/samples/        the samples of its steps: see docs/samples.md
    <home>/jobs/<job id>/logs/           `<vertex>.<incarnation>.log`, `master-0.<pid>.log`; `….log.1` …

Invariants:
- *made on use*: asking for a folder makes it; naming the home does not, so reading verbs leave no trace;
- *its owner's*: another user's home, or one that everybody can write, is refused;
- *a sentence, not an errno*: a folder that cannot be made or written raises ConfigError with what to do.

This module must not know what the files hold. It imports nothing beyond the standard library.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import ConfigError

VARIABLE = "GYRE_HOME"

CERTIFICATE_FILE = "rest-cert.pem"
"""In the job's directory: the certificate that its master shows, if its REST interface speaks TLS."""

_LONGEST_RAY_TEMP_DIR = 42
"""Ray puts Unix sockets some 65 characters below its folder, and the kernel takes 107 in all."""


_LONGEST_TEMPORARY = 20
_PLAIN = re.compile(r"[A-Za-z0-9/._-]+")
"""What Ray takes in a path: it puts it into command lines that it splits, into URLs and into protocol buffers."""


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    def database_url(self) -> str:
        """The SQLAlchemy URL of the embedded journal; neither the folder nor the file need exist."""
        # Elsewhere in a URL, a question mark begins its options, and a percent sign another character.
        quoted = str(self.path / "gyre.db").replace("%", "%25").replace("?", "%3F")
        return f"sqlite:///{quoted}"

    def job_directory(self, job_id: str) -> Path:
        """`<home>/jobs/<job_id>`, made if it is not there."""
        _made(self.path)  # of this user alone, as its parents need not be
        return _made(self._below(job_id))

    def logs(self, job_id: str) -> Path:
        """The folder of the job's log files, made if it is not there."""
        _made(self.path)
        return _made(self._below(job_id) / "logs")

    def rest_certificate(self, job_id: str) -> Path:
        """Where the certificate of the job's master is, if its REST interface speaks TLS."""
        return self._below(job_id) / CERTIFICATE_FILE

    @property
    def jobs_folder(self) -> Path:
        """The folder of the jobs' directories; it need not exist."""
        return self.path / "jobs"

    def find_checkpoints(self, job_id: str) -> Path | None:
        """The folder of the job's checkpoints if there is one."""
        folder = self._below(job_id) / "checkpoints"
        return folder if folder.is_dir() else None

    def samples(self, job_id: str) -> Path:
        """Where the samples of the job are; it need not exist."""
        return self._below(job_id) / "samples"

    def find_logs(self, job_id: str) -> Path | None:
        """The folder of the job's log files if there is one: what a reader asks."""
        folder = self._below(job_id) / "logs"
        return folder if folder.is_dir() else None

    def ray_temp_dir(self) -> Path:
        """Ray's folder: below the home, or in the system's temporary folder where Ray cannot use the home's path: it is
        too long for sockets, or has other characters than letters, digits and `/._-`. One that is already there and is
        another user's, open to others, or a link is not used."""
        inside = self.path / "ray"
        if len(str(inside)) <= _LONGEST_RAY_TEMP_DIR and _PLAIN.fullmatch(str(inside)):
            _made(self.path)
            return _made(inside)
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]
        temporary = tempfile.gettempdir()
        if len(temporary) > _LONGEST_TEMPORARY or not _PLAIN.fullmatch(temporary):
            temporary = "/tmp"
        folder = Path(temporary) / f"gyre-{os.getuid()}-{digest}"
        _made(folder)
        if _is_private(folder):
            return folder
        try:
            return Path(tempfile.mkdtemp(prefix=f"gyre-{os.getuid()}-", dir=temporary))
        except OSError as error:
            raise _unusable(folder, error) from None

    def check_writable(self) -> None:
        """Raises ConfigError, as one sentence, where the home cannot be made or written."""
        _refuse_strangers(self.path)
        _made(self.path)
        try:
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise _unusable(self.path, error) from None

    def _below(self, job_id: str) -> Path:
        if not job_id or job_id in (".", "..") or "/" in job_id or "\x00" in job_id:
            raise ConfigError(f"{job_id!r} cannot be the name of a job's folder.")
        return self.jobs_folder / job_id


def home(path: str | os.PathLike[str] | None = None) -> Home:
    """The home at `path`, or else at $GYRE_HOME, or else `~/.gyre`; always absolute."""
    chosen = os.fspath(path) if path is not None else os.environ.get(VARIABLE) or "~/.gyre"
    try:
        path = Path(os.path.abspath(Path(chosen).expanduser()))
        str(path).encode()
        return Home(path)
    except UnicodeEncodeError:  # the journal, URLs and JSON hold its path as text
        raise ConfigError(
            f"{os.fsencode(chosen)!r} is not valid UTF-8, which the home's path has to be.",
            hint=f"Set {VARIABLE} (or --home) to another folder, or to a symbolic link to it.",
        ) from None
    except RuntimeError:
        raise ConfigError(
            f"{chosen}: there is no home folder to expand '~' to.", hint=f"Set {VARIABLE} to a folder."
        ) from None


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link, of this user, which no other can write."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _refuse_strangers(home: Path) -> None:
    """Raises ConfigError for another user's home, and for one that everybody can write: whoever can write it decides
    what runs as this user. Root may use the home of a user, as with sudo."""
    try:
        found = home.stat()
    except OSError:  # it is not there, or making it will say why
        return
    if found.st_uid not in (os.getuid(), 0) and os.getuid() != 0:
        raise ConfigError(
            f"{home} belongs to another user (uid {found.st_uid}).",
            hint=f"Set {VARIABLE} (or --home) to a folder of your own.",
        )
    if found.st_mode & stat.S_IWOTH and stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{home} can be written by every user of this machine.",
            hint=f"`chmod o-w` it, or set {VARIABLE} (or --home) to a folder of your own.",
        )


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

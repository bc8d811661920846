"""What the dead of a job left in shared memory goes with the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.rollouts.protocol.credentials import weights_key
from gyre.rollouts.weight_dirs import of_copy, of_instance, of_publisher, remove_left_by_job
from gyre.weights.owned_dirs import OwnedDir


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "rollouts.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "t"}))
    return tmp_path


def test_actor_instances_and_ranks_that_died_leave_nothing_and_other_jobs_keep_theirs(
    job: Path, tmp_path: Path
) -> None:
    root = tmp_path / "shm"
    living = OwnedDir(root, of_publisher(job))
    key = weights_key("t")
    claims = [  # side by side: who claims a folder takes away those that nobody holds
        OwnedDir(root, purpose)
        for purpose in (
            of_publisher(job),
            of_instance(key),
            of_copy("actor-1", job),
            of_instance("another"),
        )
    ]
    for owned in claims:
        owned.close(keep=True)  # as its death would
    removed = remove_left_by_job(job, ["actor-0", "actor-1"], root=root)
    assert set(removed) == {owned.path for owned in claims[:3]}
    assert set(root.iterdir()) == {living.path, claims[3].path}
    living.close()


def test_a_job_that_never_had_a_manager_is_no_error(tmp_path: Path) -> None:
    assert remove_left_by_job(tmp_path / "none", ["actor-0"], root=tmp_path / "shm") == []

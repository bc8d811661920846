"""Copied beside DLRover's tests as their conftest: the fixture that its wheel lacks."""

import os
import sys

import pytest
import ray


@pytest.fixture
def tmp_ray(request):
    """A cluster of the test's own. The modules that are tested are on its workers' path."""
    options = getattr(request, "param", {})
    ray.init(
        namespace="dlrover_test",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=os.environ["RAY_PLACE"],
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
        **options,
    )
    yield
    ray.shutdown()
    helper = sys.modules.get("dlrover.python.unified.util.actor_helper")
    if helper is not None:
        # Its handles are of the cluster that has ended. DLRover's own fixture forgets them, too.
        vars(helper)["__actors_cache"].clear()

"""Copied beside DLRover's tests: the class that its unit tests are of, without the imports of what the wheel lacks."""

import os
import unittest

import pydantic

try:
    from gyre.errors import ConfigError
except ImportError:  # in DLRover's environment
    ValidationError = pydantic.ValidationError
else:
    ValidationError = (pydantic.ValidationError, ConfigError)


class BaseTest(unittest.TestCase):
    def setUp(self):
        self._before = dict(os.environ)

    def tearDown(self):
        os.environ.clear()
        os.environ.update(self._before)

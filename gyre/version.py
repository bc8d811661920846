"""The version of this Gyre."""

__version__ = "0.1.0"

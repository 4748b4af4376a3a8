"""kgorch: one training run that lives through many short GPU sessions."""

__version__ = "0.1.0"

"""What all rooms share. No torch here, apart from `common.engine`."""

__version__ = "0.1.0"

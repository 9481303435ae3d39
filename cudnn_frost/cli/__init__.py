"""The `cudnn-frost` command."""

from .app import main

__all__ = ["main"]

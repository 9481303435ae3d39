"""Compiled Hopper kernels on a CPU: see README.md beside this file."""

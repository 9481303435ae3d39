"""The fp64 oracle of the SDPA contract, a same-precision baseline, and the random-graph generator.

Nothing here imports the package under test: the oracle and the package's reference row are two
programs written from one text, and each checks the other.
"""

"""Ranks that communicate: MPI communicators whose waits are watched, where ranks run, and checks among all of them."""

"""When the ranks communicate: in every step, before or during it; every few steps; or whenever the network is free."""

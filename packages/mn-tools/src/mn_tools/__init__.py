"""Commands on top of mn_comm: doctor, bench, timeline and elastic; see ``python -m mn_tools --help``."""

"""Commands on top of mn_comm: doctor, bench and timeline; see ``python -m mn_tools --help``."""

"""What happens to a process of an MPI job besides exchanging arrays: how it ends, what is said when it hangs or dies.

mn-comm finds this package by its name, and speaks to it by the six calls of :mod:`mn_guard.guard`.

- :mod:`~mn_guard.exit_sequence` lists what happens when a process ends, in its order.
- :mod:`~mn_guard.exit_status`, :mod:`~mn_guard.global_except_hook` and :mod:`~mn_guard.interrupts`: an exit status, an
  exception or Ctrl-C on one rank ends all ranks. :mod:`~mn_guard.abort`: how.
  :mod:`~mn_guard.crash_output`: where a rank was when a signal ends it.
- :mod:`~mn_guard.guard_thread`: the one thread, which looks for waits that stall, and for Ctrl-C.
  :mod:`~mn_guard.stall`, :mod:`~mn_guard.stall_probe` and :mod:`~mn_guard.stall_report`: what every rank is doing when
  one has waited too long.
- :mod:`~mn_guard.node_process`: the one process on each node. :mod:`~mn_guard.death_reporter`: it reports which rank
  died first. :mod:`~mn_guard.supervised`: what a rank reports to the supervisor of its job, if there is one.
- :mod:`~mn_guard.leftovers`: messages that nobody has received. :mod:`~mn_guard.forks`: what must happen around a fork.
"""

__all__: list[str] = []  # nothing has to be imported

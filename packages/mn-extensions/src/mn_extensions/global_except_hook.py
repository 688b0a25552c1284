"""An uncaught exception on one rank ends all ranks; ``create_communicator`` installs this hook in most jobs."""

from mn_guard.global_except_hook import add_hook, add_hook_if_enabled

__all__ = ["add_hook", "add_hook_if_enabled"]

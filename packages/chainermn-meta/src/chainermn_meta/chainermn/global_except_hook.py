"""An uncaught exception on one rank ends all ranks."""

from mn_extensions.global_except_hook import add_hook, add_hook_if_enabled

__all__ = ["add_hook", "add_hook_if_enabled"]

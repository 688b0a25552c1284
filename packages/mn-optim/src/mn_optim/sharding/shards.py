"""The part of the optimizer's state that this rank owns, and gathering all parts on one rank."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from mn_comm import CommunicatorBase, expect_same, raise_on_all
from mn_comm.building_blocks import Owners
from mn_optim.serialized import read
from mn_optim.sharding.parameters import aliases, expect_independent_rules, items_of, with_rules
from mn_optim.sharding.partition import assign
from mn_optim.sharding.step import Clipping, drop, leaving_out, need_of, share_non_finite

SHARD = "multi_node_shard"
"""The name of what says, in a file that has the state of one rank's parameters only, whose these are."""

_State = tuple[int, dict[str, Any] | None]


class Shards:
    """Divides the parameters of an optimizer's model among the ranks.

    Each parameter has an owner, the same on all ranks. Only the owner updates it and has its state. Owners are chosen
    at the first step, and again when the model has changed; existing parameters keep their owners.

    Args:
        communicator: The ranks. Creating it is collective.
        optimizer: The actual optimizer.

    Attributes:
        is_settled: Whether every parameter has an owner, so that a step needs no choice.
    """

    def __init__(self, communicator: CommunicatorBase, optimizer: Any) -> None:
        self._communicator = communicator
        self._rank = communicator.rank
        self._optimizer = optimizer
        self._owners: dict[str, int] = {}
        self._known: set[str] = set()
        self.is_settled = False
        self._saves_own_part = False
        self._n_loads = 0
        self._gathered: dict[str, _State] | None = None
        self._serializing = threading.Lock()

    def owners(self, model: chainer.Link, may_choose: bool) -> Owners | None:
        """Return which rank alone needs the mean of which gradient in the next step; ``None`` if all need all.

        Args:
            model: The model.
            may_choose: Whether owners may be chosen now if there are none; choosing them is collective.
        """
        params = with_rules(model)
        if not self.is_settled and may_choose:
            self._settle(model, params)
        need = need_of(self._optimizer, params) if self.is_settled else None
        return None if need is None else Owners(self._owners, need)

    def take_step(self, model: chainer.Link, take_step: Callable[[], None], has_all_means: bool = True) -> None:
        """Take a step with this rank's parameters, and send the results to all ranks; collective.

        Args:
            model: The model.
            take_step: Lets the actual optimizer take the step.
            has_all_means: Whether every rank has the means of all gradients, not only the owners.

        Raises:
            TypeError: The parameters cannot be updated one by one (on every rank).
            Exception: An exception of the step; the other ranks raise one of the same built-in type, unless it is of a
                hook after the update. All ranks still have the same parameters.
        """
        params = with_rules(model)
        if not self.is_settled:
            self._settle(model, params)
        # Parameters that are not updated are equal on all ranks, and stay so. Parameters that got a rule in the
        # meantime are updated by all ranks until owners are chosen again. A hook may freeze or unfreeze parameters.
        owned = {name: each for name, each in params.items() if name in self._owners}
        active = {name: each for name, each in owned.items() if each.update_rule.enabled}
        others = [param for name, param in owned.items() if self._owners[name] != self._rank]
        is_gathered = False

        def gather(failure: Exception | None = None) -> None:
            nonlocal is_gathered
            is_gathered = True
            self.forget_gathered()  # a hook may have gathered it before the update
            self.is_settled = False  # if this raises, it raises on all ranks
            updated = [name for name, each in owned.items() if name in active or each.update_rule.enabled]
            arrays = [(name, owned[name].data) for name in updated]  # some updates make new arrays
            owners = [self._owners[name] for name in updated]
            self._communicator.all_gather_owned(arrays, owners, failure)
            self.is_settled = True

        clipping = None
        if not has_all_means:
            drop(others)
            share_non_finite(self._communicator, self._optimizer, owned, self._owners)
            owner_of = {id(param): self._owners[name] for name, param in owned.items()}
            clipping = partial(Clipping, communicator=self._communicator, owner_of=owner_of)
        try:
            with leaving_out(self._optimizer, others, gather, clipping):
                self._expect_own_updates(active)
                take_step()
        except Exception as error:
            if not is_gathered:
                gather(error)
            raise
        if not is_gathered:
            gather()

    def _expect_own_updates(self, params: Mapping[str, chainer.Parameter]) -> None:
        """Raise if parameters that different ranks update have come to share memory or an update rule."""
        arrays = [param.data for param in params.values()]
        rules = [param.update_rule for param in params.values()]
        own_memory = all(getattr(each.flags, "owndata", False) for each in arrays)
        if own_memory and _are_different(arrays) and _are_different(rules):  # nearly always true, and fast
            return
        for first, *rest in aliases(params):
            for other in rest:
                if self._owners[other] != self._owners[first]:
                    raise ValueError(
                        "Sharded: expected parameters that share memory, or an update rule, to do so before the "
                        f"first step, or as the model changes; got {first} and {other}, which ranks "
                        f"{self._owners[first]} and {self._owners[other]} update"
                    )

    def restart(self) -> None:
        """Choose owners in the next step, for parameters that have none; must be called on every rank."""
        self.is_settled = False

    def _settle(self, model: chainer.Link, params: Mapping[str, chainer.Parameter]) -> None:
        """Choose owners, and move the state to them; collective."""
        with raise_on_all(self._communicator):
            expect_independent_rules(self._optimizer, model, params)
        known = {name for name, _ in model.namedparams()}
        if self._known and known != self._known:
            self._warn(known)
        expect_same(self._communicator, "parameters with update rules", tuple(params))
        # If only some ranks have loaded a snapshot, they have dropped state of other owners, and no rank has it.
        expect_same(self._communicator, "loading of optimizer state before the first step", self._n_loads > 0)
        self._n_loads = self._communicator.bcast_obj(self._n_loads)
        groups = [group for each in self._communicator.allgather_obj(aliases(params)) for group in each]
        owners = assign(items_of(params), groups, self._communicator.size, self._owners)
        self._owners = self._communicator.bcast_obj(owners)  # ranks may differ, for example in frozen parameters
        self._known = known
        self._move_state(params)
        self.is_settled = True

    def _warn(self, known: set[str]) -> None:
        changed = sorted(known ^ self._known)
        with raise_on_all(self._communicator):  # where warnings are errors, all ranks raise
            if self._rank == 0:
                warnings.warn(
                    f"the model has changed while its optimizer state is sharded ({len(changed)} parameters came or "
                    f"went, the first is {changed[0]}): those that are new are given owners now",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _move_state(self, params: Mapping[str, chainer.Parameter]) -> None:
        """Move the state of each parameter to its owner, and delete it on all other ranks; collective."""
        held = {name for name, param in params.items() if param.update_rule.state is not None}
        holders = self._communicator.allgather_obj(held)
        for name, param in params.items():
            owner = self._owners[name]
            where = [rank for rank, names in enumerate(holders) if name in names]
            if where and owner not in where:
                state = self._communicator.bcast_obj(
                    _state_of(param) if self._rank == where[0] else None, root=where[0]
                )
                if self._rank == owner:
                    _set_state(param, state)
            if self._rank != owner:
                _drop_state(param)

    def consolidate(self, to: int) -> None:
        """Gather the state of all parameters on one rank, until the next step; collective.

        Args:
            to: The rank.

        Raises:
            ValueError: Ranks pass different ranks, or have not loaded state equally often (on every rank).
        """
        expect_same(self._communicator, "rank in consolidate()", to)
        expect_same(self._communicator, "number of loads of optimizer state", self._n_loads)
        states = {}
        with raise_on_all(self._communicator):
            if self._rank != to:
                named = self._optimizer.target.namedparams()
                states = {name: _state_of(param) for name, param in named if self._owners.get(name) == self._rank}
        gathered = self._communicator.gather_obj(states, root=to)
        if gathered is not None:
            self._gathered = {name: state for each in gathered for name, state in each.items()}

    def forget_gathered(self) -> None:
        """Discard what was gathered: it is about to be out of date."""
        self._gathered = None

    def serialize(self, serializer: Any) -> None:
        """Save or load the optimizer's state; not collective.

        The state is saved in Chainer's own layout. When loading, the state of other owners is dropped, one parameter at
        a time.

        Raises:
            RuntimeError: The state of other ranks is to be saved, and was not gathered on this rank.
        """
        with self._serializing:  # meanwhile, functions of this module serialize rules
            is_saving = isinstance(serializer, chainer.Serializer)
            if is_saving:
                is_part = self._saves_own_part
                if is_part and self._owners:
                    described = {"size": self._communicator.size, "rank": self._rank, "owners": self._owners}
                    serializer[SHARD]("owners", np.frombuffer(json.dumps(described).encode(), np.uint8))
            else:
                self._n_loads += 1
                self.forget_gathered()
                is_part = self._load_owners(serializer)
            foreign = {
                name: param
                for name, param in self._optimizer.target.namedparams()
                if param.update_rule is not None and self._owners.get(name, self._rank) != self._rank
            }
            states = self._expect_gathered(foreign) if is_saving and not is_part else None
            with _serialized_by(_serialize_count if is_part else partial(_serialize_foreign, states), foreign):
                self._optimizer.serialize(serializer)

    def _expect_gathered(self, names: Collection[str]) -> Mapping[str, _State]:
        """Return the state of other ranks.

        Raises:
            RuntimeError: It is not on this rank.
        """
        gathered = self._gathered or {}
        missing = [name for name in names if name not in gathered]
        if missing:
            raise RuntimeError(
                f"expected optimizer.consolidate(to={self._rank}) on every rank, after the last step and "
                f"before rank {self._rank} saves the optimizer: other ranks have the state of "
                f"{len(missing)} parameters, such as {missing[0]}; multi_node_snapshot and "
                "create_multi_node_checkpointer do without it"
            )
        return gathered

    @contextmanager
    def own_part(self) -> Iterator[None]:
        """Return a context in which only this rank's part is saved, and no rank is asked."""
        self._saves_own_part = True
        try:
            yield
        finally:
            self._saves_own_part = False

    def _load_owners(self, serializer: Any) -> bool:
        """Return whether the state to be loaded is one rank's part, and if so, use the owners with which it was saved.

        Raises:
            ValueError: It is the part of another rank, or was saved with another number of ranks.
        """
        saved = read(serializer[SHARD], "owners")
        if saved is None or saved.dtype != np.uint8:
            if not self._owners:  # the first step will find the same owners, or move state
                params = with_rules(self._optimizer.target)
                self._owners = assign(items_of(params), aliases(params), self._communicator.size, {})
            return False
        described = json.loads(saved.tobytes())
        expected = (self._rank, self._communicator.size)
        if (described["rank"], described["size"]) != expected:
            raise ValueError(
                f"expected the optimizer state of rank {expected[0]} of {expected[1]}, got that of rank "
                f"{described['rank']} of {described['size']}: what another number of ranks can load is a snapshot, "
                "which has the state of all"
            )
        self._owners = described["owners"]
        for name, param in with_rules(self._optimizer.target).items():
            if self._owners.get(name) != self._rank:
                _drop_state(param)
        return True


def _are_different(values: Collection[Any]) -> bool:
    return len(set(map(id, values))) == len(values)


@contextmanager
def _serialized_by(
    serialize: Callable[[str, chainer.Parameter, Any], None], params: Mapping[str, chainer.Parameter]
) -> Iterator[None]:
    """Return a context in which the update rules of some parameters are serialized by a function."""
    try:
        for name, param in params.items():
            param.update_rule.serialize = partial(serialize, name, param)
        yield
    finally:
        for param in params.values():
            vars(param.update_rule).pop("serialize", None)


def _serialize_count(name: str, param: chainer.Parameter, serializer: Any) -> None:
    param.update_rule.t = serializer("t", param.update_rule.t)


def _serialize_foreign(
    states: Mapping[str, _State] | None, name: str, param: chainer.Parameter, serializer: Any
) -> None:
    """Save the state that another rank has sent; or, without such states, load state for its count of steps only."""
    rule = param.update_rule
    count = rule.t
    try:
        if states is not None:
            _set_state(param, states[name])
        type(rule).serialize(rule, serializer)
    finally:
        _drop_state(param)
        if states is not None:
            rule.t = count


def _state_of(param: chainer.Parameter) -> _State:
    rule = param.update_rule
    if rule.state is None:
        return rule.t, None
    return rule.t, {key: cuda.to_cpu(each) if hasattr(each, "shape") else each for key, each in rule.state.items()}


def _set_state(param: chainer.Parameter, state: _State) -> None:
    param.update_rule.t, param.update_rule._state = state  # noqa: SLF001 - the public name cannot be set


def _drop_state(param: chainer.Parameter) -> None:
    rule = param.update_rule
    rule._state = None  # noqa: SLF001
    if hasattr(rule, "_fp32_param"):
        rule._fp32_param = None  # noqa: SLF001

"""A model of the protocol of docs/decisions/0012-votes.md, small enough to be explored completely.

Three ranks form a family of communicators, train for some steps, and end; any of them may die at any moment. Where MPI
leaves the behaviour open, the model chooses: which ranks see a failure and which succeed, in which order the ranks
continue, and whether a vote counts a rank that died after it had voted. All choices are explored.
"""

from __future__ import annotations

from typing import NamedTuple

RANKS = (0, 1, 2)
NODES = ({0, 1}, {2})  # the ranks that share a node, and so a derived communicator
BUILD = ("leave?", "derive", "vote")
VOTES = ("leave?", "vote", "commit")
STEP = ("within", "all", "within", "commit")


class Family(NamedTuple):
    """One generation: its members, how far each rank has come in it, and the decisions."""

    members: frozenset
    position: tuple  # of each rank, in the program; -1 before it
    votes: tuple  # of each rank, its votes in order
    decisions: tuple
    revoked: frozenset  # communicators: "base", and ("derived", rank) for the one on which a rank would be interrupted
    derived: frozenset  # the ranks that have their derived communicator


class State(NamedTuple):
    """Everything: the families, what each rank does, and which steps it has applied, each with its family's number."""

    families: tuple
    doing: tuple  # of each rank: (activity, number of the family); activity: run, failed, shrink, leave, dead, left
    applied: tuple
    deaths: int


def start():
    """Return the first state: a family that no rank has used yet."""
    return State((_family(frozenset(RANKS)),), (("run", 0),) * 3, ((),) * 3, 0)


def _family(members):
    return Family(members, (-1,) * 3, ((),) * 3, (), frozenset(), frozenset())


def _put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


class Model:
    """The protocol, or a variant with an error.

    Args:
        steps: How many steps are trained.
        deaths: How many ranks may die.
        votes_on_derived: Whether all ranks vote that they have a derived communicator before any of them uses it.
        votes_on_steps: Whether all ranks vote before a step is applied.
        revokes: Whether a rank that fails revokes its communicators.
    """

    def __init__(self, steps=1, deaths=2, *, votes_on_derived=True, votes_on_steps=True, revokes=True):
        self.deaths = deaths
        self.votes_on_derived = votes_on_derived
        self.votes_on_steps = votes_on_steps
        self.revokes = revokes
        self.steps = steps

    def _program(self, state, rank, number):
        """Return the operations of a rank in a family, after the steps that it has applied in earlier families."""
        before = sum(1 for _, applied_in in state.applied[rank] if applied_in != number)
        build = BUILD if self.votes_on_derived else BUILD[:2]
        return (*build, *STEP * (self.steps - before), "end")

    def next_states(self, state):
        """Yield every state that may follow."""
        for rank in RANKS:
            what, number = state.doing[rank]
            if what in ("dead", "left"):
                continue
            if state.deaths < self.deaths:
                yield state._replace(doing=_put(state.doing, rank, ("dead", number)), deaths=state.deaths + 1)
            yield from getattr(self, f"_{what}")(state, rank, number)
        for number in range(len(state.families)):
            yield from self._decide(state, number)
            yield from self._shrink_all(state, number)

    def _alive(self, state, family):
        return [rank for rank in family.members if state.doing[rank][0] not in ("dead", "left")]

    def _has_casualty(self, state, family):
        return len(self._alive(state, family)) < len(family.members)

    def _set(self, state, number, family):
        return state._replace(families=_put(state.families, number, family))

    def _enter(self, state, rank, number):
        """Continue with the next operation; a vote is cast immediately."""
        family = state.families[number]
        position = family.position[rank] + 1
        family = family._replace(position=_put(family.position, rank, position))
        operation = self._program(state, rank, number)[position]
        if operation in VOTES:
            family = family._replace(votes=_put(family.votes, rank, (*family.votes[rank], operation != "leave?")))
        state = self._set(state, number, family)
        if operation == "end":
            return state._replace(doing=_put(state.doing, rank, ("failed", number)))
        return state

    def _operation(self, state, rank, number):
        position = state.families[number].position[rank]
        return self._program(state, rank, number)[position] if position >= 0 else None

    def _run(self, state, rank, number):
        family = state.families[number]
        operation = self._operation(state, rank, number)
        if operation is None:
            yield self._enter(state, rank, number)
        elif operation in VOTES:
            yield from self._read(state, rank, number, operation)
        else:
            group = self._group(family, rank, operation)
            if self._may_succeed(state, family, rank, group):
                yield self._succeed(state, rank, number, operation)
            if self._may_fail(state, family, rank, group, operation):
                yield self._fail(state, rank, number)

    def _group(self, family, rank, operation):
        node = next(node for node in NODES if rank in node)
        return family.members & node if operation == "within" else family.members

    def _may_succeed(self, state, family, rank, group):
        """Whether all of a group that are alive have come, and the dead did not matter or had come as well."""
        position = family.position[rank]
        return all(family.position[other] >= position for other in group if other in self._alive(state, family))

    def _may_fail(self, state, family, rank, group, operation):
        communicator = ("derived", rank) if operation == "within" else "base"
        return communicator in family.revoked or any(state.doing[other][0] in ("dead", "left") for other in group)

    def _succeed(self, state, rank, number, operation):
        family = state.families[number]
        if operation == "derive":
            state = self._set(state, number, family._replace(derived=family.derived | {rank}))
        if operation == "all" and not self.votes_on_steps:
            state = self._apply(state, rank, number)
        return self._enter(state, rank, number)

    def _apply(self, state, rank, number):
        done = state.applied[rank]
        return state._replace(applied=_put(state.applied, rank, (*done, (len(done), number))))

    def _fail(self, state, rank, number):
        """Revoke this rank's communicators, and prepare to vote against."""
        family = state.families[number]
        revoked = set(family.revoked)
        if self.revokes:
            revoked.add("base")
            if rank in family.derived:
                revoked |= {("derived", other) for other in self._group(family, rank, "within")}
        family = family._replace(revoked=frozenset(revoked), votes=_put(family.votes, rank, (*family.votes[rank], 0)))
        state = self._set(state, number, family)
        return state._replace(doing=_put(state.doing, rank, ("failed", number)))

    def _read(self, state, rank, number, operation):
        """Read the result of a vote."""
        family = state.families[number]
        index = len(family.votes[rank]) - 1
        if index >= len(family.decisions):
            return
        if operation == "leave?" or family.decisions[index]:
            if operation == "commit" and self.votes_on_steps:
                state = self._apply(state, rank, number)
            yield self._enter(state, rank, number)
        else:
            yield state._replace(doing=_put(state.doing, rank, ("shrink", number)))

    def _failed(self, state, rank, number):
        """Wait for the end of the vote, then shrink; a rank that has reached its end votes against first."""
        family = state.families[number]
        is_ending = self._operation(state, rank, number) == "end"
        expected = self._votes_before_end(state, rank, number) + 1 if is_ending else len(family.votes[rank])
        if len(family.votes[rank]) < expected:
            yield self._set(state, number, family._replace(votes=_put(family.votes, rank, (*family.votes[rank], 0))))
        elif len(family.decisions) >= expected:
            yield state._replace(doing=_put(state.doing, rank, ("shrink", number)))

    def _votes_before_end(self, state, rank, number):
        return sum(operation in VOTES for operation in self._program(state, rank, number))

    def _shrink(self, state, rank, number):
        return ()

    def _shrink_all(self, state, number):
        """Create the next family as soon as all ranks that are alive want it."""
        family = state.families[number]
        alive = self._alive(state, family)
        if not alive or any(state.doing[rank] != ("shrink", number) for rank in alive):
            return
        made = len(state.families)
        state = state._replace(families=(*state.families, _family(frozenset(alive))))
        doing = state.doing
        for rank in alive:
            is_done = len(state.applied[rank]) == self.steps
            doing = _put(doing, rank, ("leave" if is_done else "run", made))
        yield state._replace(doing=doing)

    def _leave(self, state, rank, number):
        """Tell the other ranks that this rank ends, and end when they know."""
        family = state.families[number]
        if not family.votes[rank]:
            yield self._set(state, number, family._replace(votes=_put(family.votes, rank, (1,))))
        elif family.decisions:
            yield state._replace(doing=_put(state.doing, rank, ("left", number)))

    def _decide(self, state, number):
        """End the current vote; the result is the same for all ranks, whatever it is."""
        family = state.families[number]
        index = len(family.decisions)
        alive = self._alive(state, family)
        if not alive or any(len(family.votes[rank]) <= index for rank in alive):
            return
        cast = [family.votes[rank][index] for rank in family.members if len(family.votes[rank]) > index]
        outcomes = {False} if self._has_casualty(state, family) else set()
        if len(cast) == len(family.members):
            outcomes.add(all(cast))
        for outcome in outcomes:
            yield self._set(state, number, family._replace(decisions=(*family.decisions, outcome)))

    def explore(self):
        """Explore all choices.

        Returns:
            The number of states, and the problems in them, each once.
        """
        first = start()
        seen, waiting, wrong = {first}, [first], set()
        while waiting:
            state = waiting.pop()
            following = list(self.next_states(state))
            wrong |= set(self._faults(state, following))
            for each in following:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return len(seen), wrong

    def _faults(self, state, following):
        is_death = [each.deaths > state.deaths for each in following]
        at_work = [rank for rank in RANKS if state.doing[rank][0] not in ("dead", "left")]
        if at_work and all(is_death):
            yield "hang"
        for step in range(self.steps):
            families = {applied[step][1] for applied in state.applied if len(applied) > step}
            if len(families) > 1:
                yield "the same step was taken in two families"
        if any(state.doing[rank][0] == "left" and len(state.applied[rank]) < self.steps for rank in RANKS):
            yield "a rank ended early"
        if len(state.families) > state.deaths + 2:
            yield "more families than losses"

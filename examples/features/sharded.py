"""Train a model whose Adam does not fit into the memory of a process, unless its state is divided among them.

    mpiexec -n 2 python sharded.py
    mpiexec -n 2 python sharded.py --whole 1

The limit is set by the operating system: at the second command, each process runs out of memory.
"""

import resource

import chainer
import chainermn
from chainermn.optimizers import AfterBackward, MultiNodeOptimizer, Sharded
from setting import batches, draw, get_device, get_digits, make_model, parse_options


def used():
    """Return how many megabytes of private memory this process has."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmData"))


def limit(megabytes):
    """Let this process have no more private memory than this; what it has now included."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(megabytes * 2**20), most))


def main():
    args = parse_options(__doc__, whole=0, width=1400, steps=10, room=136)
    comm = chainermn.create_communicator()
    device = get_device(args.device, comm)
    digits, _ = get_digits()
    model = make_model(*[args.width] * 9, device=device)
    when = AfterBackward() if args.whole else Sharded()
    optimizer = MultiNodeOptimizer(chainer.optimizers.Adam(), comm, when).setup(model)
    parameters = sum(param.array.nbytes for param in model.params()) / 2**20

    before, memory = used(), [0.0]
    # With this room, the array that does not fit leaves 5 MB free, because MPI may need memory at any time, too.
    limit(before + args.room)
    failure, loss = "", 0.0
    try:
        for batch in batches(comm, digits, 25, device, args.steps):
            optimizer.update(model, *batch)
            memory.append(used() - before)
        loss = float(model.loss.array)
    except MemoryError:
        memory.append(used() - before)
        failure = "out of memory"
    limit(used() + 1000)  # MPI and the chart need some, too
    state = sum(array.nbytes for param in model.params() for array in (param.update_rule.state or {}).values()) / 2**20
    print(f"rank {comm.rank}: parameters {parameters:.0f} MB, state {state:.0f} MB, {failure or f'loss {loss:.3f}'}")
    comm.allgather_obj(failure)  # so that no process leaves before the others have said this
    if comm.rank == 0:
        curves = {"process 0": (range(len(memory)), memory), "limit": ([0, args.steps], [args.room] * 2)}
        draw(f"{args.out}/{'whole' if args.whole else 'sharded'}.png", curves, "step", "MB beside the parameters")


if __name__ == "__main__":
    main()

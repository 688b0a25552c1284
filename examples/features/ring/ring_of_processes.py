"""A strategy: gradients travel around a ring, and each process only sends to the next one (Patarasuk and Yuan 2009)."""

import numpy as np

import mn_comm


class Ring(mn_comm.Strategy):
    """Averages an array in 2 (n - 1) rounds, in each of which every process sends 1 / n of it to the next one."""

    name = "ring"

    def mean(self, ranks, flat):
        """Overwrite an array with its mean over all ranks."""
        bounds = [flat.size * i // ranks.size for i in range(ranks.size + 1)]
        ranges = list(map(slice, bounds, bounds[1:]))
        self.reduce_scatter(ranks, flat, ranges)
        self.all_gather(ranks, flat, ranges)

    def reduce_scatter(self, ranks, flat, ranges):
        """Leave each rank with the mean of its range: partial sums move on, from rank to rank."""
        n, rank = ranks.size, ranks.rank
        for step in range(1, n):
            sent, added = ranges[(rank - step) % n], ranges[(rank - step - 1) % n]
            received = np.empty(added.stop - added.start, flat.dtype)
            pass_on(ranks, flat[sent], received)
            flat[added] += received
        flat[ranges[rank]] /= n

    def all_gather(self, ranks, flat, ranges):
        """Give all ranks the range of each: means move on, from rank to rank."""
        n, rank = ranks.size, ranks.rank
        for step in range(n - 1):
            pass_on(ranks, flat[ranges[(rank - step) % n]], flat[ranges[(rank - step - 1) % n]])


def pass_on(ranks, sent, received):
    """Send an array to the next rank, and receive one from the previous rank."""
    sending = ranks.Isend(sent, (ranks.rank + 1) % ranks.size)
    ranks.Recv(received, (ranks.rank - 1) % ranks.size)
    ranks.wait(sending, "Isend")

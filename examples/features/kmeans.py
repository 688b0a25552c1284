"""Find clusters by k-means on samples that are spread over processes, with nothing but mn_comm and NumPy.

    mpiexec -n 2 python kmeans.py

All processes find the same centres.
"""

import argparse

import numpy as np

import mn_comm


def get_points(comm, n=2000, k=4):
    """Return this process's part of points around k centres."""
    random = np.random.RandomState(0)
    centres = random.uniform(-10, 10, (k, 2))
    points = (centres[random.randint(k, size=n)] + random.standard_normal((n, 2))).astype(np.float32)
    return points[comm.rank :: comm.size]


def nearest(points, centres):
    """Return which centre is the nearest of each point, and the squared distance."""
    distances = ((points[:, np.newaxis] - centres) ** 2).sum(2)
    return distances.argmin(1), distances.min(1)


def kmeans(comm, points, k, steps):
    """Return the centres, and the mean squared distance after each step; the same on all processes."""
    candidates = comm.bcast(np.random.RandomState(1).permutation(points)[:10])
    centres, costs = candidates[:1], []
    while len(centres) < k:  # the farthest candidate is the next centre
        centres = np.concatenate([centres, candidates[nearest(candidates, centres)[1].argmax()][np.newaxis]])
    for _ in range(steps):
        labels, distances = nearest(points, centres)
        # One message: of each cluster the sum of its points and their number, then the cost.
        one_hot = np.eye(k, dtype=np.float32)[labels]
        summands = np.concatenate([(one_hot.T @ points).ravel(), one_hot.sum(0), [distances.sum()]])
        total = comm.allreduce(summands.astype(np.float32))
        sums, counts = total[: 2 * k].reshape(k, 2), total[2 * k : 3 * k]
        centres = np.where(counts[:, np.newaxis] > 0, sums / np.maximum(counts, 1)[:, np.newaxis], centres)
        costs.append(float(total[-1] / counts.sum()))
    return centres, costs


def draw(path, points, centres):
    """Draw all points, coloured by cluster."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*points.T, c=nearest(points, centres)[0], cmap="tab10", s=4)
    axes.scatter(*centres.T, c="black", marker="x", s=80)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "-o", default=".", help="the folder for the picture")
    out = parser.parse_args().out
    comm = mn_comm.create_communicator()
    points = get_points(comm)
    centres, costs = kmeans(comm, points, k=4, steps=8)
    parts = comm.gather(points)
    if comm.rank == 0:
        print("mean squared distance:", *(f"{cost:.2f}" for cost in costs))
        draw(f"{out}/kmeans.png", np.concatenate(parts), centres)


if __name__ == "__main__":
    main()

"""Find the largest eigenvalue of a matrix whose rows are spread over processes, with nothing but mn_comm and NumPy.

    mpiexec -n 2 python power_iteration.py

All processes find the same number.
"""

import argparse

import numpy as np

import mn_comm


def get_rows(comm, n):
    """Return this process's rows of a symmetric matrix with the eigenvalues 1, 1/2, 1/3 and so on."""
    basis, _ = np.linalg.qr(np.random.RandomState(0).standard_normal((n, n)))
    matrix = basis @ np.diag(1 / np.arange(1, n + 1)) @ basis.T
    return np.array_split(matrix, comm.size)[comm.rank]


def power_iteration(comm, rows, steps):
    """Yield the estimate of the largest eigenvalue after each step; the same on all processes."""
    vector = np.ones(rows.shape[1]) / np.sqrt(rows.shape[1])
    for _ in range(steps):
        # Each process multiplies its rows, and all get the whole product.
        product = np.concatenate(comm.allgather(rows @ vector))
        yield float(vector @ product)
        vector = product / np.linalg.norm(product)


def draw(path, errors):
    """Draw the error of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(errors) + 1), errors)
    axes.set(xlabel="step", ylabel="error of the largest eigenvalue")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "-o", default=".", help="the folder for the picture")
    parser.add_argument("--size", type=int, default=300, help="rows of the matrix")
    args = parser.parse_args()
    comm = mn_comm.create_communicator()
    estimates = list(power_iteration(comm, get_rows(comm, args.size), 25))
    if comm.rank == 0:
        print(f"largest eigenvalue {estimates[-1]:.9f}")
        draw(f"{args.out}/power_iteration.png", [max(abs(1 - each), 1e-17) for each in estimates])


if __name__ == "__main__":
    main()

"""Compute the mean of pictures, which train_imagenet.py subtracts from each.

python compute_mean.py pictures/train.txt --root pictures
"""

import argparse

import chainer
import numpy as np


def compute_mean(dataset):
    """Return the mean of all pictures of a dataset, which have the same size."""
    total = 0
    for picture, _ in dataset:
        total = total + picture.astype(np.float64)
    return (total / len(dataset)).astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the list: a path and a class in each line")
    parser.add_argument("--root", "-R", default=".", help="the folder that the paths start from")
    parser.add_argument("--output", "-o", default="mean.npy", help="the file for the mean")
    args = parser.parse_args()
    mean = compute_mean(chainer.datasets.LabeledImageDataset(args.dataset, args.root))
    np.save(args.output, mean)
    print(f"mean of shape {mean.shape} in {args.output}")


if __name__ == "__main__":
    main()

"""Create a folder of JPEG files, and lists of them, from pictures in scikit-learn and scikit-image.

    python make_pictures.py pictures

writes ``pictures/*.jpg``, and ``train.txt`` and ``val.txt`` beside them: a path and a class in each line. The classes
are the ten digits, and one for cut-outs of each photograph. ``train_imagenet.py`` reads such lists, also ImageNet's.
"""

import argparse
import os

import numpy as np
from PIL import Image
from skimage import data
from sklearn.datasets import load_digits, load_sample_images

PHOTOGRAPHS = ("astronaut", "camera", "coffee", "chelsea", "rocket")


def photographs():
    """Yield pictures of shape (height, width, 3) as uint8, without downloading any."""
    yield from load_sample_images().images
    for name in PHOTOGRAPHS:
        try:
            picture = getattr(data, name)()
        except (OSError, ImportError, AttributeError):  # not in this version's wheel
            continue
        yield picture if picture.ndim == 3 else np.repeat(picture[:, :, None], 3, axis=2)


def samples(n_digits, n_cuts, size):
    """Yield pictures of ``size`` by ``size`` and their classes."""
    digits = load_digits()
    for image, label in zip(digits.images[:n_digits], digits.target[:n_digits], strict=True):
        yield Image.fromarray((image * 15.9).astype(np.uint8)).resize((size, size)).convert("RGB"), int(label)
    random = np.random.RandomState(0)
    for label, picture in enumerate(photographs(), start=10):
        for _ in range(n_cuts):
            top, left = (random.randint(length - size) for length in picture.shape[:2])
            yield Image.fromarray(np.ascontiguousarray(picture[top : top + size, left : left + size])), label


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--digits", type=int, default=600, help="how many digits")
    parser.add_argument("--cuts", type=int, default=60, help="how many cut-outs of each photograph")
    parser.add_argument("--size", type=int, default=72, help="pixels in each direction")
    args = parser.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    lines = []
    for i, (picture, label) in enumerate(samples(args.digits, args.cuts, args.size)):
        picture.save(os.path.join(args.folder, f"{i:05}.jpg"), quality=95)
        lines.append(f"{i:05}.jpg {label}\n")
    for name, part in (("train", [x for i, x in enumerate(lines) if i % 6]), ("val", lines[::6])):
        with open(os.path.join(args.folder, name + ".txt"), "w") as file:
            file.writelines(part)
    print(f"{len(lines)} pictures in {args.folder}")


if __name__ == "__main__":
    main()

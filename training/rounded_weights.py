"""The embedded model with its matrices rounded to 8 and to 4 bits, as model folders.

    python -m training.rounded_weights --output generator/embedded/rounded

Every matrix of a layer is rounded by rows, symmetrically: with b bits a row w becomes s round(w / s), where
s = max |w| / (2^(b - 1) - 1), so that a row has at most 2^b - 1 values. The embedding, which is the head too, the norms
and the biases stay as they are. The rounded values are written as float32, as any loader reads them: the files take as
many bytes as the reference's. This command made the committed folders.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER

BITS = (8, 4)


def rounded_rows(matrix: Tensor, bits: int) -> Tensor:
    """Round each row of a float32 matrix, [rows, columns], to ``bits`` bits; a row of zeros stays zero."""
    most = 2 ** (bits - 1) - 1
    scale = matrix.abs().amax(1, keepdim=True) / most
    values: Tensor = (matrix / scale.where(scale > 0, 1.0)).round() * scale
    return values


def write_rounded(folder: Path, output: Path, bits: int) -> None:
    """Write a model folder with the matrices of its layers rounded; everything else stays as in ``folder``."""
    shutil.copytree(folder, output, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    matrices = {name for name, tensor in tensors.items() if ".layers." in name and tensor.ndim == 2}
    tensors |= {name: rounded_rows(tensors[name], bits) for name in matrices}
    file = output / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    shutil.copymode(folder / file.name, file)


def main() -> None:
    """Write the embedded model rounded to each number of bits in ``BITS``, and print the folders."""
    parser = argparse.ArgumentParser(description="Write the embedded model with rounded weights.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model folders")
    output = parser.parse_args().output
    for bits in BITS:
        write_rounded(EMBEDDED_FOLDER, output / f"int{bits}", bits)
        print(output / f"int{bits}")


if __name__ == "__main__":
    main()

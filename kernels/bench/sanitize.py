"""Every CUDA kernel once on a small weight, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python sanitize.py
compute-sanitizer --tool racecheck python sanitize.py
"""

from __future__ import annotations

import torch

from memreclaim_kernels import cuda, testing
from memreclaim_kernels.blocks import WeightShape
from memreclaim_kernels.cuda._large import SQUARE, WIDE, Tile, launch_chain
from memreclaim_kernels.cuda._mid import Ring, launch_mid

SHAPE = WeightShape(2, 256, 1024)
GEMV_SHAPE = WeightShape(2, 256, 4096)
RINGS = (Ring(16, 16, 256, 4), Ring(48, 32, 128, 8, 16), Ring(48, 64, 256, 4, 16))
TILES = (Tile(wg=1, bn=64, cw=2, ca=1, bk=128, stages=8, min_blocks=1), SQUARE, WIDE)


def result(rows: int, shape: WeightShape) -> torch.Tensor:
    """An output."""
    return torch.empty((rows, shape.groups, shape.rank), dtype=torch.bfloat16, device="cuda")


def main() -> None:
    """Encode, prove, dequantise, and project with every family and block shape, odd row counts included."""
    codes, exponents = testing.generate_twin(SHAPE, device="cuda")
    weight = torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda")
    verdict = torch.empty(2, dtype=torch.int64, device="cuda")
    cuda.dequantize(codes, exponents, weight)
    cuda.encode(weight, codes, exponents)
    cuda.prove(codes, exponents, weight, verdict)
    assert verdict.tolist() == [0, -1], verdict
    o = torch.randn(5, 2, 1024, device="cuda").bfloat16()
    cuda.small(o, codes, exponents, result(5, SHAPE))
    q, scales = (
        torch.empty(5, 512, dtype=torch.uint8, device="cuda"),
        torch.empty(2048, dtype=torch.uint8, device="cuda"),
    )
    cuda.small_mxfp8(o, codes, exponents, q, scales)
    twin = testing.generate_twin(GEMV_SHAPE, device="cuda")
    torch.cuda.synchronize()
    cuda.gemv(torch.randn(1, 2, 4096, device="cuda").bfloat16(), *twin, result(1, GEMV_SHAPE))
    if torch.cuda.get_device_capability() == (9, 0):
        for shape in (*RINGS, *TILES):
            rows = 29 if isinstance(shape, Ring) else 70
            many = torch.randn(rows, 2, 1024, device="cuda").bfloat16()
            out = result(rows, SHAPE)
            if isinstance(shape, Ring):
                launch_mid(many, codes, exponents, out, shape)
            else:
                launch_chain(many, codes, exponents, out, shape)
            expected = torch.bmm(many.double().transpose(0, 1), weight.double().transpose(1, 2)).transpose(0, 1)
            error = float((out.double() - expected).norm() / expected.norm())
            print(shape, error, flush=True)
            assert error < 2e-3  # noqa: PLR2004 - bf16 rounding
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

// A slow, plain kernel that adds in a stated order, to find out in which order a library adds.
//
// One warp per 16 weight rows x 8 tokens and split of K: ascending k16 steps of mma.sync, one fp32 accumulator.
#include "common.cuh"

// Grid (R / 16, ceil(T / 8), G * splits), 32 threads. x: bf16 [T, G, D]; w: bf16 [G, R, D]; partial: fp32 [splits, T,
// G, R]. Split s sums columns [s * width, min((s + 1) * width, D)).
extern "C" __global__ void __launch_bounds__(32)
    partial_sums(const u16 *x, const u16 *w, float *partial, int tokens, int groups, int rank, int depth, int width) {
    int lane = lane_id(), g = lane / 4, t = lane % 4, group = blockIdx.z % groups, split = blockIdx.z / groups;
    int token = blockIdx.y * 8 + g;
    const u16 *a = w + (static_cast<long long>(group) * rank + blockIdx.x * 16 + g) * depth + 2 * t;
    const u16 *b = x + (static_cast<long long>(token < tokens ? token : 0) * groups + group) * depth + 2 * t;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    int end = min((split + 1) * width, depth);
    for (int k = split * width; k < end; k += 16) {
        u32 b0 = *reinterpret_cast<const u32 *>(b + k), b1 = *reinterpret_cast<const u32 *>(b + k + 8);
        if (token >= tokens) b0 = b1 = 0;
        mma_m16n8k16(c, *reinterpret_cast<const u32 *>(a + k), *reinterpret_cast<const u32 *>(a + k + 8 * depth),
                     *reinterpret_cast<const u32 *>(a + k + 8), *reinterpret_cast<const u32 *>(a + k + 8 * depth + 8),
                     b0, b1);
    }
    for (int i = 0; i < 4; ++i) {
        int row = blockIdx.x * 16 + g + i / 2 * 8, at = blockIdx.y * 8 + 2 * t + i % 2;
        if (at < tokens) partial[((static_cast<long long>(split) * tokens + at) * groups + group) * rank + row] = c[i];
    }
}

// Compares what the serving kernels decode with the bf16 weight, on 16-bit patterns; nothing decoded is stored.
#include "common.cuh"

constexpr int WARPS = 8, TILES = 4;
constexpr u64 NONE = ~0ull; // reads as -1: no mismatch

extern "C" __global__ void prove_begin(u64 *result) {
    result[0] = 0;
    result[1] = NONE;
}

DEVICE void compare_pair(u32 decoded, u32 stored, u64 index, u32 &count, u64 &first) {
    u32 differs = decoded ^ stored;
    if (differs == 0) return;
    count += ((differs & 0xffffu) != 0) + ((differs >> 16) != 0);
    u64 at = index + ((differs & 0xffffu) == 0);
    if (at < first) first = at;
}

// Grid (R * D / 512 / 32, G), 256 threads; D a multiple of 128. weight: bf16 [G, R, D], contiguous.
// result: int64 [2], mismatches and flat index of the first or -1; prove_begin has run before.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)
    prove(const u8 *codes, const u8 *exponents, const u16 *weight, u64 *result, int rank, int depth) {
    __shared__ u32 counts[WARPS];
    __shared__ u64 firsts[WARPS];
    int lane = lane_id(), group = blockIdx.y, column_tiles = depth / 32;
    int begin = (blockIdx.x * WARPS + warp_id()) * TILES;
    int row_tile = begin / column_tiles, column_tile = begin % column_tiles;
    const u8 *src =
        codes + (static_cast<long long>(group) * (rank / 16) * column_tiles + begin) * TILE_BYTES + lane * 16;
    const u8 *block =
        exponents + (static_cast<long long>(group) * (rank / 32) + row_tile / 2) * column_tiles + column_tile;
    u64 origin = (static_cast<u64>(group) * rank + row_tile * 16 + lane / 4) * depth + column_tile * 32 + lane % 4 * 8;
    u32 count = 0;
    u64 first = NONE;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        uint4 words = load_stream(src + i * TILE_BYTES);
        uint4 upper = load_stream(weight + origin + i * 32),
              lower = load_stream(weight + origin + i * 32 + 8ull * depth);
        transpose_quad(words);
        const u32 w[4] = {words.x, words.y, words.z, words.w};
        const u32 up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a, b;
            decode_word_checked(w[j], block[i], a, b);
            compare_pair(a, up[j], origin + i * 32 + 2 * j, count, first);
            compare_pair(b, low[j], origin + i * 32 + 2 * j + 8ull * depth, count, first);
        }
    }
    count = __reduce_add_sync(~0u, count);
    for (int step = 16; step > 0; step /= 2) {
        u64 other = __shfl_xor_sync(~0u, first, step);
        if (other < first) first = other;
    }
    if (lane == 0) {
        counts[warp_id()] = count;
        firsts[warp_id()] = first;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    u64 total = 0;
    for (int i = 0; i < WARPS; ++i) {
        total += counts[i];
        if (firsts[i] < first) first = firsts[i];
    }
    if (total == 0) return;
    atomicAdd(result, total);
    atomicMin(result + 1, first);
}

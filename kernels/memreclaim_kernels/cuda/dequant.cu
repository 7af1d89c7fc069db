// Twin -> bf16 weight. Bytes moved: 1 read and 2 written per element.
#include "common.cuh"

// Full occupancy: 7.2 us a layer of two groups against 7.8 with 4 tiles and half of it (H200). Gathering rows of 512
// bytes in shared memory first, or streaming stores, changed it by less than 0.1 us into one buffer and cost 0.4 into
// distinct ones.
constexpr int WARPS = 8, TILES = 2;

// Grid (R * D / 512 / 16, G), 256 threads; D a multiple of 64. out: bf16 [G, R, D], contiguous.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 8)
    dequant(const u8 *codes, const u8 *exponents, u16 *out, int rank, int depth) {
    int lane = lane_id(), group = blockIdx.y, column_tiles = depth / 32;
    int first = (blockIdx.x * WARPS + warp_id()) * TILES; // a warp's tiles stand in one row of tiles
    int row_tile = first / column_tiles, column_tile = first % column_tiles;
    const u8 *src =
        codes + (static_cast<long long>(group) * (rank / 16) * column_tiles + first) * TILE_BYTES + lane * 16;
    const u8 *block =
        exponents + (static_cast<long long>(group) * (rank / 32) + row_tile / 2) * column_tiles + column_tile;
    uint4 words[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) words[i] = load_stream(src + i * TILE_BYTES);
    u32 scale = *reinterpret_cast<const u16 *>(block);
    u16 *dst = out + (static_cast<long long>(group) * rank + row_tile * 16 + lane / 4) * depth + column_tile * 32 +
               lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        transpose_quad(words[i]);
        u32 e = scale >> 8 * i & 255u;
        uint4 upper, lower;
        decode_word_checked(words[i].x, e, upper.x, lower.x);
        decode_word_checked(words[i].y, e, upper.y, lower.y);
        decode_word_checked(words[i].z, e, upper.z, lower.z);
        decode_word_checked(words[i].w, e, upper.w, lower.w);
        *reinterpret_cast<uint4 *>(dst + i * 32) = upper;
        *reinterpret_cast<uint4 *>(dst + 8 * depth + i * 32) = lower;
    }
}
